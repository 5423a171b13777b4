"""Find loss spikes, which are steps with a much higher loss than previous steps, and the conversations that caused
them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from chatmill.errors import ChatmillError, one_line
from chatmill.load.loader import EpisodeLoader
from chatmill.load.source import conversation
from chatmill.train.distributed import World
from chatmill.train.run_dir import METRICS, RunDir, read_metrics
from chatmill.train.setup import TrainState
from chatmill.train.step import RowLoss, StepResult

WINDOW = 64
"""Number of previous steps whose losses are compared with the loss of a step."""
LEAST = 32
"""Minimum number of previous steps before a step can count as a loss spike."""
SPREADS = 6.0
"""A loss spike exceeds the median loss by more than `SPREADS` times the difference between the 90th percentile and the
median. The median absolute deviation would be too small, because the losses of small batches are skewed to the right.
"""
NATS = 0.5
"""A loss spike exceeds the median loss by more than this many nats."""
PRINTED = 10
"""Maximum number of loss spikes that a process prints; all spikes are counted and marked in the metrics."""
NAMED = 3
"""Maximum number of conversations that a message lists."""
SPIKE = "spike"
"""Key that marks a loss spike in the metrics of a step; its value is the loss minus the median loss."""


@dataclass
class LossSpikes:
    """Finds loss spikes in a run. All ranks get the same losses, so they find the same spikes."""

    loader: EpisodeLoader
    world: World
    print: Callable[[str], None]
    after: int
    """The last step of the warmup; warmup steps are never reported as loss spikes."""
    recent: deque[float]
    """The losses of the last `WINDOW` steps."""
    count: int
    """Number of spikes in the whole run."""
    printed: int = 0

    @classmethod
    def of_run(cls, state: TrainState, run_dir: RunDir) -> Self:
        """Create the detector for a run; if the run is resumed, read its last losses from the metrics. All ranks must
        call this function.
        """
        metrics = read_metrics(run_dir.folder) if state.world.is_first else ()
        lines = [line for line in metrics if isinstance(line.get("loss"), float)]
        mine = [[line["loss"] for line in lines[-WINDOW:]], sum(SPIKE in line for line in lines)]
        losses, count = state.world.gather(mine)[0]
        after = state.stage.start + state.stage.schedule.warmup
        return cls(state.loader, state.world, run_dir.print, after, deque(losses, maxlen=WINDOW), count)

    def follow(self, step: int, result: StepResult) -> dict[str, float]:
        """If a step is a loss spike, print a message and return the values to add to the step's metrics; otherwise,
        return an empty dict.

        All ranks must call `follow` for every step that has a loss.
        """
        loss, before = result.loss, sorted(self.recent)
        self.recent.append(loss)
        if step <= self.after or len(before) < LEAST:
            return {}
        usual, high = before[len(before) // 2], before[len(before) * 9 // 10]
        if loss <= usual + max(NATS, SPREADS * (high - usual)):
            return {}
        self.count += 1
        self.printed += 1
        if self.printed <= PRINTED:
            names = ", ".join(worst(result.rows(), self.loader, self.world, usual=usual))
            last = f"; further spikes are only marked in {METRICS}" if self.printed == PRINTED else ""
            self.print(
                f"loss spike at step {step:,}: {loss:.4f}, median {usual:.4f}; largest contributions: {names}{last}"
            )
        return {SPIKE: loss - usual}


def not_finite(rows: Sequence[RowLoss], state: TrainState) -> str:
    """Explain a non-finite loss or gradient: return a text that lists the conversations with the highest losses and
    suggests a fix.

    All ranks must call this function.
    """
    loader, world = state.loader, state.world
    wrong, count = map(int, world.sums([sum(not math.isfinite(row.loss) for row in rows), len(rows)]))
    names = worst(rows, loader, world)
    if not wrong:
        # All losses are finite, but the gradient is not.
        if not names:
            return "the step has no trained tokens, so the data is not the cause; lower learning_rate"
        return f"the highest losses are: {', '.join(names)}; inspect these conversations, or lower learning_rate"
    shown = ", ".join(names[:wrong]) + (f" and {wrong - len(names):,} more" if wrong > len(names) else "")
    if wrong == count:
        return f"all {count:,} conversations have a non-finite loss: {shown}; lower learning_rate, or inspect the data"
    return f"{wrong:,} of {count:,} conversations have a non-finite loss: {shown}; inspect these conversations"


def worst(rows: Sequence[RowLoss], loader: EpisodeLoader, world: World, *, usual: float = 0.0) -> list[str]:
    """Return the conversations on all ranks with the largest values of (loss - `usual`) * weight. Conversations with a
    non-finite loss come first.
    """

    def key(row: RowLoss) -> tuple[float, int, int]:
        above = (row.loss - usual) * row.weight if math.isfinite(row.loss) else math.inf
        return -above, row.episode, row.segment

    def name(row: RowLoss) -> str:
        over = f" over {row.weight:,.6g} tokens" if math.isfinite(row.loss) else ""
        return conversation_name(loader, row.episode, row.segment, f"loss {row.loss:.4g}{over}")

    mine = [[*key(row), name(row)] for row in sorted(rows, key=key)[:NAMED]]
    return [each[-1] for each in sorted(each for rank in world.gather(mine) for each in rank)[:NAMED]]


def conversation_name(loader: EpisodeLoader, episode: int, segment: int, *details: str) -> str:
    """Format the location and details of a conversation, such as `chat.jsonl:12 (episode 11, loss 9.2)`."""
    number, source, place = episode, "", None
    with suppress(ChatmillError):
        origin = conversation(loader.sources, loader.split, episode, segment)
        if origin is not None:
            number, source, place = origin.episode, origin.source.name, origin.place
    parts = ([] if place is None else [one_line(place, 200)]) + [f"episode {number}", *details]
    others = f" ({', '.join(parts[1:])})" if len(parts) > 1 else ""
    return f"{one_line(source)} {parts[0]}".strip() + others
