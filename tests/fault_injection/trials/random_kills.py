"""Kill builds at random moments; one build in six is killed after its metadata is written. The build is resumed after
every tenth kill and after the last one.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from chatmill.store.layout import METADATA
from chatmill.store.publish import recover, staging_for
from chatmill.store.verify import verify_dataset
from fault_injection import TESTS
from fault_injection.trial import Tally, Trial

DATA = TESTS.parent / "data" / "conversations.jsonl"
SHARDS = 12
RESUMED_EACH = 10
AT_ONCE = 2


@dataclass(frozen=True)
class Build:
    folder: Path
    input: str
    shard_tokens: int
    seconds: float = 0.0
    sha256: str = ""

    @property
    def target(self) -> Path:
        return self.folder / "dataset"

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "from chatmill.cli.main import main; main()", "prepare", self.input]
        command += ["-o", self.target.name, "--workers", "1", "--shard-tokens", str(self.shard_tokens), "--json"]
        return subprocess.Popen([*command, *flags], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def finish(self, *flags: str) -> tuple[str, int]:
        out, err = (process := self.start(*flags)).communicate()
        if process.returncode:
            return f"exit {process.returncode}: {err.decode().strip()}", 0
        summary = json.loads(out)
        return summary["sha256"], summary["splits"]["train"]["shards"]


def calibrated(folder: Path, seconds: float) -> Build:
    lines, copies = DATA.read_bytes(), 20
    while True:
        (folder / "input.jsonl").write_bytes(lines * copies)
        build = Build(folder, str(folder / "input.jsonl"), max(1, copies * len(lines) // (2 * SHARDS)))
        began = time.perf_counter()
        sha256, shards = build.finish()
        took = time.perf_counter() - began
        if not shards:
            raise AssertionError(f"an uninterrupted build fails: {sha256}")
        shutil.rmtree(build.target)
        if took >= seconds and shards >= 8:
            return replace(build, seconds=took, sha256=sha256)
        copies = int(copies * min(4.0, max(1.2, 1.15 * seconds / took)))


def killed(build: Build, rng: random.Random, *flags: str, late: bool) -> bool:
    process = build.start(*flags)
    if late:
        while process.poll() is None and not (staging_for(build.target) / METADATA).exists():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03 * build.seconds))
    else:
        time.sleep(rng.uniform(0.05, 0.97) * build.seconds)
    running = process.poll() is None
    process.kill()
    process.communicate()
    return running


def state(build: Build, old: str | None) -> str:
    # A build may have been killed between the two renames of a replacement; the next command repairs this.
    recover(build.target)
    if not build.target.exists():
        return "absent" if old is None else "the old dataset is gone"
    report = verify_dataset(build.target, full=True)
    if report.faults:
        return report.faults[0]
    return {build.sha256: "new", old: "old"}.get(report.sha256, f"unexpected dataset {report.sha256}")


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    seconds = 5.0 if size >= 100 else 1.2
    tally.expected = size
    (folder / "first").mkdir()
    first = calibrated(folder / "first", seconds)
    old_sha256, _ = Build(folder / "first", str(DATA), 10_000).finish()
    shutil.move(first.target, folder / "old")
    counting = Lock()

    def lane(number_of_lane: int) -> None:
        build = replace(first, folder=folder / f"lane-{number_of_lane}")
        build.folder.mkdir()
        for number in range(number_of_lane, size, AT_ONCE):
            # If a build ended before it could be killed, schedule the next kill earlier.
            build = replace(build, seconds=build.seconds * (1.005 if one(build, number) else 0.9))

    def one(build: Build, number: int) -> bool:
        rng = random.Random(f"{seed} {number}")
        turn = number // AT_ONCE
        replacing = turn % 2 == 1
        shutil.rmtree(build.target, ignore_errors=True)
        if replacing:
            shutil.copytree(folder / "old", build.target)
        flags = ("--overwrite",) if replacing else ()
        running = killed(build, rng, *flags, late=turn % 12 in (5, 10))
        left = state(build, old_sha256 if replacing else None)
        resumes = turn % RESUMED_EACH == RESUMED_EACH - 1 or number >= size - AT_ONCE
        again = ""
        if resumes and left in ("absent", "old", "new"):
            flags = ("--overwrite",) if build.target.exists() else ()
            again, _ = build.finish("--resume", *flags)
        with counting:
            tally.notes["builds killed while running"] += running
            tally.notes["builds killed before publishing"] += running and left in ("absent", "old")
            tally.notes["builds resumed to the same hash"] += again == build.sha256
            if again and again != build.sha256 and not again.startswith("exit"):
                tally.is_wrong(f"kill {number}: resumed to a different dataset, {again}")
            elif again and again != build.sha256:
                tally.loses(f"kill {number}: cannot be resumed: {again}")
            else:
                tally.judge(survived=left in ("absent", "old", "new"), lost=f"kill {number}: {left}")
        return running

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lane, range(AT_ONCE)))
    tally.notes["milliseconds per uninterrupted build"] = round(1000 * first.seconds)
    if tally.notes["builds killed before publishing"] < 0.75 * size and size >= 100:
        # Too many builds finished before they were killed, which is a problem with the trial, not with chatmill.
        tally.broke = "too few builds were killed before they published"


TRIAL = Trial(
    "kill at random moments, prepare",
    "Kills `chatmill prepare` at random moments. The target must be absent, or the complete old or new dataset. "
    "Every tenth build is resumed and must reach the same hash",
    work,
    full=200,
    short=4,
    cores=2,
)
