"""Kill `chatmill prepare` at random moments, again and again, and look at what is left.

    python scripts/gauntlet.py --kills 200          about a quarter of an hour
    python scripts/gauntlet.py --kills 8 --seconds 1

A build of at least 8 shards by two workers gets SIGKILL, all its processes at once; every second one is to replace an
older dataset. Most moments are anywhere in a build, one in six in its last steps, between the metadata and the end.
Afterwards the target must be absent, or the old dataset, or the new one with every byte checked. After every tenth
kill, and the last, the build is resumed and must give the hash of one that was never disturbed. All is done in a
temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from chatmill.store.layout import METADATA
from chatmill.store.publish import recover, staging_for
from chatmill.store.verify import verify

DATA = Path(__file__).resolve().parents[1] / "data" / "conversations.jsonl"
SHARDS = 12
RESUMED_EACH = 10


@dataclass(frozen=True)
class Build:
    """The command, and what it gives when nobody disturbs it."""

    folder: Path
    input: str
    shard_tokens: int
    seconds: float = 0.0
    sha256: str = ""
    shards: int = 0

    @property
    def target(self) -> Path:
        return self.folder / "dataset"

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        """Begin, as the leader of a group of processes that can be killed together."""
        command = [sys.executable, "-c", "from chatmill.cli.main import main; main()", "prepare", self.input]
        command += ["-o", self.target.name, "--workers", "2", "--shard-tokens", str(self.shard_tokens), "--json"]
        return subprocess.Popen(
            [*command, *flags], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    def finish(self, *flags: str) -> tuple[str, int]:
        """Build to the end; the hash and the number of shards."""
        process = self.start(*flags)
        out, err = process.communicate()
        if process.returncode:
            raise SystemExit(f"the build failed: {err.decode().strip()}")
        summary = json.loads(out)
        return summary["sha256"], summary["splits"]["train"]["shards"]


def calibrated(folder: Path, seconds: float) -> Build:
    """Input that takes so long to build, and its build."""
    lines, copies = DATA.read_bytes(), 100
    while True:
        with (folder / "input.jsonl").open("wb") as file:
            for _ in range(copies):
                file.write(lines)
        build = Build(folder, "input.jsonl", max(1, copies * len(lines) // (2 * SHARDS)))
        began = time.perf_counter()
        sha256, shards = build.finish()
        took = time.perf_counter() - began
        shutil.rmtree(build.target)
        if took >= seconds and shards >= 8:
            return replace(build, seconds=took, sha256=sha256, shards=shards)
        copies = int(copies * max(1.2, 1.1 * seconds / took))


def killed(build: Build, rng: random.Random, *flags: str, late: bool) -> bool:
    """Start a build and kill it at a random moment; whether it was still running then."""
    process = build.start(*flags)
    if late:
        while process.poll() is None and not (staging_for(build.target) / METADATA).exists():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03 * build.seconds))
    else:
        time.sleep(rng.uniform(0.05, 0.97) * build.seconds)
    running = process.poll() is None
    if running:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return running


def state(build: Build, old: str | None) -> str:
    """What stands under the target's name: absent, old, new, or lost."""
    # As the next command would: it undoes a replacement that was killed between two renames.
    recover(build.target)
    if not build.target.exists():
        return "absent" if old is None else "lost"
    found = verify(build.target, full=True)
    if found.faults:
        return "lost"
    return {build.sha256: "new", old: "old"}.get(found.sha256, "lost")


def run(kills: int, seconds: float, seed: int, folder: Path) -> Counter[str]:
    rng, counts = random.Random(seed), Counter[str]()
    build = calibrated(folder, seconds)
    print(f"a build of {build.shards} shards takes {build.seconds:.1f} s with two workers")
    old_sha256, _ = Build(folder, str(DATA), 10_000).finish()
    shutil.move(build.target, folder / "old")
    for number in range(kills):
        replacing = number % 2 == 1
        shutil.rmtree(build.target, ignore_errors=True)
        if replacing:
            shutil.copytree(folder / "old", build.target)
        flags = ("--overwrite",) if replacing else ()
        counts["killed while it ran"] += killed(build, rng, *flags, late=number % 12 in (5, 10))
        left = state(build, old_sha256 if replacing else None)
        counts[f"target {left}"] += 1
        counts["before it published"] += left in ("absent", "old")
        if (number % RESUMED_EACH == RESUMED_EACH - 1 or number == kills - 1) and left != "lost":
            flags = ("--overwrite",) if build.target.exists() else ()
            counts["resumed"] += 1
            counts["resumed, the same hash"] += build.finish("--resume", *flags)[0] == build.sha256
    counts["tried"] = kills
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long a build should take at least")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chatmill-gauntlet-") as folder:
        counts = run(args.kills, args.seconds, args.seed, Path(folder))
    rows = ("tried", "killed while it ran", "before it published", "target absent", "target old", "target new")
    for name in (*rows, "resumed", "resumed, the same hash", "target lost"):
        print(f"{name:<24} {counts[name]:>5}")
    lost = counts["target lost"] + counts["resumed"] - counts["resumed, the same hash"]
    return 1 if lost or counts["before it published"] < 0.75 * args.kills else 0


if __name__ == "__main__":
    sys.exit(main())
