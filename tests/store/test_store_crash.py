"""A dataset is published by one step, or not at all; `tests/fault_injection` kills and crashes that step."""

from __future__ import annotations

import errno
import os

import pytest
from fault_injection.crash_disk import Model, Recorder
from store_fixtures import contents, finish, some_rows, write_dataset, write_split

from chatmill.errors import DataError
from chatmill.store import files
from chatmill.store.publish import publish, staging_for
from chatmill.store.read import open_dataset

OLD = {"train": some_rows(1, count=12)}
NEW = {"train": some_rows(2, count=12), "val": some_rows(3, count=4)}


def record(folder, monkeypatch, *, old: bool, can_exchange: bool = True) -> tuple[Model, Recorder]:
    """Build and publish a dataset, over an older one if asked; the disk before, and every step after."""
    folder.mkdir()
    if old:
        write_dataset(folder / "x", OLD, shard_tokens=60)
    before, recorder = Model(folder), Recorder(folder, can_exchange=can_exchange)
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", recorder)
        write_dataset(folder / "x", NEW, shard_tokens=60, overwrite=old)
    return before, recorder


def test_every_byte_of_a_dataset_goes_through_the_seam(tmp_path, monkeypatch):
    model, recorder = record(tmp_path / "disk", monkeypatch, old=True)
    for step in recorder.steps:
        step(model)
    model.crash(tmp_path / "replayed", lambda count: count)
    assert contents(tmp_path / "replayed") == contents(tmp_path / "disk")


@pytest.mark.parametrize("exchange", [True, False])
def test_nothing_but_the_dataset_is_left_beside_it(tmp_path, monkeypatch, exchange):
    record(tmp_path / "disk", monkeypatch, old=True, can_exchange=exchange)
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["x"]


def test_an_existing_target_is_refused_and_stays(tmp_path):
    write_dataset(tmp_path / "x", OLD)
    before = contents(tmp_path / "x")
    with pytest.raises(DataError, match="exists already; give another name, or --overwrite"):
        write_dataset(tmp_path / "x", NEW)
    assert contents(tmp_path / "x") == before


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_not_a_dataset_is_never_replaced(tmp_path, kind):
    target = tmp_path / "x"
    if kind == "folder":
        target.mkdir()
        (target / "thesis.tex").write_text("years of work")
    elif kind == "file":
        target.write_text("years of work")
    else:
        write_dataset(tmp_path / "real", OLD)
        target.symlink_to(tmp_path / "real")
    with pytest.raises(DataError, match="give"):
        write_dataset(target, NEW, overwrite=True)
    assert os.path.lexists(target)


def test_an_unfinished_build_is_not_published_and_does_not_open(tmp_path):
    staging = staging_for(tmp_path / "x")
    info = write_split(staging / "train", [OLD["train"]], vocab_size=1000, shard_tokens=60)
    with pytest.raises(DataError, match="unfinished"):
        publish(staging, tmp_path / "x", overwrite=False)
    with pytest.raises(DataError, match="unfinished"):
        open_dataset(staging)
    finish(staging, {"train": info}, vocab_size=1000)
    publish(staging, tmp_path / "x", overwrite=False)
    assert open_dataset(tmp_path / "x").splits == ("train",)


def test_every_shard_is_synced_when_it_is_finished_so_that_publishing_finds_little_to_sync(tmp_path, monkeypatch):
    synced = []

    class Watched(files.Disk):
        def sync(self, path):
            super().sync(path)
            synced.append(path)

    monkeypatch.setattr(files, "disk", Watched())
    write_split(tmp_path / "train", [OLD["train"]], vocab_size=1000, shard_tokens=60)
    written = sorted(path for path in (tmp_path / "train").rglob("*") if path.is_file())
    assert len({path.parent for path in written}) > 2
    assert sorted(set(synced) & set(written)) == written


def test_a_full_disk_is_reported_with_the_file_it_stopped(tmp_path, monkeypatch):
    class Full(files.Disk):
        def write(self, fd, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "disk", Full())
    with pytest.raises(OSError, match="No space left") as error:
        write_dataset(tmp_path / "x", NEW)
    assert error.value.filename.startswith(str(staging_for(tmp_path / "x")))
    assert not (tmp_path / "x").exists()
