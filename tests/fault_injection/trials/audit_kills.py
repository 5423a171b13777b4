"""After every killed run, the audit log must be valid, and must contain the step of the saved state."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chatmill.store import files
from fault_injection import TESTS
from fault_injection.disks import Dribbling
from fault_injection.processes import Ended, begin, outcome
from fault_injection.trial import Tally, Trial

DATA = TESTS.parent / "data" / "conversations.jsonl"
CONFIG: dict[str, Any] = {
    "batch_size": 4,
    "block_size": 256,
    "packing": "bins",
    "mix_sft": {"day": 0.7, "night": 0.3},
    "mix_by": "trained_tokens",
    "use_loss_mask": True,
}
EVERY, SAVED_EACH = 3, 7


def saved(folder: Path) -> Any:
    path = folder / "state.json"
    return json.loads(path.read_bytes()) if path.exists() else None


def loop(folder: Path, steps: int | None, ready: Callable[[], None] = lambda: None) -> None:
    from chatmill.audit import Audit
    from chatmill.load.loader import EpisodeLoader

    state = saved(folder)
    audit = Audit(folder / "logs", every=EVERY, state=state and state["audit"])
    loader = EpisodeLoader(folder / "mix", CONFIG, listener=audit, tensors=False)
    if state is not None:
        loader.load_state_dict(state["loader"])
    files.disk = Dribbling(60)
    ready()
    while steps is None or loader.cursor().step < steps:
        loader.get_batch()
        if loader.cursor().step % SAVED_EACH == 0:
            now = {"audit": audit.checkpoint(), "loader": loader.state_dict()}
            files.write_file(folder / "state.json", json.dumps(now).encode(), overwrite=True)
    audit.close()


def killed(folder: Path, seconds: float, *, drawing: bool) -> Ended:
    ready_end, send_ready = os.pipe()
    child = begin(lambda: loop(folder, None, lambda: os.close(send_ready)))
    os.close(send_ready)
    if drawing:
        # `os.read` returns when the child closes its end of the pipe: just before its first batch, or when it exits.
        os.read(ready_end, 1)
    time.sleep(seconds)
    os.close(ready_end)
    return child.kill()


def look(folder: Path, tally: Tally) -> bool:
    from chatmill.audit import LogLine, read_log, verify_log

    state, agreed = saved(folder), False
    for log in sorted((folder / "logs").glob("audit_*.log")):
        found = read_log(log)
        tally.notes["logs had a torn last line"] += bool(found) and not isinstance(found[-1], LogLine)
        if not any(isinstance(line, LogLine) for line in found):
            log.unlink()
            continue
        # If a process is killed before it saves a state, no later process continues its log.
        mine = state is not None and state["audit"]["log"] == log.name
        heads = {"the saved state": state["audit"]["head"]} if mine else {}
        checked = verify_log(log, folder / "mix", heads=heads)
        assert checked.fault is None, checked.fault
        if mine:
            at = next(line for line in found if isinstance(line, LogLine) and line.sha256 == heads["the saved state"])
            stands = {name: int(value) for name, value in at.fields.items()}
            where = state["loader"]["cursors"]["train"]
            assert stands == where, f"the log is at {stands}, the loader is at {where}"
            agreed = True
    return agreed


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    from train_fixtures import run_chatmill

    rng = random.Random(seed)
    tally.expected = size
    for name, split in (("day", "0.1"), ("night", "0.2")):
        where = str(folder / "mix" / name)
        run_chatmill("prepare", str(DATA), "-o", where, "--val-split", split, "--workers", "1")
    for number in range(size):
        ended = killed(folder, rng.uniform(0.0, 0.4), drawing=number % 4 != 3)
        if number == size - 1 and ended.killed:
            step = state["audit"]["cursor"]["step"] if (state := saved(folder)) else 0
            ended = begin(lambda step=step: loop(folder, step + 20)).end()
        if ended.refused or ended.broke:
            tally.loses(f"kill {number}: the loop cannot be resumed: {ended.refused or ended.broke}")
            continue
        seen = outcome(lambda: look(folder, tally))
        tally.notes["kills left a saved state at the same step as its log"] += bool(seen.value)
        tally.judge(survived=seen.value is not None, lost=f"kill {number}: {seen.refused or seen.broke}")


TRIAL = Trial(
    "kill at random moments, audit log",
    "Kills a loop that reads batches, writes an audit log and saves its state. `audit verify` must accept the log, "
    "and the log and the state must be at the same step",
    work,
    full=50,
    short=3,
)
