"""Data classes for the metrics of a training step and the result of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple


class StepRecord(NamedTuple):
    """The metrics of one training step."""

    step: int
    """Number of steps in the run so far, including this step."""
    loss: float | None
    """Mean loss over the trained tokens of the global batch; None if the batch has no trained tokens."""
    grad_norm: float
    lr: float
    tokens: int
    """Number of tokens in the step, excluding padding."""
    trained: int
    untrained_rows: int
    seconds: float
    """Seconds from the end of the previous step to the end of this step."""
    data_wait: float
    """Seconds that the step waited for its batch."""
    epoch: float | None = None
    """Number of epochs completed by the end of this step; None for the order `random`."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run."""

    folder: Path
    checkpoint: Path | None
    step: int
    total: int
    """Number of steps in the whole run."""
    loss: float | None
    """The loss of the last step with trained tokens; None if no step had trained tokens."""
    val_loss: float | None
    val_perplexity: float | None
    val_sources: Mapping[str, Mapping[str, float | None] | None]
    """Loss, perplexity and number of trained tokens of each source in a mix; None for a source without episodes in val.
    """
    tokens: int
    trained: int
    untrained_rows: int
    """Number of rows without trained tokens, which do not affect the loss."""
    cut_episodes: int
    """Number of conversations that were truncated at the start because they were longer than a row."""
    cut_tokens: int
    answer_cut: int
    """Number of truncated conversations that lost part of an answer."""
    skipped_steps: int
    """Number of steps that post-training skipped because they had no trained tokens."""
    non_answer_tokens: int
    """Number of trained tokens in the train split that are not part of answers. The run trains on these tokens because
    use_loss_mask is false.
    """
    loss_spikes: int
    """Number of steps in the whole run whose loss was far above the loss of the previous steps."""
    seconds: float
    """Total duration of the steps in this process, excluding evaluations and checkpoints."""
    data_wait: float
    """Seconds spent waiting for batches; included in `seconds`."""
    stopped_by: str | None
    """Name of the signal that ended the run early; None if no signal did."""
    stopped_early: str | None
    """The reason why early stopping ended the run; None if it did not."""
    best_step: int | None
    """The step of the evaluation with the lowest val loss."""
    best_val_loss: float | None
    best_checkpoint: Path | None
    """The checkpoint with the lowest val loss, to which the link `best` points; None if the run does not keep it."""

    def to_json(self) -> dict[str, Any]:
        values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {**values, "finished": self.step >= self.total or self.stopped_early is not None}
