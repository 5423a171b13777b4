"""Deliberate bugs in how files are synced, renamed, replaced and locked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from chatmill.prepare import build_dir, engine, pipeline
from chatmill.store import files, metadata, publish


def files_are_not_synced() -> None:
    def folders_alone(folder: Path) -> None:
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                folders_alone(path)
        files.disk.sync(folder)

    files.sync_tree = folders_alone


def folders_are_not_synced() -> None:
    def files_alone(folder: Path) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                files.disk.sync(path)

    files.sync_tree = files_alone


def the_name_is_not_synced() -> None:
    publish._sync_parents = lambda *paths: None


def nothing_is_synced() -> None:
    files.sync_tree = lambda folder: None


def renamed_early() -> None:
    last = pipeline.write_metadata

    def early(folder: Path, described: Any, **options: Any) -> Any:
        target = folder.with_name(folder.name.removeprefix(".").removesuffix(".building"))
        if target.exists():
            remove_tree(target)
        files.disk.rename_new(folder, target)
        return last(target, described, **options)

    pipeline.write_metadata = early
    pipeline.publish = lambda *args, **options: None


def metadata_first() -> None:
    create = metadata.create
    held: list[tuple[Path, bytes]] = []

    class Held:
        def __init__(self, path: Path) -> None:
            self._path = path

        def write(self, data: bytes) -> None:
            held.append((self._path, data))

    @contextmanager
    def swapped(path: Path) -> Iterator[Any]:
        if path.name != metadata.METADATA:
            yield Held(path)
            return
        with create(path) as file:
            yield file
        for late, data in held:
            with create(late) as file:
                file.write(data)
        held.clear()

    metadata.create = swapped


def old_dataset_removed_first() -> None:
    move = publish._move
    files.Disk.exchange = lambda self, one, other: False
    publish._check_replaceable = lambda *args: None
    publish._remove_replaced = lambda *args: None

    def removing(source: Path, target: Path) -> None:
        if target.name.endswith(".replaced"):
            remove_tree(source)
        else:
            move(source, target)

    publish._move = removing


def remove_tree(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            files.disk.remove(path)
    files.disk.remove(folder)


def everything_is_replaced() -> None:
    """Remove all files of a replaced dataset folder, even files that the metadata does not list."""

    def marker_alone(folder: Path, target: Path, kind: Any) -> None:
        assert (folder / kind.marker).is_file()

    def all_of_it(folder: Path, kind: Any) -> str:
        try:
            remove_tree(folder)
        except OSError as error:
            return str(error)
        return ""

    publish._check_replaceable = marker_alone
    publish.remove_folder = all_of_it


def full_disk_swallowed() -> None:
    def write_some(self: Any, data: Any) -> int:
        try:
            return files.disk.write(self._fd, data)
        except OSError:
            return len(data)

    files._Raw.write = write_some


def files_not_named() -> None:
    import chatmill.errors

    chatmill.errors.name_file = lambda error: error
    engine.name_file = lambda error: error


def nobody_locks() -> None:
    import os

    build_dir.locked = lambda path, busy, *, opened, patience: nullcontext(os.close(opened()))
