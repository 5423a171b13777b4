"""Kill a loop that draws batches and saves its state, at random moments, again and again, and look at what is left.

    python scripts/audit_gauntlet.py --kills 50

The loop resumes from the last state that was saved, draws batches of a mixed and packed dataset with an audit log, and
saves the state of both every few steps. Its lines reach the disk a few bytes at a time, so that SIGKILL tears
many. After every kill the log must verify against the dataset, with the head that the saved state keeps; log and
state must stand at the same step; and the loop must be able to go on. All is done in a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from chatmill.cli.main import main as chatmill
from chatmill.load.audit import Audit
from chatmill.load.audit_check import verify_log
from chatmill.load.audit_log import Line, read_log
from chatmill.load.loader import EpisodeLoader
from chatmill.store import files

DATA = Path(__file__).resolve().parents[1] / "data" / "conversations.jsonl"
CONFIG = {
    "batch_size": 4,
    "block_size": 256,
    "packing": "bins",
    "mix_sft": {"day": 0.7, "night": 0.3},
    "mix_by": "trained_tokens",
    "use_loss_mask": True,
}
EVERY, SAVED_EACH = 3, 7


class Dribbling(files.Disk):
    """Writes a few bytes at a time, and takes its time."""

    def write(self, fd: int, data: bytes) -> int:
        time.sleep(0.0005)
        return os.write(fd, data[: random.randint(1, 60)])


def loop(folder: Path, steps: int | None, ready: Callable[[], None] = lambda: None) -> None:
    """Draw batches from where the saved state stands, for ever or up to a step; `ready` is called before the first."""
    saved = json.loads((folder / "state.json").read_bytes()) if (folder / "state.json").exists() else None
    audit = Audit(folder / "logs", every=EVERY, state=saved and saved["audit"])
    loader = EpisodeLoader(folder / "mix", CONFIG, listener=audit, tensors=False)
    if saved is not None:
        loader.load_state_dict(saved["loader"])
    files.disk = Dribbling()
    ready()
    while steps is None or loader.cursor().step < steps:
        loader.get_batch()
        if loader.cursor().step % SAVED_EACH == 0:
            state = {"audit": audit.checkpoint(), "loader": loader.state_dict()}
            files.write_file(folder / "state.json", json.dumps(state).encode(), overwrite=True)
    audit.close()


def killed(folder: Path, seconds: float, *, drawing: bool) -> bool:
    """Run the loop in a process of its own and kill it after a while, counted from its start or its first batch.

    Whether it was still running then.
    """
    told, tell = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            loop(folder, None, lambda: os.close(tell))
        finally:
            os._exit(1)
    os.close(tell)
    if drawing:
        # Nothing is written: it ends when the other side closes it, or dies.
        os.read(told, 1)
    time.sleep(seconds)
    os.close(told)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return os.WIFSIGNALED(status)


def look(folder: Path, counts: Counter[str]) -> None:
    """Hold the log against the dataset and against the saved state."""
    state = json.loads((folder / "state.json").read_bytes()) if (folder / "state.json").exists() else None
    for log in sorted((folder / "logs").glob("audit_*.log")):
        found = read_log(log)
        counts["torn at the end"] += bool(found) and not isinstance(found[-1], Line)
        if not any(isinstance(line, Line) for line in found):
            counts["killed before its first line"] += 1
            log.unlink()
            continue
        # A log that was begun before any state was saved was given up with the process that began it.
        mine = state is not None and state["audit"]["log"] == log.name
        heads = {"the saved state": state["audit"]["head"]} if mine else {}
        checked = verify_log(log, folder / "mix", heads=heads)
        if checked.fault is not None:
            raise SystemExit(f"the log does not verify: {checked.fault}")
        if mine:
            at = next(line for line in found if isinstance(line, Line) and line.sha256 == heads["the saved state"])
            stands = {name: int(value) for name, value in at.fields.items()}
            if stands != state["loader"]["cursors"]["train"]:
                raise SystemExit(f"the log stands at {stands}, the loader at {state['loader']['cursors']['train']}")
            counts["log and state agree"] += 1
            counts["lines"] = checked.lines
            counts["torn lines"] = len(checked.torn)
            counts["abandoned lines"] = checked.abandoned


def run(kills: int, seed: int, folder: Path) -> Counter[str]:
    rng, counts = random.Random(seed), Counter[str]()
    for name, split in (("day", 0.1), ("night", 0.2)):
        command = ["chatmill", "prepare", str(DATA), "-o", str(folder / "mix" / name), "--val-split", str(split)]
        sys.argv = [*command, "--workers", "1"]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            chatmill()
    for number in range(kills):
        seconds = rng.uniform(0.0, 0.4)
        counts["killed while it ran"] += killed(folder, seconds, drawing=number % 4 != 3)
        look(folder, counts)
    saved = folder / "state.json"
    last = json.loads(saved.read_bytes())["audit"]["cursor"]["step"] if saved.exists() else 0
    loop(folder, last + 20)
    look(folder, counts)
    counts["tried"], counts["steps"] = kills, last + 20
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chatmill-audit-") as folder:
        counts = run(args.kills, args.seed, Path(folder))
    for name, count in counts.items():
        print(f"{name:<30} {count:>6}")
    return 0 if counts["killed while it ran"] == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
