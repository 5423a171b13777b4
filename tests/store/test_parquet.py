from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict

import numpy as np
import pyarrow.parquet
import pytest
from chat_datasets import chat, chats, contents, names, rows_of, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from store_fixtures import some_rows, write_dataset

from chatmill.errors import DataError
from chatmill.records import Message, Record
from chatmill.store import parquet as module
from chatmill.store.parquet import Exported, export_parquet
from chatmill.store.read import open_dataset

COLUMNS = ["input_ids", "labels", "position_ids", "seq_lengths"]


def read(folder, split="train") -> list[dict]:
    files = sorted((folder / "data").glob(f"{split}-*.parquet"))
    return [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]


def expected(rows) -> list[dict]:
    found = []
    for row in (rows[at : at + 1] for at in range(len(rows))):
        lengths = [n for n in np.diff(row.segment_start).tolist() if n]
        positions = [position for length in lengths for position in range(length)]
        labels = [
            int(target) if weight > 0 and position else -100
            for target, weight, position in zip(row.targets(), row.weights(), positions, strict=True)
        ]
        columns = (row.ids.tolist(), labels, positions, lengths)
        found.append(dict(zip(COLUMNS, columns, strict=True)))
    return found


def test_all_columns_of_a_packed_row(tmp_path):
    rows = rows_of([chat("a", "b"), chat("c", "d")], format="primer", pack=12)
    write_rows(tmp_path / "v1", {"train": rows}, format="primer")
    done = export_parquet(tmp_path / "v1", tmp_path / "out")
    usr, asst, eot = 261, 262, 263
    assert read(tmp_path / "out") == [
        {
            "input_ids": [usr, 97, eot, asst, 98, eot, usr, 99, eot, asst, 100, eot],
            "labels": [-100, -100, -100, -100, 98, eot, -100, -100, -100, -100, 100, eot],
            "position_ids": [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5],
            "seq_lengths": [6, 6],
        }
    ]
    assert done == {"train": Exported(rows=1, conversations=2, tokens=12, trained=4, weighted=0, files=1)}


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), tokens=st.integers(1, 300))
def test_every_kind_of_row_of_every_split_is_exported(tmp_path_factory, seed, tokens):
    folder = tmp_path_factory.mktemp("parquet")
    splits = {"train": some_rows(seed), "val": some_rows(seed + 1, count=5)}
    write_dataset(folder / "v1", splits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TOKENS", tokens)
        done = export_parquet(folder / "v1", folder / "out")
    for split, rows in splits.items():
        found = read(folder / "out", split)
        assert found == expected(rows)
        assert done[split].trained == sum(label != -100 for row in found for label in row["labels"])
        assert done[split].weighted == sum(
            weight == 0.5 and position > 0
            for weight, position in zip(rows.weights().tolist(), rows.positions().tolist(), strict=True)
        )


def test_a_first_token_is_never_a_label_even_if_it_is_trained(tmp_path):
    rows = rows_of([chat("a", "b")], format="primer")
    rows.spans["weight"] = 1
    write_rows(tmp_path / "v1", {"train": rows}, format="primer")
    export_parquet(tmp_path / "v1", tmp_path / "out")
    assert read(tmp_path / "out")[0]["labels"] == [-100, *rows.ids[1:].tolist()]


def test_each_shard_is_one_file_and_only_requested_splits_are_exported(tmp_path):
    write_rows(tmp_path / "v1", {"train": rows_of(chats(0, 30)), "val": rows_of(chats(1, 3))}, shard_tokens=1500)
    shards = len(open_dataset(tmp_path / "v1")["train"].shards)
    assert shards > 1
    export_parquet(tmp_path / "v1", tmp_path / "out", splits=["train"])
    assert names(tmp_path / "out") == ["README.md", "chatmill_export.json", "data"]
    assert names(tmp_path / "out/data") == [f"train-{n:05d}-of-{shards:05d}.parquet" for n in range(shards)]
    with pytest.raises(DataError, match="has no split test; expected train, val"):
        export_parquet(tmp_path / "v1", tmp_path / "other", splits=["test"])
    assert names(tmp_path) == ["out", "v1"]


def test_the_card_describes_the_export_and_the_manifest_names_its_dataset(tmp_path):
    made = write_rows(tmp_path / "v1", {"train": rows_of([chat("hi", "yo")]), "val": rows_of([chat("so", "no")])})
    done = export_parquet(tmp_path / "v1", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    head, _, text = card.partition("\n---\n")
    assert head == (
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - split: train\n    path: data/train-*.parquet\n  - split: validation\n    path: data/val-*.parquet"
    )
    train = done["train"]
    assert f"| train | 1 | 1 | {train.tokens} | {train.trained} | {train.trained / train.tokens:.1%} |" in text
    stored = made.ledger.total("stored")
    for said in (
        made.sha256,
        made.tokenizer["sha256"],
        "`chatml`",
        f"| stored |  | 2 | {stored.tokens} | {stored.trained} |",
        '"train_on": "assistant"',
    ):
        assert said in text
    manifest = json.loads((tmp_path / "out/chatmill_export.json").read_text())
    assert len(manifest.pop("sha256")) == 64
    assert manifest == {
        "schema": "chatmill-export",
        "schema_version": 1,
        "dataset_sha256": made.sha256,
        "splits": {name: asdict(split) for name, split in done.items()},
        "files": {
            name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in contents(tmp_path / "out").items()
            if name != "chatmill_export.json"
        },
    }


def test_weights_that_labels_cannot_express_are_counted_and_reported(tmp_path):
    half = Record([Message("user", "a"), Message("assistant", "b", weight=0.5)])
    write_rows(tmp_path / "v1", {"train": rows_of([half, chat("c", "d")])})
    done = export_parquet(tmp_path / "v1", tmp_path / "out")
    assert done["train"].weighted == 2
    assert "2 trained tokens had a weight other than 1" in (tmp_path / "out/README.md").read_text()


def test_a_dataset_of_another_program_is_also_exported(tmp_path):
    for name, data in (
        ("tokens.bin", np.array([5, 6, 7, 8, 9], "<u2")),
        ("mask.bin", np.array([0, 1, 1, 1, 1], "u1")),
        ("episodes.idx", np.array([0, 3, 3, 2], "<u8")),
    ):
        path = tmp_path / "v1/train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data.tofile(path)
    export_parquet(tmp_path / "v1", tmp_path / "out")
    assert [row["labels"] for row in read(tmp_path / "out")] == [[-100, 6, 7], [-100, 9]]


def test_exports_are_reproducible_and_replaced_only_on_request(tmp_path):
    write_rows(tmp_path / "v1", {"train": rows_of(chats(0, 10))})
    export_parquet(tmp_path / "v1", tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(DataError, match="already exists"):
        export_parquet(tmp_path / "v1", tmp_path / "out")
    export_parquet(tmp_path / "v1", tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == before
    (tmp_path / "out/README.md").write_text("a card that somebody wrote")
    with pytest.raises(
        DataError, match=r"out: is not replaced, because chatmill_export\.json does not list README\.md"
    ):
        export_parquet(tmp_path / "v1", tmp_path / "out", overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/README.md").write_text("not an export")
    with pytest.raises(DataError, match=r"has no chatmill_export\.json"):
        export_parquet(tmp_path / "v1", tmp_path / "mine", overwrite=True)


def test_a_failed_export_leaves_nothing(tmp_path):
    rows = rows_of(chats(0, 10))
    write_rows(tmp_path / "v1", {"train": rows}, shard_tokens=10**6)
    index = tmp_path / "v1/train/shard_00000/episodes.idx"
    entries = np.fromfile(index, "<u8")
    entries[-2] = 10**9
    entries.tofile(index)
    with pytest.raises(DataError, match="run chatmill verify"):
        export_parquet(tmp_path / "v1", tmp_path / "out")
    assert names(tmp_path) == ["v1"]


def test_without_pyarrow_one_error_line_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'chatmill\[parquet\]'"):
        export_parquet(tmp_path / "v1", tmp_path / "out")
