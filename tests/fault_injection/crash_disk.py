"""A simulated disk that records every operation and recreates the states that a power loss can leave behind.

Written bytes are durable only after the file is synced. A created, renamed or removed directory entry is durable only
after its directory is synced. Without a sync, any number of the latest changes can be lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from chatmill.store.files import Disk


class File:
    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.safe = len(data)


class Folder:
    def __init__(self) -> None:
        self.safe: dict[str, File | Folder] = {}
        self.changes: list[dict[str, File | Folder | None]] = []
        """Changes to directory entries since the last sync, oldest first; None marks a removed entry."""

    def names(self, kept: int | None = None) -> dict[str, File | Folder]:
        names: dict[str, File | Folder | None] = dict(self.safe)
        for change in self.changes[:kept]:
            names.update(change)
        return {name: node for name, node in names.items() if node is not None}


class Recorder(Disk):
    def __init__(self, root: Path, *, can_exchange: bool = True) -> None:
        self._root = root
        self._paths: dict[int, Path] = {}
        self._can_exchange = can_exchange
        self.steps: list[Callable[[Model], None]] = []

    def _inside(self, path: Path) -> tuple[str, ...]:
        return path.relative_to(self._root).parts

    def make_folder(self, path):
        super().make_folder(path)
        place = self._inside(path)
        self.steps.append(lambda model: model.change(place[:-1], {place[-1]: Folder()}))

    def create(self, path):
        fd = super().create(path)
        self._paths[fd] = path
        place = self._inside(path)
        self.steps.append(lambda model: model.change(place[:-1], {place[-1]: File()}))
        return fd

    def write(self, fd, data):
        written = super().write(fd, data)
        place, piece = self._inside(self._paths[fd]), bytes(data[:written])
        self.steps.append(lambda model: model.at(place).data.extend(piece))
        return written

    def sync(self, path):
        super().sync(path)
        place = self._inside(path)
        self.steps.append(lambda model: model.sync(place))

    def link(self, source, target):
        super().link(source, target)
        old, new = self._inside(source), self._inside(target)
        self.steps.append(lambda model: model.change(new[:-1], {new[-1]: model.at(old)}))

    def rename(self, source, target):
        super().rename(source, target)
        self._renamed(source, target)

    def rename_new(self, source, target):
        super().rename_new(source, target)
        self._renamed(source, target)

    def _renamed(self, source, target):
        old, new = self._inside(source), self._inside(target)
        assert old[:-1] == new[:-1], "the model supports renames only within one folder"
        self.steps.append(lambda model: model.change(old[:-1], {old[-1]: None, new[-1]: model.at(old)}))

    def exchange(self, one, other):
        if not (self._can_exchange and super().exchange(one, other)):
            return False
        a, b = self._inside(one), self._inside(other)
        self.steps.append(lambda model: model.change(a[:-1], {a[-1]: model.at(b), b[-1]: model.at(a)}))
        return True

    def remove(self, path):
        super().remove(path)
        place = self._inside(path)
        self.steps.append(lambda model: model.change(place[:-1], {place[-1]: None}))


class Model:
    """A model of the files in a folder: their current contents, and the contents that would survive a power loss."""

    def __init__(self, folder: Path) -> None:
        self.root = self._load(folder)

    def _load(self, path: Path) -> Folder:
        folder = Folder()
        for child in path.iterdir():
            folder.safe[child.name] = self._load(child) if child.is_dir() else File(child.read_bytes())
        return folder

    def at(self, place: tuple[str, ...]) -> File | Folder:
        node: File | Folder = self.root
        for name in place:
            node = node.names()[name]
        return node

    def change(self, place: tuple[str, ...], names: dict[str, File | Folder | None]) -> None:
        self.at(place).changes.append(names)

    def sync(self, place: tuple[str, ...]) -> None:
        node = self.at(place)
        if isinstance(node, File):
            node.safe = len(node.data)
        else:
            node.safe, node.changes = node.names(), []

    def crash(self, to: Path, keep: Callable[[int], int]) -> None:
        """Write the files that survive a power loss to `to`; of n unsynced changes, the first `keep(n)` survive."""
        self._restore(self.root, to, keep)

    def _restore(self, folder: Folder, to: Path, keep: Callable[[int], int]) -> None:
        to.mkdir()
        for name, node in folder.names(keep(len(folder.changes))).items():
            if isinstance(node, File):
                (to / name).write_bytes(bytes(node.data[: node.safe + keep(len(node.data) - node.safe)]))
            else:
                self._restore(node, to / name, keep)


def outcomes(seed: int) -> dict[str, Callable[[int], int]]:
    """Return functions that choose how many unsynced changes survive a power loss: none, all, or a random number."""
    rng = random.Random(seed)
    return {
        "nothing": lambda count: 0,
        "all": lambda count: count,
        "some": lambda count: rng.randint(0, count),
        "some or all": lambda count: rng.choice([0, count, rng.randint(0, count)]),
    }
