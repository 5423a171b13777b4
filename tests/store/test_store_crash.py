"""Publishing a dataset is atomic; `tests/fault_injection` also kills processes and simulates power losses."""

from __future__ import annotations

import errno
import os
import re

import pytest
from fault_injection.crash_disk import Model, Recorder
from store_fixtures import contents, finish, some_rows, write_dataset, write_split

from chatmill.errors import DataError
from chatmill.store import files
from chatmill.store.publish import check_target, publish, recover, staging_for
from chatmill.store.read import open_dataset

OLD = {"train": some_rows(1, count=12)}
NEW = {"train": some_rows(2, count=12), "val": some_rows(3, count=4)}


def record(folder, monkeypatch, *, old: bool, can_exchange: bool = True) -> tuple[Model, Recorder]:
    folder.mkdir()
    if old:
        write_dataset(folder / "x", OLD, shard_tokens=60)
    before, recorder = Model(folder), Recorder(folder, can_exchange=can_exchange)
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", recorder)
        write_dataset(folder / "x", NEW, shard_tokens=60, overwrite=old)
    return before, recorder


def test_every_byte_of_a_dataset_is_written_through_files_disk(tmp_path, monkeypatch):
    model, recorder = record(tmp_path / "disk", monkeypatch, old=True)
    for step in recorder.steps:
        step(model)
    model.crash(tmp_path / "replayed", lambda count: count)
    assert contents(tmp_path / "replayed") == contents(tmp_path / "disk")


@pytest.mark.parametrize("exchange", [True, False])
def test_publishing_leaves_only_the_dataset(tmp_path, monkeypatch, exchange):
    record(tmp_path / "disk", monkeypatch, old=True, can_exchange=exchange)
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["x"]


def test_an_existing_target_is_refused_and_unchanged(tmp_path):
    write_dataset(tmp_path / "x", OLD)
    before = contents(tmp_path / "x")
    with pytest.raises(DataError, match="already exists; use another name or pass --overwrite"):
        write_dataset(tmp_path / "x", NEW)
    assert contents(tmp_path / "x") == before


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_target_that_is_not_a_dataset_is_never_replaced(tmp_path, kind):
    target = tmp_path / "x"
    if kind == "folder":
        target.mkdir()
        (target / "thesis.tex").write_text("years of work")
    elif kind == "file":
        target.write_text("years of work")
    else:
        write_dataset(tmp_path / "real", OLD)
        target.symlink_to(tmp_path / "real")
    with pytest.raises(DataError, match=r"use another name|use the folder itself"):
        write_dataset(target, NEW, overwrite=True)
    assert os.path.lexists(target)


THINGS = [".git/HEAD", "notes.txt", "runs/model.safetensors", "tokenizer.json", "train/shard_00099/tokens.bin", "val/x"]


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("thing", THINGS)
def test_a_dataset_folder_with_other_files_is_never_replaced(tmp_path, monkeypatch, thing, exchange):
    target = tmp_path / "x"
    write_dataset(target, OLD)
    (target / thing).parent.mkdir(parents=True, exist_ok=True)
    (target / thing).write_text("years of work")
    before = contents(target)
    with pytest.raises(DataError, match=r"x: is not replaced, because dataset_metadata\.json does not list .*"):
        check_target(target, overwrite=True)
    # If an unlisted file appears only after the check, the old folder is restored.
    monkeypatch.setattr("chatmill.store.publish.check_target", lambda *args, **options: None)
    if not exchange:
        monkeypatch.setattr(files.Disk, "exchange", lambda self, one, other: False)
    with pytest.raises(DataError, match="x: is not replaced, because"):
        write_dataset(target, NEW, overwrite=True)
    assert contents(target) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.building", "x"]


def test_an_error_names_the_first_of_many_files_without_control_characters(tmp_path):
    write_dataset(tmp_path / "x", OLD)
    for name in ("a\nb", "c", "d", "e", "f"):
        (tmp_path / "x" / name).write_text("")
    (tmp_path / "x" / "b").symlink_to("/nowhere")
    with pytest.raises(DataError, match=re.escape("dataset_metadata.json does not list a\\nb, b, c and 3 more;")):
        check_target(tmp_path / "x", overwrite=True)


@pytest.mark.parametrize("text", ["{}", "", "[]", '{"schema": "chatmill-episodes", "schema_version": 1}'])
def test_a_folder_with_foreign_metadata_is_never_replaced(tmp_path, text):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/dataset_metadata.json").write_text(text)
    with pytest.raises(
        DataError, match=r"^\S+/x: is not replaced, because chatmill did not write its dataset_metadata\.json"
    ):
        check_target(tmp_path / "x", overwrite=True)


def test_a_damaged_dataset_and_an_empty_folder_are_replaced(tmp_path):
    write_dataset(tmp_path / "x", OLD)
    (tmp_path / "x/train/shard_00000/tokens.bin").unlink()
    (tmp_path / "x/train/shard_00000/mask.bin").write_text("cut")
    (tmp_path / "y").mkdir()
    for name in "xy":
        write_dataset(tmp_path / name, NEW, overwrite=True)
    assert contents(tmp_path / "x") == contents(tmp_path / "y")


@pytest.mark.parametrize("exchange", [True, False])
def test_an_old_dataset_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, exchange):
    class Held(files.Disk):
        def remove(self, path):
            if path.name == "mask.bin":
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
            super().remove(path)

        def exchange(self, one, other):
            return exchange and super().exchange(one, other)

    write_dataset(tmp_path / "x", OLD)
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", Held())
        for number in ("", 1):
            with pytest.warns(
                UserWarning, match=rf"x: was replaced, but the old dataset was not rem.*/x\.kept{number} contains"
            ):
                write_dataset(tmp_path / "x", NEW, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.kept", "x.kept1"]
    assert open_dataset(tmp_path / "x").splits == ("train", "val")


def test_leftovers_of_a_killed_replacement_are_removed_unless_they_contain_other_files(tmp_path):
    write_dataset(tmp_path / "x", OLD)
    write_dataset(tmp_path / ".x.replaced", NEW)
    recover(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    write_dataset(tmp_path / ".x.replaced", NEW)
    (tmp_path / ".x.replaced/notes.txt").write_text("years of work")
    with pytest.warns(UserWarning, match=r"x\.kept contains notes\.txt, which is not part of a dataset"):
        recover(tmp_path / "x")
    assert (tmp_path / "x.kept/notes.txt").read_text() == "years of work"
    # An empty folder that another process created at the target is not mistaken for the new dataset.
    write_dataset(tmp_path / "aside", NEW)
    (tmp_path / "y").mkdir()
    (tmp_path / "aside").rename(tmp_path / ".y.replaced")
    recover(tmp_path / "y")
    assert open_dataset(tmp_path / ".y.replaced").splits == ("train", "val")


def test_a_file_that_appears_while_it_is_written_is_kept(tmp_path):
    path = tmp_path / "out"
    with pytest.raises(DataError, match="out: was created by another process in the meantime"), files.writing(path):
        path.write_text("mine")
    assert contents(tmp_path) == {"out": b"mine"}


@pytest.mark.parametrize("name", ["input", "link", "hard", "folder/inside", "device"])
def test_an_output_never_replaces_an_input_a_link_or_a_device(tmp_path, name):
    (tmp_path / "input").write_text("mine")
    (tmp_path / "link").symlink_to("input")
    (tmp_path / "hard").hardlink_to(tmp_path / "input")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/inside").write_text("mine")
    (tmp_path / "device").symlink_to("/dev/null")
    with pytest.raises(DataError, match=r"which the command reads|is a link or a device"):
        files.refuse_existing(tmp_path / name, overwrite=True, reads=[tmp_path / "input", tmp_path / "folder"])


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


def test_every_shard_is_synced_as_soon_as_it_is_finished(tmp_path, monkeypatch):
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


def test_a_full_disk_is_reported_with_the_file_being_written(tmp_path, monkeypatch):
    class Full(files.Disk):
        def write(self, fd, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "disk", Full())
    with pytest.raises(OSError, match="No space left") as error:
        write_dataset(tmp_path / "x", NEW)
    assert error.value.filename.startswith(str(staging_for(tmp_path / "x")))
    assert not (tmp_path / "x").exists()
