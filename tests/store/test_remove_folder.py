from __future__ import annotations

import re
from pathlib import Path

import pytest

from chatmill.store import files
from chatmill.store.publish import MANY, FolderKind, remove_folder

KIND = FolderKind("build", "marker", re.compile(r"marker|(inner/)*(part_\d+)?"))


def filled(folder: Path, count: int) -> list[Path]:
    """Make a folder with `count` files at each of two depths; return all paths that must be removed before it."""
    paths = [folder / "inner" / "inner", folder / "inner", folder / "marker"]
    for place in paths[:2]:
        place.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            (place / f"part_{number}").write_bytes(b"x")
            paths.append(place / f"part_{number}")
    (folder / "marker").write_bytes(b"")
    return paths


@pytest.mark.parametrize("count", [1, MANY // 2 - 1, MANY])
def test_a_folder_is_removed_with_its_marker_last(tmp_path, monkeypatch, count):
    folder = tmp_path / "folder"
    paths = filled(folder, count)
    removed: list[Path] = []
    remove = files.disk.remove
    monkeypatch.setattr(files.disk, "remove", lambda path: (remove(path), removed.append(path)))
    assert remove_folder(folder, KIND) == ""
    assert sorted(removed) == sorted([*paths, folder])
    assert removed[-4:] == [*paths[:3], folder]
    assert not folder.exists()


@pytest.mark.parametrize("count", [3, MANY])
def test_a_file_that_cannot_be_removed_keeps_its_folders_and_the_marker(tmp_path, monkeypatch, count):
    folder = tmp_path / "folder"
    paths = filled(folder, count)
    remove = files.disk.remove

    def refuse(path: Path) -> None:
        if path.name == "part_2":
            raise PermissionError(13, "Permission denied", str(path))
        remove(path)

    monkeypatch.setattr(files.disk, "remove", refuse)
    left = r"contains (inner/)+part_2, which cannot be removed \(Permission denied\)"
    assert re.fullmatch(left, remove_folder(folder, KIND))
    assert all(path.exists() for path in paths[:3])
    monkeypatch.undo()
    assert remove_folder(folder, KIND) == ""
