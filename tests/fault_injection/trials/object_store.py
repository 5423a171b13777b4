from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from prepare_fixtures import build, conversations, job_of, lines

from chatmill.errors import ChatmillError, DataError
from chatmill.prepare.job import Job
from chatmill.remote import objects
from chatmill.remote.urls import Url
from chatmill.store.clean import clean_dataset
from chatmill.store.layout import METADATA
from chatmill.store.read import open_dataset
from chatmill.store.verify import verify_dataset
from fault_injection.trial import Tally, Trial

URL = Url("memory://bucket/x")
ANY_AGE = -3600.0
"""An `--older-than` value for which every object is old enough to be removed."""


class KilledError(BaseException):
    pass


@dataclass
class Writes:
    """Records the writes to the object store: uploads when they end, and other writes when they start."""

    stop: int = 1 << 60
    """Number of the write at which the build stops."""
    before_last: Callable[[], None] | None = None
    """Called just before the metadata is written, to simulate another process."""
    made: list[tuple[str, bytes]] = field(default_factory=list)


@contextmanager
def watched(writes: Writes) -> Iterator[None]:
    upload, write, lock = objects.upload, objects.write, threading.Lock()

    def note(url: Url, data: bytes) -> None:
        if len(writes.made) >= writes.stop:
            raise KilledError
        writes.made.append((url.address, data))

    def uploading(url: Url, path: Path) -> None:
        with lock:
            if len(writes.made) >= writes.stop:
                raise KilledError
        upload(url, path)
        with lock:
            note(url, path.read_bytes())

    def writing(url: Url, data: bytes, **condition: Any) -> None:
        if writes.before_last is not None and url.name == METADATA:
            other, writes.before_last = writes.before_last, None
            other()
        with lock:
            note(url, data)
        write(url, data, **condition)

    objects.upload, objects.write = uploading, writing
    try:
        yield
    finally:
        objects.upload, objects.write = upload, write


def stored() -> dict[str, bytes]:
    from fsspec.implementations.memory import MemoryFileSystem

    return {name: file.getvalue() for name, file in MemoryFileSystem.store.items()}


def store(files: dict[str, bytes]) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    for name, data in files.items():
        MemoryFileSystem().pipe_file(name, data)


def state() -> str:
    if objects.find(URL / METADATA) is None:
        return ""
    report = verify_dataset(URL, full=True)
    return next(iter(report.faults), "") or report.sha256 or "no hash"


def jobs_in(folder: Path, size: int, seed: int) -> tuple[Job, Job]:
    """Return two different jobs, and set the cache and temporary folders of this process."""
    os.environ["CHATMILL_CACHE_DIR"] = str(folder / "cache")
    tempfile.tempdir = str(folder)
    objects.FIRST_DELAY = 0.001
    made = []
    for name in "ab":
        (folder / f"{name}.jsonl").write_bytes(lines(conversations(size, seed=seed + ord(name))))
        made.append(job_of((str(folder / f"{name}.jsonl"),), shard_tokens=1_000, val_split=0.2))
    return made[0], made[1]


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    old_job, job = jobs_in(folder, size, seed)
    for over in (False, True):
        store({})
        if over:
            build(old_job, URL)
        before, old = stored(), state()
        writes = Writes()
        with watched(writes):
            build(job, URL, overwrite=over)
        new, way = state(), "over an old dataset" if over else "a new dataset"
        played_back(writes, before, {old, new}, new, way, tally)
        resumed(len(writes.made), before, job, {old, new}, new, way, tally)
        raced(before, job, old_job, way, tally, folder)


def played_back(writes: Writes, before: dict[str, bytes], allowed: set[str], new: str, way: str, tally: Tally) -> None:
    """Check the dataset after each write: the old dataset must stay intact until the last write, even after `clean`."""
    for count in range(len(writes.made) + 1):
        where = f"{way}, after {count} of {len(writes.made)} writes"
        store(before | {f"/{address.partition('://')[2]}": data for address, data in writes.made[:count]})
        seen = state()
        right = {new} if count == len(writes.made) else allowed - {new}
        tally.judge(survived=seen in right, lost=f"{where}: {seen or 'nothing'}")
        if stored():
            clean_dataset(URL, older_than=ANY_AGE)
            tally.judge(survived=state() == seen, lost=f"{where}, after clean: {state()}")


def resumed(
    total: int, before: dict[str, bytes], job: Job, allowed: set[str], new: str, way: str, tally: Tally
) -> None:
    for stop in range(total):
        store(before)
        with watched(Writes(stop=stop)):
            try:
                build(job, URL, overwrite=bool(before))
                tally.loses(f"{way}: the build did not stop at write {stop}")
                continue
            except KilledError:
                seen = state()
        try:
            build(job, URL, overwrite=bool(before), resume=True)
            line = state() or "nothing"
        except ChatmillError as error:
            line = str(error)
        tally.judge(
            survived=seen in allowed - {new} and line == new,
            lost=f"{way}, killed at write {stop}: {seen or 'nothing'}, then {line}",
        )


def raced(before: dict[str, bytes], job: Job, other: Job, way: str, tally: Tally, folder: Path) -> None:
    winner = ""

    def elsewhere() -> None:
        nonlocal winner
        here, tempfile.tempdir = tempfile.tempdir, str(folder / "elsewhere")
        Path(tempfile.tempdir).mkdir(exist_ok=True)
        # The other build must differ from the existing dataset; otherwise a replacement could not be detected.
        winner = build(other, URL, overwrite=bool(before), unit_bytes=1 << 16).sha256
        tempfile.tempdir = here

    store(before)
    if before:
        (folder / "b.jsonl").write_bytes((folder / "b.jsonl").read_bytes())
        other = job_of(other.sources[0].inputs, shard_tokens=700, val_split=0.2)
    with watched(Writes(before_last=elsewhere)):
        try:
            build(job, URL, overwrite=bool(before))
            tally.is_wrong(f"{way}: both of two builds were published; {state()}")
            return
        except DataError as error:
            line = str(error)
    tally.judge(
        found=state() == winner and "while the dataset was being built" in line and "\n" not in line,
        lost=f"{way}, two builds: {line}; then {state()}",
    )


TRIAL = Trial(
    "kill at every write, object store",
    "Stops a build to an object store at each of its writes, and then resumes it or runs `clean`. The target must "
    "be absent, or the complete old or new dataset. If two builds run at the same time, one must be published and "
    "the other refused with a one-line error",
    work,
    full=60,
    short=12,
    in_memory=True,
)


def rows_of() -> list[bytes]:
    dataset = open_dataset(URL)
    rows = [dataset[name].rows(np.arange(len(dataset[name]))) for name in dataset.splits]
    fields = ("ids", "spans", "first_span", "origins", "first_segment")
    return [getattr(each, name).tobytes() for each in rows for name in fields] + [repr(dataset.metadata).encode()]


def damaged_objects(size: int, seed: int, folder: Path, tally: Tally) -> None:
    rng = random.Random(seed)
    job, _ = jobs_in(folder, 12, seed)
    store({})
    build(job, URL)
    whole, right = stored(), rows_of()
    ways: dict[str, Callable[[bytes], bytes | None]] = {
        "a bit flipped": lambda data: _flipped(data, rng),
        "cut": lambda data: data[: rng.randrange(len(data))],
        "longer": lambda data: data + b"\0",
        "gone": lambda data: None,
        "another object": lambda data: whole[rng.choice(sorted(whole))],
    }
    for number in range(size):
        name, (way, damage) = rng.choice(sorted(whole)), list(ways.items())[number % len(ways)]
        damaged = damage(whole[name])
        store(
            {
                each: data
                for each, data in (whole | {name: damaged or b""}).items()
                if each != name or damaged is not None
            }
        )
        os.environ["CHATMILL_CACHE_DIR"] = str(folder / f"cache-{number}")
        where, is_same = f"{Path(name).name[:16]} {way}", damaged == whole[name]
        try:
            read, line = rows_of() == right, ""
        except ChatmillError as error:
            read, line = False, str(error)
        if not read and not line:
            tally.is_wrong(f"{where}: wrong rows were read")
        elif not read and "\n" in line:
            tally.loses(f"{where}: {line}")
        elif not is_same and not verify_dataset(URL, full=True).faults:
            tally.is_wrong(f"{where}: not detected by verify --full")
        else:
            tally.judge(survived=is_same, found=True)


def _flipped(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return b"\1"
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


DAMAGED = Trial(
    "damage, object store",
    "Flips bits of objects, or truncates, extends, removes or exchanges them. Reading the dataset must give a "
    "one-line error about the object, never wrong rows",
    damaged_objects,
    full=300,
    short=20,
    in_memory=True,
)
