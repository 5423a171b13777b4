"""The interface of experiment trackers, and the types of its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

Status = Literal["finished", "stopped", "failed"]
"""How a run ended: "finished" after its last step, "stopped" by a signal and resumable, or "failed" with an error."""


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run that a tracker receives when the run starts."""

    name: str
    folder: Path
    """The folder of the run; a tracker may write only to the subfolder with its own name."""
    config: Mapping[str, Any]
    """The config of the run, plus the hash of the data, the number of ranks, and the version of chatmill."""
    step: int
    """The last completed step: 0 for a new run, or the step of the checkpoint for a resumed run."""
    id: str | None
    """The id that `start` returned earlier for this run; None for a new run."""


class SampleAnswer(NamedTuple):
    """The model's answer to a prompt in the validation split, as text."""

    prompt: str
    """The end of the prompt, as text."""
    answer: str
    expected: str


class Tracker(Protocol):
    """An experiment tracker. All methods are called in order from one thread, which is not the training thread.

    If `start` raises `UsageError`, training does not start. After any other error from a tracker, the run continues,
    and only the first error is printed.
    """

    name: str
    """The name under which `trackers.json` stores the id of the run. A resumed run continues the tracker run with this
    id.
    """

    def start(self, run: TrackedRun) -> str | None:
        """Start a run, or continue the run `run.id`; return its id, or None if the tracker has no ids."""
        ...

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers in one line of `metrics.jsonl`; a step can have several lines."""
        ...

    def log_samples(self, step: int, samples: Sequence[SampleAnswer]) -> None:
        """Log the sample answers of an evaluation."""
        ...

    def log_artifact(self, path: Path) -> None:
        """Log a file that the run has written."""
        ...

    def finish(self, status: Status) -> None:
        """End the run; no other method is called afterwards."""
        ...


def flat(values: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """Flatten nested mappings, and join the names of nested keys with `separator`.

    >>> flat({"lora": {"r": 16}, "seed": 1})
    {'lora.r': 16, 'seed': 1}
    """
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            result |= {f"{name}{separator}{inner}": each for inner, each in flat(value, separator).items()}
        else:
            result[name] = value
    return result


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric values of one line of metrics, without the step; values in nested objects are named
    `outer/inner`.

    >>> numbers({"step": 3, "loss": None, "lr": 0.1, "rollouts": {"matched": 2}})
    {'lr': 0.1, 'rollouts/matched': 2}
    """
    values = {name: value for name, value in line.items() if name != "step"}
    return {name: value for name, value in flat(values, "/").items() if isinstance(value, int | float)}
