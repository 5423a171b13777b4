from __future__ import annotations

import re
from pathlib import Path

import pytest
from remote.servers import Server, s3_environment

from chatmill.remote.objects import read, write

CHAT = '{"messages": [{"role": "user", "content": "hi %d"}, {"role": "assistant", "content": "yo"}]}\n'
RECORDS = "".join(CHAT % number for number in range(50))


@pytest.mark.parametrize("store", ["rclone", "gs", "az"])
def test_a_dataset_in_any_store_has_the_same_bytes_as_a_local_one(run, store, request):
    bucket = request.getfixturevalue(store).bucket()
    Path("chat.jsonl").write_text(RECORDS)
    write(bucket / "in/chat.jsonl", RECORDS.encode())
    assert run("prepare", "chat.jsonl", "-o", "v1")[0] == 0
    assert run("prepare", f"{bucket}/in/*.jsonl", "-o", f"{bucket}/v1", "--workers", "1")[0] == 0
    assert read(bucket / "v1/dataset_metadata.json") == Path("v1/dataset_metadata.json").read_bytes()
    assert run("verify", f"{bucket}/v1", "--full")[0] == 0
    code, _, err = run("prepare", "chat.jsonl", "-o", f"{bucket}/v1")
    assert (code, err) == (1, f"chatmill: {bucket}/v1: already exists; use another name or pass --overwrite\n")


def test_every_command_reports_wrong_credentials_in_one_line(run, rclone_server):
    bucket = rclone_server.bucket()
    Path("chat.jsonl").write_text(RECORDS)
    with Server(0, s3_environment(rclone_server.endpoint, "a-wrong-key", "a-wrong-secret")).in_environment():
        for line in ("check URL.jsonl", "prepare chat.jsonl -o URL", "verify URL", "stats URL", "clean URL"):
            code, out, err = run(*line.replace("URL", f"{bucket}/x").split(" "))
            # `verify` prints faults to stdout.
            told = re.fullmatch(r"(chatmill: )?s3://[^\n]+; check the credentials and their permissions\n", out + err)
            assert (code, told is not None) == (1, True), f"{line}\n{out}\n{err}"
            assert "wrong" not in out + err
