"""A dataset exists whole or not at all, wherever the power goes or the process is killed."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
from crash_disk import Model, Recorder, outcomes
from store_material import contents, finish, some_rows, write_dataset, write_split

from chatmill.errors import DataError
from chatmill.store import files
from chatmill.store.publish import publish, recover, set_aside, staging_for
from chatmill.store.read import open_dataset
from chatmill.store.verify import verify

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


def crashes(tmp_path, model: Model, recorder: Recorder):
    """Every state that a crash after each step can leave: the number of the step, and the folder."""
    at = tmp_path / "crashed"
    for number in range(len(recorder.steps) + 1):
        if number:
            recorder.steps[number - 1](model)
        for name, keep in outcomes(number).items():
            model.crash(at, keep)
            yield number, name, at
            shutil.rmtree(at)


class Checked(dict):
    """The hash of a dataset all of whose bytes were checked; datasets of the same bytes are checked once."""

    def of(self, path) -> str:
        key = tuple(contents(path).items())
        if key not in self:
            found = verify(path, full=True)
            assert not found.faults
            assert found.sha256
            self[key] = found.sha256
        return self[key]


class Unsynced(files.Disk):
    """The real disk, in less of a hurry: for what is done after a crash that was only played."""

    def sync(self, path):
        pass


def opens(path) -> bool:
    try:
        open_dataset(path)
    except DataError:
        return False
    return True


def test_a_crash_leaves_no_dataset_or_a_whole_one(tmp_path, monkeypatch):
    checked = Checked()
    model, recorder = record(tmp_path / "disk", monkeypatch, old=False)
    new, seen = checked.of(tmp_path / "disk/x"), set()
    for number, _, at in crashes(tmp_path, model, recorder):
        if (at / "x").exists():
            assert checked.of(at / "x") == new
            seen.add("new")
        else:
            seen.add("none")
        staging = staging_for(at / "x")
        if staging.exists():
            # What was being built may be anything, but it never passes for a dataset unless it is one.
            assert not opens(staging) or checked.of(staging) == new
        if number == len(recorder.steps):
            assert (at / "x").exists(), "published, yet lost with the power"
    assert seen == {"none", "new"}


def test_a_crash_while_replacing_leaves_the_old_or_the_new(tmp_path, monkeypatch):
    checked = Checked()
    model, recorder = record(tmp_path / "disk", monkeypatch, old=True)
    new, seen = checked.of(tmp_path / "disk/x"), set()
    write_dataset(tmp_path / "old", OLD, shard_tokens=60)
    old = checked.of(tmp_path / "old")
    for number, _, at in crashes(tmp_path, model, recorder):
        found = checked.of(at / "x")
        assert found == new if number == len(recorder.steps) else found in (old, new)
        seen.add(found)
    assert seen == {old, new}


def test_without_exchange_the_next_command_mends_what_a_crash_left(tmp_path, monkeypatch):
    checked = Checked()
    model, recorder = record(tmp_path / "disk", monkeypatch, old=True, can_exchange=False)
    new, seen = checked.of(tmp_path / "disk/x"), set()
    write_dataset(tmp_path / "old", OLD, shard_tokens=60)
    old = checked.of(tmp_path / "old")
    monkeypatch.setattr(files, "disk", Unsynced())
    for number, _, at in crashes(tmp_path, model, recorder):
        seen.add((at / "x").exists())
        if not (at / "x").exists():
            with pytest.raises(DataError, match=r"was being replaced .* the old dataset is .*\.x\.replaced"):
                open_dataset(at / "x")
        recover(at / "x")
        found = checked.of(at / "x")
        assert found == new if number == len(recorder.steps) else found in (old, new)
        assert not set_aside(at / "x").exists()
    assert seen == {True, False}, "no crash fell between the two renames"


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


def test_a_full_disk_is_reported_with_the_file_it_stopped(tmp_path, monkeypatch):
    class Full(files.Disk):
        def write(self, fd, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "disk", Full())
    with pytest.raises(OSError, match="No space left") as error:
        write_dataset(tmp_path / "x", NEW)
    assert error.value.filename.startswith(str(staging_for(tmp_path / "x")))
    assert not (tmp_path / "x").exists()
