from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatmill.remote import objects
from chatmill.store.layout import METADATA

CHAT = '{"messages": [{"role": "user", "content": "hi %d"}, {"role": "assistant", "content": "yo"}]}\n'


@pytest.fixture
def bucket(run, s3, tmp_path, monkeypatch):
    monkeypatch.setenv("CHATMILL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    Path("chat.jsonl").write_text("".join(CHAT % number for number in range(20)))
    url = s3.bucket()
    assert run("prepare", "chat.jsonl", "-o", "v1", "--val-split", "0.3")[0] == 0
    code, out, err = run("prepare", "chat.jsonl", "-o", f"{url}/v1", "--val-split", "0.3")
    assert code == 0, err
    assert f"{url}/v1/train: " in out
    assert objects.read(url / "v1" / METADATA) == Path("v1", METADATA).read_bytes()
    return url


READING = """
verify DIR
verify DIR --full
verify DIR --full --json
stats DIR
stats DIR --json
show DIR
show DIR 1 --decode
show DIR --search hi --json
explain DIR 1:2
order DIR --first 5
order DIR --find 3 --json
diff DIR v1
diff v1 DIR --json
report DIR -o OUT.html
export parquet DIR -o OUT-parquet
removed DIR
reweigh DIR --train-on all -o OUT-all
"""


def test_commands_print_the_same_for_a_dataset_at_a_url(run, bucket):
    for line in filter(None, READING.splitlines()):
        results = []
        for name in ("v1", f"{bucket}/v1"):
            out = "remote" if "://" in name else "local"
            code, printed, err = run(*line.replace("DIR", name).replace("OUT", out).split())
            texts = (text.replace(f"{bucket}/v1", "v1").replace(out, "OUT") for text in (printed, err))
            results.append((code, *texts))
        local, remote = results
        if line.startswith("reweigh"):
            # Compare only the first line: the second line counts hard links, which object stores do not have.
            local, remote = ((code, out.splitlines()[0]) for code, out, _ in results)
        assert local == remote, line
        assert local[0] == 0, line
    for name in ("parquet/data", "all/train/shard_00000"):
        for path in sorted(Path(f"local-{name}").iterdir()):
            assert path.read_bytes() == Path(f"remote-{name}", path.name).read_bytes()


def test_a_build_to_a_url_supports_overwrite_and_json(run, bucket):
    url = f"{bucket}/v1"
    assert run("prepare", "chat.jsonl", "-o", url) == (
        1,
        "",
        f"chatmill: {url}: already exists; use another name or pass --overwrite\n",
    )
    code, out, _ = run("prepare", "chat.jsonl", "-o", f"{url}/", "--overwrite", "--json")
    assert (code, json.loads(out)["path"]) == (0, url)
    code, out, err = run("prepare", "chat.jsonl", "-o", "hf://datasets/org/name")
    assert (code, out) == (2, "")
    assert err.startswith("chatmill: hf://datasets/org/name: hf:// can only be read; ")


def test_rejects_of_a_build_to_a_url_go_to_a_local_file_or_to_a_url(run, bucket):
    with Path("chat.jsonl").open("a") as file:
        file.write("no json\n")
    code, out, err = run("prepare", "chat.jsonl", "-o", f"{bucket}/v2", "--on-error", "skip")
    assert code == 0, err
    assert out.endswith("1 record was rejected; see v2.rejects.jsonl\n")
    words = ("prepare", "chat.jsonl", "-o", f"{bucket}/v3", "--on-error", "skip", "--rejects", f"{bucket}/v3.jsonl")
    code, out, err = run(*words)
    assert code == 0, err
    assert out.endswith(f"1 record was rejected; see {bucket}/v3.jsonl\n")
    assert objects.read(bucket / "v3.jsonl") == Path("v2.rejects.jsonl").read_bytes()
    code, out, err = run(*words)
    assert (code, out) == (1, "")
    assert "already exists" in err
    code, _, err = run(*words, "--overwrite")
    assert code == 0, err
    objects.write(bucket / "v3.jsonl", b"mine\n")
    code, _, err = run(*words, "--overwrite")
    assert code == 1
    assert f"{bucket}/v3.jsonl: is not a rejects file, so it is not replaced" in err


def test_clean_counts_and_removes_leftovers(run, bucket):
    url = f"{bucket}/v1"
    assert run("prepare", "chat.jsonl", "-o", url, "--overwrite", "--train-on", "all")[0] == 0
    objects.write(bucket / "v1/mine.txt", b"mine")
    code, out, err = run("clean", url, "--older-than", "0", "--dry-run", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    left = told["removed"]
    assert left["objects"] > 0
    assert told["others"] == {"objects": 1, "bytes": 4}
    code, out, _ = run("clean", url)
    assert f"\n{left['objects']} unused objects kept: newer than 24h ({left['bytes']:,} bytes)\n" in out
    code, out, _ = run("clean", url, "--older-than", "0s")
    lines = out.splitlines()
    assert lines[0] == f"{told['used']['objects']} objects in use at {url} ({told['used']['bytes']:,} bytes)"
    assert lines[1] == f"{left['objects']} unused objects removed ({left['bytes']:,} bytes)"
    assert run("verify", url, "--full")[0] == 0
    assert json.loads(run("clean", url, "--older-than", "0", "--json")[1])["removed"] == {"objects": 0, "bytes": 0}
    code, out, err = run("clean", url, "--older-than", "soon")
    assert (code, out) == (2, "")
    assert err == 'chatmill: --older-than is "soon"; expected a number followed by s, m, h or d, such as 24h\n'


def test_a_file_of_a_dataset_a_missing_bucket_and_a_web_server_are_reported_in_one_line(run, bucket):
    for name in (f"{bucket}/v1", "v1"):
        wrong = f"chatmill: {name}/dataset_metadata.json: is a file inside a dataset; pass its folder, {name}\n"
        assert run("verify", f"{name}/dataset_metadata.json") == (2, "", wrong)
    code, _, err = run("prepare", f"{bucket}/chat.jsonl", "-o", "s3://no-bucket/v1")
    assert (code, err) == (
        1,
        "chatmill: s3://no-bucket/v1: the bucket no-bucket does not exist; create it or check its name\n",
    )
    wrong = "objects at https:// cannot be removed; use s3://, gs://, az:// or a local path\n"
    assert run("clean", "https://example.org/v1") == (2, "", f"chatmill: https://example.org/v1: {wrong}")


def test_clean_removes_what_a_killed_local_build_left(run, monkeypatch):
    Path("chat.jsonl").write_text(CHAT % 1)

    def stopped(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("chatmill.prepare.pipeline.publish", stopped)
        assert run("prepare", "chat.jsonl", "-o", "v9")[0] == 130
    assert Path(".v9.building.units").is_dir()
    assert "files of unfinished builds kept: newer than 24h" in run("clean", "v9")[1]
    assert Path(".v9.building.units").is_dir()
    code, out, _ = run("clean", "v9", "--older-than", "0")
    assert code == 0
    assert "files of unfinished builds on this machine removed" in out
    assert not list(Path().glob(".v9*"))
    assert run("clean", "v9")[1] == "0 files of unfinished builds on this machine removed (0 bytes)\n"
