"""One rank of a training run, started by torchrun: `rank.py DATA FOLDER NAME KILL_AT VICTIM LATER`.

Rank VICTIM kills itself LATER seconds after step KILL_AT, but not again after a restart. If KILL_AT is 0, no rank is
killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fault_injection
from chatmill.cli.guard import guarded
from chatmill.train.command import errors_of_first_rank
from chatmill.train.loop import train_model

sys.path.append(str(fault_injection.TESTS / "train"))
STEPS: dict[str, Any] = {"max_iters": 24, "save_interval": 3}


def run(data: str, folder: str, name: str, kill_at: int = 0, victim: int = 0, later: float = 0.0) -> None:
    killed = Path(folder) / f"{name}.killed"
    dies = bool(kill_at) and int(os.environ.get("RANK", 0)) == victim and not killed.exists()

    def watch(step: Any) -> None:
        if dies and step.step == kill_at:
            killed.touch()
            time.sleep(later)
            os.kill(os.getpid(), signal.SIGKILL)

    from train_fixtures import config

    train_model(
        config(**STEPS), model_name=name, dataset_dir=data, out_dir=folder, resume="auto", watch=watch, quiet=True
    )


def run_as_command(data: str, folder: str, name: str, kill_at: int, victim: int, later: float) -> None:
    def command() -> None:
        with errors_of_first_rank():
            run(data, folder, name, kill_at, victim, later)

    guarded(command)


if __name__ == "__main__":
    data, folder, name, kill_at, victim, later = sys.argv[1:]
    run_as_command(data, folder, name, int(kill_at), int(victim), float(later))
