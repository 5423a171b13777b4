from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from chat_datasets import chat, chats, contents, names, rows_of, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from store_fixtures import some_rows, write_dataset

from chatmill.errors import DataError, UsageError
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.records import Message, Record
from chatmill.rows import Rule, TrainOn
from chatmill.store import files
from chatmill.store import reweigh as module
from chatmill.store.read import open_dataset
from chatmill.store.reweigh import reweigh_dataset
from chatmill.store.verify import verify_dataset

SHARED = ("tokens.bin", "episodes.idx", "origins.bin")


def all_rows(path: Path, split: str = "train"):
    episodes = open_dataset(path)[split]
    return episodes.rows(np.arange(len(episodes)))


@pytest.fixture
def dataset(tmp_path) -> Path:
    write_rows(tmp_path / "v1", {"train": rows_of(chats(0, 20)), "val": rows_of(chats(1, 3), pack=400)})
    return tmp_path / "v1"


@pytest.mark.parametrize("train_on", get_args(TrainOn))
def test_the_mask_equals_that_of_rows_rendered_with_the_same_train_on(dataset, train_on):
    new = dataset.with_name("v2")
    reweigh_dataset(dataset, new, train_on=train_on)
    assert verify_dataset(new, full=True).faults == ()
    for split, rows in (
        ("train", rows_of(chats(0, 20), train_on=train_on)),
        ("val", rows_of(chats(1, 3), train_on=train_on, pack=400)),
    ):
        found = all_rows(new, split)
        assert np.array_equal(found.spans, rows.spans)
        assert np.array_equal(found.ids, rows.ids)
        assert np.array_equal(found.origins, rows.origins)


def test_reweighing_back_restores_all_bytes_except_the_metadata(dataset):
    reweigh_dataset(dataset, dataset.with_name("last"), train_on="last")
    reweigh_dataset(dataset.with_name("last"), dataset.with_name("back"), train_on="assistant")
    old, new = contents(dataset), contents(dataset.with_name("back"))
    assert old.pop("dataset_metadata.json") != new.pop("dataset_metadata.json")
    assert old == new


def test_token_files_are_shared_but_spans_and_mask_are_not(dataset):
    done = reweigh_dataset(dataset, dataset.with_name("v2"), train_on="all")
    files = [path.relative_to(dataset) for path in dataset.rglob("*.*") if path.is_file()]
    same = {path for path in files if (dataset / path).samefile(dataset.with_name("v2") / path)}
    assert same == {path for path in files if path.name in SHARED}
    assert (done.linked, done.copied) == (len(same), 0)


def test_only_weights_set_by_role_change_and_targets_are_kept(tmp_path):
    rows = some_rows(3)
    rows.spans["weight"][rows.spans["rule"] == Rule.ROLE] = 1
    write_dataset(tmp_path / "v1", {"train": rows})
    reweigh_dataset(tmp_path / "v1", tmp_path / "v2", train_on="all")
    assert verify_dataset(tmp_path / "v2", full=True).faults == ()
    old, new = all_rows(tmp_path / "v1").spans, all_rows(tmp_path / "v2").spans
    decided = old["rule"] == Rule.ROLE
    assert np.array_equal(old[~decided], new[~decided])
    assert np.array_equal(old["target"], new["target"])
    assert np.array_equal(new["weight"][decided], (old["role"] != 255)[decided])


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), train_on=st.sampled_from(get_args(TrainOn)), stretch=st.integers(1, 5))
def test_reweighing_a_dataset_equals_rows_reweigh_for_any_chunk_size(tmp_path_factory, seed, train_on, stretch):
    folder = tmp_path_factory.mktemp("reweigh")
    write_dataset(folder / "v1", {"train": some_rows(seed)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SEGMENTS", stretch)
        patch.setattr(module, "TOKENS", stretch)
        reweigh_dataset(folder / "v1", folder / "v2", train_on=train_on)
    assert np.array_equal(all_rows(folder / "v2").spans, all_rows(folder / "v1").reweigh(train_on).spans)
    assert verify_dataset(folder / "v2", full=True).faults == ()


def test_the_metadata_records_train_on_the_parent_and_the_trained_tokens(dataset):
    parent = open_dataset(dataset).metadata
    done = reweigh_dataset(dataset, dataset.with_name("v2"), train_on="last")
    found = open_dataset(dataset.with_name("v2")).metadata
    assert found.sha256 == done.metadata.sha256
    assert found.config == {**parent.config, "train_on": "last", "reweighed_from": parent.sha256}
    trained = sum(split.num_trained_tokens for split in found.splits.values())
    assert found.ledger.total("stored").trained == trained
    assert trained == sum(int(all_rows(dataset.with_name("v2"), split).mask().sum()) for split in ("train", "val"))
    assert found.ledger.total("rendered") == parent.ledger.total("rendered")


def test_conversations_without_trained_tokens_are_counted(tmp_path):
    flagged = Record([Message("user", "a"), Message("assistant", "b"), Message("assistant", "c", weight=0.0)], line=2)
    write_rows(tmp_path / "v1", {"train": rows_of([chat("hi", "yo"), flagged])})
    done = reweigh_dataset(tmp_path / "v1", tmp_path / "v2", train_on="last")
    assert done.untrained == 1
    noted = open_dataset(tmp_path / "v2").metadata.ledger.to_json()["noted"]
    assert noted == {"no_trained_tokens": {"rows": 1, "tokens": int(rows_of([flagged]).lengths[0]), "trained": 0}}
    back = reweigh_dataset(tmp_path / "v2", tmp_path / "v3", train_on="assistant")
    assert back.untrained == 0
    assert "noted" not in open_dataset(tmp_path / "v3").metadata.ledger.to_json()


def test_neither_dataset_is_harmed_when_the_other_is_replaced_or_removed(dataset):
    new, newer = dataset.with_name("v2"), dataset.with_name("v3")
    reweigh_dataset(dataset, new, train_on="last")
    reweigh_dataset(dataset, newer, train_on="all")
    before, before_newer = contents(new), contents(newer)
    write_rows(dataset, {"train": rows_of(chats(7, 9))}, overwrite=True)
    assert contents(new) == before
    reweigh_dataset(dataset, new, train_on="all", overwrite=True)
    assert contents(newer) == before_newer
    shutil.rmtree(dataset)
    assert verify_dataset(new, full=True).faults == verify_dataset(newer, full=True).faults == ()


@pytest.mark.parametrize("fit", ["windows", "blocks"])
def test_pieces_of_conversations_cannot_be_reweighed_by_last_answer(tmp_path, monkeypatch, fit):
    monkeypatch.chdir(tmp_path)
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(6) for role in ("user", "assistant")]
    Path("chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    format = {"format": "post-training"} if fit == "blocks" else {}
    prepare_dataset(Job((InputSource(("chat.jsonl",)),), max_tokens=90, fit=fit, **format), Path("v1"))
    for train_on in ("last", "last-exchange"):
        with pytest.raises(UsageError, match=rf"^v1: its rows are parts of .*dataset with --train-on {train_on} "):
            reweigh_dataset("v1", "v2", train_on=train_on)
    reweigh_dataset("v1", "v2", train_on="all")
    prepare_dataset(Job((InputSource(("chat.jsonl",)),), max_tokens=900, fit="windows"), Path("whole"))
    assert all_rows(reweighed("whole")).mask().sum() == len("assistant 5") + 1


def reweighed(path: str) -> Path:
    reweigh_dataset(path, f"{path}-last", train_on="last")
    return Path(f"{path}-last")


def test_a_dataset_can_be_reweighed_in_place(dataset):
    expected = contents(dataset)
    reweigh_dataset(dataset, dataset.with_name("v2"), train_on="last")
    reweigh_dataset(dataset, dataset, train_on="last", overwrite=True)
    assert contents(dataset) == contents(dataset.with_name("v2")) != expected


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_files_are_copied_if_they_cannot_be_linked(dataset, monkeypatch, code):
    reweigh_dataset(dataset, dataset.with_name("linked"), train_on="last")

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    done = reweigh_dataset(dataset, dataset.with_name("copied"), train_on="last")
    assert done.linked == 0
    assert done.copied == sum(path.name in SHARED for path in dataset.rglob("*.*"))
    assert contents(dataset.with_name("copied")) == contents(dataset.with_name("linked"))


def test_any_other_disk_error_leaves_nothing(dataset, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(OSError, match="no space"):
        reweigh_dataset(dataset, dataset.with_name("v2"), train_on="last")
    assert names(dataset.parent) == ["v1"]


def test_damaged_spans_are_refused_rather_than_rehashed(dataset):
    spans = dataset / "train/shard_00000/spans.bin"
    data = bytearray(spans.read_bytes())
    data[14] ^= 1
    spans.write_bytes(data)
    with pytest.raises(DataError, match=r"spans\.bin: does not match the metadata"):
        reweigh_dataset(dataset, dataset.with_name("v2"), train_on="last")
    assert names(dataset.parent) == ["v1"]


def test_damaged_tokens_are_not_copied(dataset, monkeypatch):
    tokens = dataset / "train/shard_00000/tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[::-1])

    def refuse(*_):
        raise OSError(errno.EXDEV, "another device")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(DataError, match=r"tokens\.bin: does not match the metadata"):
        reweigh_dataset(dataset, dataset.with_name("v2"), train_on="last")


def test_a_dataset_without_spans_is_refused(dataset):
    stranger = dataset.with_name("stranger")
    for name in ("tokens.bin", "mask.bin", "episodes.idx"):
        path = stranger / "train/shard_00000" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(dataset / "train/shard_00000" / name, path)
    with pytest.raises(DataError, match=r"stranger: has no spans\.bin with the roles"):
        reweigh_dataset(stranger, dataset.with_name("v2"), train_on="last")


def test_a_target_that_exists_or_is_inside_the_dataset_is_refused(dataset):
    reweigh_dataset(dataset, dataset.with_name("v2"), train_on="last")
    with pytest.raises(DataError, match="already exists"):
        reweigh_dataset(dataset, dataset.with_name("v2"), train_on="all")
    for target in (dataset / "train" / "new", dataset.parent):
        with pytest.raises(DataError, match=r"overlaps with .*; use another folder"):
            reweigh_dataset(dataset, target, train_on="all", overwrite=True)
    assert verify_dataset(dataset, full=True).faults == ()


def test_leftovers_of_a_killed_process_are_removed(dataset):
    left = dataset.with_name(".v2.reweighing")
    (left / "train/shard_00000").mkdir(parents=True)
    (left / "train/shard_00000/tokens.bin").write_text("half")
    (left / "dataset_metadata.json").write_text("{")
    (left / "notes.txt").write_text("not of a build")
    with pytest.raises(DataError, match=r"\.v2\.reweighing: contains notes\.txt, which is not part of a dataset"):
        reweigh_dataset(dataset, dataset.with_name("v2"), train_on="last")
    assert len([path for path in left.rglob("*") if path.is_file()]) == 3
    (left / "notes.txt").unlink()
    reweigh_dataset(dataset, dataset.with_name("v2"), train_on="last")
    assert verify_dataset(dataset.with_name("v2"), full=True).faults == ()
    assert names(dataset.parent) == ["v1", "v2"]


class Dying(files.Disk):
    def __init__(self, left: int) -> None:
        self._left = left

    def __getattribute__(self, name):
        if not name.startswith("_") and name != "close":
            if self._left <= 0:
                raise KeyboardInterrupt
            self._left -= 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("overwrite", [False, True])
def test_reweighing_stopped_at_any_operation_leaves_the_old_or_the_new_dataset(tmp_path, monkeypatch, overwrite):
    source, target = tmp_path / "v1", tmp_path / "v2"
    splits = {"train": rows_of(chats(0, 4)), "val": rows_of(chats(1, 2))}
    old = write_rows(source, splits).sha256
    new = reweigh_dataset(source, target, train_on="last").metadata.sha256
    stopped, found = True, []
    while stopped:
        shutil.rmtree(target)
        if overwrite:
            shutil.copytree(source, target)
        with monkeypatch.context() as patch:
            patch.setattr(files, "disk", Dying(len(found)))
            try:
                reweigh_dataset(source, target, train_on="last", overwrite=overwrite)
                stopped = False
            except KeyboardInterrupt:
                pass
        assert verify_dataset(source, full=True).faults == ()
        assert not target.exists() or verify_dataset(target, full=True).faults == ()
        found.append(open_dataset(target).sha256 if target.exists() else None)
        # Files that the stopped run has left behind do not block the next run.
        assert reweigh_dataset(source, target, train_on="last", overwrite=target.exists()).metadata.sha256 == new
        assert names(tmp_path) == ["v1", "v2"]
    before = old if overwrite else None
    published = found.index(new)
    assert 30 < published < len(found)
    assert found == [before] * published + [new] * (len(found) - published)
