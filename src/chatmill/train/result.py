"""The results of training: the metrics of a step, and the result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple


class StepRecord(NamedTuple):
    """The metrics of one step."""

    step: int
    """Steps of the run, this one included."""
    loss: float | None
    """The mean over the trained tokens of the global batch; None if there are none."""
    grad_norm: float
    lr: float
    tokens: int
    """Tokens without padding."""
    trained: int
    untrained_rows: int
    seconds: float
    """From the end of the step before to the end of this one."""
    data_wait: float
    """Seconds spent waiting for the batch."""
    epoch: float | None = None
    """Passes over the data, this step included; None for the order `random`."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a run."""

    folder: Path
    checkpoint: Path | None
    step: int
    total: int
    """Steps of the whole run."""
    loss: float | None
    """The loss of the last step with a trained token; None if there was none."""
    val_loss: float | None
    val_perplexity: float | None
    val_sources: Mapping[str, Mapping[str, float | None] | None]
    """`loss`, `perplexity` and `trained` tokens of each source of a mix; None for one without episodes in val."""
    tokens: int
    trained: int
    untrained_rows: int
    """Rows without a trained token, which do not count."""
    cut_episodes: int
    """Conversations longer than a row, which lost their beginning."""
    cut_tokens: int
    answer_cut: int
    """Of these, conversations that lost part of an answer."""
    skipped_steps: int
    """Steps of post-training without a trained token."""
    non_answer_tokens: int
    """Trained tokens of the train split that are not answers, because use_loss_mask is false."""
    loss_spikes: int
    """Steps of the whole run whose loss was far above that of the steps before."""
    seconds: float
    """Of the steps of this process, without evaluations and checkpoints."""
    data_wait: float
    """Seconds of them spent waiting for batches."""
    stopped_by: str | None
    """The signal that ended the run early, if one did."""
    stopped_early: str | None
    """Why early stopping ended the run, if it did."""
    best_step: int | None
    """The step of the evaluation with the lowest val loss."""
    best_val_loss: float | None
    best_checkpoint: Path | None
    """Its checkpoint, to which `best` in the run folder points, with keep_best."""

    def to_json(self) -> dict[str, Any]:
        values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {**values, "finished": self.step >= self.total or self.stopped_early is not None}
