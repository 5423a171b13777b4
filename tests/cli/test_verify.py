from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from plain_rows import build

from chatmill.cli.main import main
from chatmill.ledger import Ledger
from chatmill.store.metadata import Metadata, write_metadata
from chatmill.store.publish import publish, staging_for
from chatmill.store.write import SplitWriter


@pytest.fixture
def dataset(tmp_path) -> Path:
    rows = build([[(("a", 1), [([5, 6], 1, 0, 0.0, 0, -1), ([7], 2, 1, 1.0, 0, -1)])]] * 3)
    staging = staging_for(tmp_path / "x")
    with SplitWriter(staging / "train", vocab_size=10, shard_tokens=6) as writer:
        writer.append(rows)
        splits = {"train": writer.close()}
    write_metadata(
        staging,
        Metadata(
            vocab_size=10,
            format={},
            tokenizer={"name": "bytes", "sha256": "0" * 64},
            special_token_ids={},
            pad_token_id=None,
            splits=splits,
            ledger=Ledger(),
            config={},
        ),
        tokenizer_state={},
    )
    publish(staging, tmp_path / "x", overwrite=False)
    return tmp_path / "x"


def run(monkeypatch, capsys, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["chatmill", "verify", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr()
    return ended.value.code or 0, out.out, out.err


def test_an_intact_dataset_is_ok_with_its_counts(monkeypatch, capsys, dataset):
    sha256 = json.loads((dataset / "dataset_metadata.json").read_text())["sha256"]
    for flags, read in (([], ""), (["--full"], ", every byte read")):
        assert run(monkeypatch, capsys, str(dataset), *flags) == (
            0,
            f"OK: {dataset} (sha256 {sha256}){read}\ntrain: 3 episodes, 9 tokens, 3 trained, 2 shards\n",
            "",
        )
    code, out, _ = run(monkeypatch, capsys, str(dataset), "--json")
    assert code == 0
    assert json.loads(out) == {
        "ok": True,
        "full": False,
        "sha256": sha256,
        "splits": {"train": {"episodes": 3, "tokens": 9, "trained": 3, "shards": 2}},
        "faults": [],
    }


def test_every_fault_is_reported_in_one_line_and_the_exit_code_is_1(monkeypatch, capsys, dataset):
    for shard in ("shard_00000", "shard_00001"):
        path = dataset / "train" / shard / "tokens.bin"
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    assert run(monkeypatch, capsys, str(dataset))[0] == 0
    code, out, err = run(monkeypatch, capsys, str(dataset), "--full")
    assert (code, err) == (1, "")
    assert [line.split(": ")[0] for line in out.splitlines()] == [
        f"{dataset}/train/shard_00000/tokens.bin",
        f"{dataset}/train/shard_00001/tokens.bin",
    ]
    code, out, _ = run(monkeypatch, capsys, str(dataset), "--full", "--json")
    assert code == 1
    assert not json.loads(out)["ok"] and len(json.loads(out)["faults"]) == 2


def test_a_folder_that_is_not_a_dataset_is_reported_in_one_line(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, capsys, str(tmp_path / "none")) == (
        1,
        f"{tmp_path}/none: no such folder; expected a dataset\n",
        "",
    )
