"""The results of training: the metrics of a step, and the result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple


class StepRecord(NamedTuple):
    """The metrics of one step."""

    step: int
    """Number of steps in the run so far, including this one."""
    loss: float | None
    """Mean over the trained tokens of the global batch; None without trained tokens."""
    grad_norm: float
    lr: float
    tokens: int
    """Tokens, excluding padding."""
    trained: int
    untrained_rows: int
    seconds: float
    """Seconds from the end of the previous step to the end of this one."""
    data_wait: float
    """Seconds spent waiting for the batch."""
    epoch: float | None = None
    """Epochs completed, including this step; None for the order `random`."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a run."""

    folder: Path
    checkpoint: Path | None
    step: int
    total: int
    """Steps of the whole run."""
    loss: float | None
    """The loss of the last step with trained tokens; None if there was no such step."""
    val_loss: float | None
    val_perplexity: float | None
    val_sources: Mapping[str, Mapping[str, float | None] | None]
    """`loss`, `perplexity` and `trained` tokens of each source of a mix; None for a source without episodes in val."""
    tokens: int
    trained: int
    untrained_rows: int
    """Rows without trained tokens, which do not affect the loss."""
    cut_episodes: int
    """Conversations that were longer than a row and lost their beginning."""
    cut_tokens: int
    answer_cut: int
    """Truncated conversations that lost part of an answer."""
    skipped_steps: int
    """Steps that post-training skipped because they had no trained tokens."""
    non_answer_tokens: int
    """Trained tokens of the train split that are not answers, because use_loss_mask is false."""
    loss_spikes: int
    """Steps in the whole run whose loss was far above the loss of the previous steps."""
    seconds: float
    """Duration of this process's steps, without evaluations and checkpoints."""
    data_wait: float
    """The part of `seconds` spent waiting for batches."""
    stopped_by: str | None
    """The signal that ended the run early, if one did."""
    stopped_early: str | None
    """Why early stopping ended the run, if it did."""
    best_step: int | None
    """The step of the evaluation with the lowest val loss."""
    best_val_loss: float | None
    best_checkpoint: Path | None
    """The checkpoint of that step, which `best` in the run folder points to, if keep_best is on."""

    def to_json(self) -> dict[str, Any]:
        values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {**values, "finished": self.step >= self.total or self.stopped_early is not None}
