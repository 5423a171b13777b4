"""Change input files; where possible, keep their size and modification time, as `cp -p` or a restored backup does."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prepare_fixtures import build, conversations, digests, lines

from chatmill.prepare import pipeline
from chatmill.prepare.job import InputSource, Job
from fault_injection.processes import outcome
from fault_injection.trial import Tally, Trial

UNIT_BYTES = 1_500
MOMENTS = ("planning", "reading", "undone", "resumed", "resumed and reading")
Change = Callable[[Path, random.Random], None]


def packed(name: str, data: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(data, 1, mtime=0)
    if name.endswith(".json"):
        return b"[" + b",\n".join(data.splitlines()) + b"]"
    if name.endswith(".txt"):
        texts = (json.dumps([each["content"] for each in json.loads(line)["messages"]]) for line in data.splitlines())
        return "".join(f"<|USER|>{text}<|END|><|ASSISTANT|>{text}<|END|><|EOS|>\n" for text in texts).encode()
    return data


@contextmanager
def same_times(path: Path) -> Iterator[None]:
    before = path.stat()
    yield
    with suppress(FileNotFoundError):
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def rewritten(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    if path.name.endswith(".gz"):
        data = gzip.compress(gzip.decompress(data).replace(b"mill", b"bill"), 1, mtime=0)
    with same_times(path), path.open("r+b") as file:
        file.write(data.replace(b"mill", b"bill").replace(b"grain", b"brain"))
        file.truncate()


def replaced(path: Path, rng: random.Random) -> None:
    with same_times(path):
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        rewritten(other, rng)
        other.replace(path)


def reordered(path: Path, rng: random.Random) -> None:
    """Shuffle the lines of a text file, which changes their offsets but not the size of the file."""
    data = path.read_bytes()
    shuffled = data.splitlines(keepends=True)
    rng.shuffle(shuffled)
    with same_times(path):
        path.write_bytes(b"".join(shuffled) if path.suffix in (".jsonl", ".txt") else data + b" ")


def longer(path: Path, rng: random.Random) -> None:
    with same_times(path), path.open("ab") as file:
        file.write(packed(path.name, lines(conversations(2, seed=rng.randrange(99)))))


def shorter(path: Path, rng: random.Random) -> None:
    with same_times(path):
        os.truncate(path, rng.randrange(path.stat().st_size))


def removed(path: Path, rng: random.Random) -> None:
    path.unlink()


def one_more(path: Path, rng: random.Random) -> None:
    path.with_name(f"z{path.name}").write_bytes(path.read_bytes())


def touched(path: Path, rng: random.Random) -> None:
    os.utime(path, (at := rng.randrange(2**31), at))


def copied(path: Path, rng: random.Random) -> None:
    path.with_name("other").write_bytes(path.read_bytes())
    path.with_name("other").replace(path)


CHANGES: tuple[Change, ...] = (rewritten, replaced, reordered, longer, shorter, removed, one_more, touched, copied)
HARMLESS = (touched, copied)


class InterruptedBuild(KeyboardInterrupt):
    pass


def after(units: int, change: Callable[[], None]) -> Callable[[pipeline.BuildProgress], None]:
    seen = 0

    def on_progress(progress: pipeline.BuildProgress) -> None:
        nonlocal seen
        seen += progress.step == "render"
        if seen == units:
            seen += 1
            change()

    return on_progress


def stop() -> None:
    raise InterruptedBuild


def once(place: Path, change: Change, moment: str, rng: random.Random) -> str:
    paths = sorted(place.glob("in/*"))
    path, target = rng.choice(paths), place / "x"
    job = Job((InputSource((str(place / "in" / "*"),)),), on_error=rng.choice(["stop", "skip"]))
    whole = path.read_bytes()

    def restore() -> None:
        path.write_bytes(whole)

    if moment == "planning":
        opened = pipeline.job_renderer(job)

        def slow(job: Job) -> object:
            change(path, rng)
            return opened

        pipeline.job_renderer, original = slow, pipeline.job_renderer
        try:
            return build(job, target, unit_bytes=UNIT_BYTES).sha256
        finally:
            pipeline.job_renderer = original
    changing = after(rng.randrange(1, 5), lambda: change(path, rng))
    if moment.startswith("resumed"):
        with suppress(InterruptedBuild):
            build(job, target, unit_bytes=UNIT_BYTES, on_progress=after(rng.randrange(1, 9), stop))
        if moment == "resumed":
            change(path, rng)
            changing = after(-1, stop)
        # If the build finished before it could be interrupted, start it over.
        resumed = {"resume": True, "overwrite": True, "on_progress": changing}
        return build(job, target, unit_bytes=UNIT_BYTES, **resumed).sha256
    undoing = after(rng.randrange(5, 9), restore) if moment == "undone" else (lambda progress: None)

    def both(progress: pipeline.BuildProgress) -> None:
        changing(progress)
        undoing(progress)

    return build(job, target, unit_bytes=UNIT_BYTES, on_progress=both).sha256


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    tally.expected = size
    for number in range(size):
        rng = random.Random(f"{seed} {number}")
        change, moment = CHANGES[number % len(CHANGES)], MOMENTS[number // len(CHANGES) % len(MOMENTS)]
        place = folder / str(number)
        (place / "in").mkdir(parents=True)
        for name in rng.sample(["a.jsonl", "b.jsonl.gz", "c.json", "d.txt", "e.jsonl"], 3):
            data = lines(conversations(rng.randrange(10, 25), seed=rng.randrange(999)))
            (place / "in" / name).write_bytes(packed(name, data))
        ended = outcome(lambda place=place, change=change, moment=moment, rng=rng: once(place, change, moment, rng))
        what = f"attempt {number}: {change.__name__}, {moment}"
        if ended.value is None:
            harmed = change in HARMLESS and not ended.broke
            tally.judge(found=bool(ended.refused) and not harmed, lost=f"{what}: {ended.broke or ended.refused}")
            continue
        job = Job((InputSource((str(place / "in" / "*"),)),), on_error="skip")
        build(job, place / "right")
        if digests(place / "x") == digests(place / "right"):
            tally.survives()
        else:
            tally.is_wrong(f"{what}: the dataset does not match the input")


TRIAL = Trial(
    "changed input files",
    "Changes, replaces, adds or removes input files during a build or before it is resumed. The build must end with "
    "a one-line error or give the dataset of the final input. Running `touch` on a file must have no effect",
    work,
    full=2_000,
    short=45,
    in_memory=True,
)
