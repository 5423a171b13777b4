from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prepare_fixtures import build, conversations, digests, job_of, lines

from chatmill.errors import ChatmillError
from chatmill.store import files
from chatmill.store.layout import METADATA
from chatmill.store.publish import publish, recover, staging_for
from chatmill.store.reweigh import reweigh_dataset
from fault_injection.disks import OPERATIONS, KilledAt, in_place
from fault_injection.processes import apart
from fault_injection.trial import Tally, Trial

MINE = b"years of work"


def _file(name: str) -> Callable[[Path], Path]:
    def put(folder: Path) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(MINE)
        return path

    return put


def _link(name: str, to: str) -> Callable[[Path], Path]:
    def put(folder: Path) -> Path:
        elsewhere = folder.parent / f"elsewhere-{len(list(folder.parent.iterdir()))}"
        elsewhere.mkdir()
        (elsewhere / to).write_bytes(MINE)
        path = folder / name
        if path.exists():
            path.rename(elsewhere / "was-there")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(elsewhere / to if "." in to else elsewhere)
        return path

    return put


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def _empty_folder(folder: Path) -> Path:
    (folder / "runs").mkdir()
    return folder / "runs"


THINGS: dict[str, Callable[[Path], Path]] = {
    "notes": _file("notes.txt"),
    "a repository": _file(".git/HEAD"),
    "a model": _file("runs/model.safetensors"),
    "an empty folder": _empty_folder,
    "a tokenizer": _file("tokenizer.json"),
    "rejects": _file("rejects.jsonl"),
    "an unlisted shard": _file("train/shard_00099/tokens.bin"),
    "a file next to a shard": _file("train/readme"),
    "a file in a shard": _file("train/shard_00000/tokens.bin.bak"),
    "an unlisted split": _file("test/shard_00000/tokens.bin"),
    "a name with control characters": _file("a\x1b[2J\nb"),
    "a name that is not UTF-8": _file(os.fsdecode(b"\xff\xfe")),
    "a link to a file": _link("link", "mine.txt"),
    "a link instead of a listed file": _link("tokenizer_state.json", "mine.json"),
    "a link to a folder": _link("val", "folder"),
    "a pipe": _fifo,
}
"""Files that a user may have put into a dataset folder."""

MARKERS = ("{}", "[]", "", "null", '{"schema": "chatmill-episodes"}', "not json", "\0" * 100, "{" * 5000)
"""Contents of files that are named like dataset metadata but are not metadata."""


class AppearsAt(files.Disk):
    def __init__(self, name: str, put: Callable[[], object], *, after: bool) -> None:
        operation = getattr(files.Disk, name)

        def disturbed(*args: Any) -> Any:
            if not after:
                self._once(put)
            result = operation(self, *args)
            if after:
                self._once(put)
            return result

        self.happened = False
        setattr(self, name, disturbed)

    def _once(self, put: Callable[[], object]) -> None:
        if not self.happened:
            self.happened = True
            put()


@contextmanager
def no_exchange(yes: bool) -> Iterator[None]:
    """If `yes` is true, make exchanging two folders fail, as on a system that lacks the system call for it."""
    real = files.Disk.exchange
    if yes:
        files.Disk.exchange = lambda self, one, other: False
    try:
        yield
    finally:
        files.Disk.exchange = real


def everything(folder: Path) -> dict[str, str]:
    return {
        f"{status.st_dev}:{status.st_ino}": path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if (status := path.lstat())
    }


def inode(path: Path) -> str:
    status = path.lstat()
    return f"{status.st_dev}:{status.st_ino}"


def attempt(do: Callable[[], Any]) -> tuple[str, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            do()
            line = "done"
        except ChatmillError as error:
            line = str(error)
    return line, [str(each.message) for each in caught]


class Rounds:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        for name, count in (("a", 12), ("b", 5)):
            (folder / f"{name}.jsonl").write_bytes(lines(conversations(count, seed=seed + count)))
        self.new_job = job_of((str(folder / "a.jsonl"),), shard_tokens=2_000)
        self.old_job = job_of((str(folder / "b.jsonl"),))
        build(self.new_job, folder / "new")
        self.number = 0
        self.commands: dict[str, Callable[[Path], Any]] = {
            "prepare": lambda target: build(self.new_job, target, overwrite=True),
            "reweigh": lambda target: reweigh_dataset(folder / "new", target, train_on="last", overwrite=True),
        }

    def place(self) -> Path:
        self.number += 1
        target = self.folder / str(self.number) / "x"
        target.parent.mkdir()
        build(self.old_job, target)
        return target


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng = random.Random(seed)
    rounds = Rounds(folder, seed)
    chosen = list(THINGS)
    rng.shuffle(chosen)
    for number, thing in enumerate(chosen[:size] if size < len(chosen) else chosen):
        command = list(rounds.commands)[number % 2]
        refuses_before_any_work(rounds, thing, command, tally)
    for name in MARKERS[:size]:
        refuses_what_is_no_dataset(rounds, name, tally)
    operations = [each for each in OPERATIONS if each not in ("append", "link")]
    for number in range(min(size, len(chosen) * 4)):
        thing, operation = chosen[number % len(chosen)], rng.choice(operations)
        if thing == "a link instead of a listed file" and operation == "remove":
            # A link that replaces a listed file while the file is being removed cannot be told apart from the file.
            continue
        survives_a_race(rounds, thing, operation, tally, after=rng.random() < 0.5, exchange=number % 3 != 2)
    for number in range(min(size, len(chosen))):
        survives_a_kill(rounds, chosen[number], rng, tally, exchange=number % 2 == 0)
    old_dataset_that_cannot_be_removed(rounds, tally)


def refuses_before_any_work(rounds: Rounds, thing: str, command: str, tally: Tally) -> None:
    target = rounds.place()
    path = THINGS[thing](target)
    before = everything(target.parent)
    counter = KilledAt()
    with in_place(counter):
        line, _ = attempt(lambda: rounds.commands[command](target))
    where = f"{command} over {thing}"
    if everything(target.parent) != before:
        tally.loses(f"{where}: files are missing afterwards: {line}")
    elif line == "done" or counter.count:
        tally.is_wrong(f"{where}: the command did {counter.count} operations before it ended with: {line}")
    else:
        shown = path.relative_to(target).parts[0].encode("unicode_escape", "replace").decode()
        tally.judge(found="\n" not in line and "\x1b" not in line and shown[:3] in line, lost=f"{where}: {line!r}")


def refuses_what_is_no_dataset(rounds: Rounds, marker: str, tally: Tally) -> None:
    target = rounds.place()
    (target / METADATA).write_text(marker)
    (target / "thesis.tex").write_bytes(MINE)
    before = everything(target.parent)
    line, _ = attempt(lambda: rounds.commands["prepare"](target))
    kept = everything(target.parent) == before
    tally.judge(found=kept and line.startswith(f"{target}: "), lost=f"metadata {marker[:20]!r}: {line}")


def survives_a_race(rounds: Rounds, thing: str, operation: str, tally: Tally, *, after: bool, exchange: bool) -> None:
    target = rounds.place()
    old, made = inode(target), list[str]()

    def put() -> None:
        for path in target.parent.iterdir():
            if path.is_dir() and inode(path) == old:
                made.append(inode(THINGS[thing](path)))

    def publish_disturbed() -> None:
        staging = staging_for(target)
        build(rounds.new_job, staging)
        with in_place(AppearsAt(operation, put, after=after)):
            publish(staging, target, overwrite=True)

    with no_exchange(not exchange):
        line, warned = attempt(publish_disturbed)
    where = f"{thing}, {'after' if after else 'before'} the first {operation}{'' if exchange else ', two renames'}"
    names = everything(target.parent)
    if made and made[0] not in names:
        tally.loses(f"{where}: the file is gone; {line} {warned}")
    elif digests(target) != digests(rounds.folder / "new") and inode(target) != old:
        tally.is_wrong(f"{where}: the target is neither the old nor the new dataset; {line}")
    elif made and line == "done" and not warned:
        tally.is_wrong(f"{where}: no message names {names[made[0]]}")
    else:
        tally.judge(survived=line == "done", found=True)


def survives_a_kill(rounds: Rounds, thing: str, rng: random.Random, tally: Tally, *, exchange: bool) -> None:
    target = rounds.place()
    staging = staging_for(target)

    def killed(at: int) -> None:
        build(rounds.new_job, staging)
        files.disk = KilledAt(at)
        publish(staging, target, overwrite=True)

    with no_exchange(not exchange):
        counter = KilledAt()
        ended = apart(lambda: killed(rng.randrange(1, 60)))
        aside = [path for path in target.parent.iterdir() if path.name.startswith(".x.") and path.is_dir()]
        if aside and thing == "an unlisted shard" and not (aside[0] / METADATA).is_file():
            # An unlisted shard cannot be distinguished from shards that the killed build was writing.
            thing = "notes"
        made = inode(THINGS[thing](aside[0])) if aside else ""
        with in_place(counter):
            line, warned = attempt(lambda: (recover(target), rounds.commands["prepare"](target)))
    where = f"{thing} in {aside[0].name if aside else 'nothing'} of a killed build ({ended.killed=})"
    names = everything(target.parent)
    if made and made not in names:
        tally.loses(f"{where}: the file is gone; {line} {warned}")
    elif not target.is_dir():
        tally.loses(f"{where}: no dataset is left; {line} {warned}")
    elif made and line == "done" and not warned:
        tally.is_wrong(f"{where}: no message names {names[made]}")
    else:
        refused = "look" in line or "inspect" in line or any(part in line for part in ("does not list", "not listed"))
        tally.judge(survived=line == "done", found=refused, lost=f"{where}: {line}")


def old_dataset_that_cannot_be_removed(rounds: Rounds, tally: Tally) -> None:
    class Held(files.Disk):
        def remove(self, path: Path) -> None:
            if path.name == "mask.bin":
                raise PermissionError(1, "Operation not permitted", str(path))
            super().remove(path)

    for exchange in (True, False):
        target = rounds.place()
        with no_exchange(not exchange), in_place(Held()):
            line, warned = attempt(lambda target=target: build(rounds.new_job, target, overwrite=True))
        left = [path for path in target.parent.iterdir() if path.name == "x.kept"]
        said = len(warned) == 1 and left and str(left[0]) in warned[0]
        new = digests(target) == digests(rounds.folder / "new")
        again, more = attempt(lambda target=target: build(rounds.new_job, target, overwrite=True))
        tally.judge(
            survived=bool(line == again == "done" and said and new and not more),
            lost=f"an old dataset that cannot be removed: {json.dumps([line, warned, again, more])}",
        )


TRIAL = Trial(
    "unlisted files in a replaced folder",
    "Puts notes, repositories, models, links and other files into a folder that a command replaces, before or "
    "during the command. The command must stop with a one-line error, or keep the files and print a warning",
    work,
    full=64,
    short=5,
    in_memory=True,
)
