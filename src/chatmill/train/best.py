"""Track the lowest val loss of a run, link its checkpoint as `best`, and stop early if the loss stops improving.

    checkpoints/NAME/best -> step_00000400

The link `best` always points to a complete checkpoint. The link is replaced after the new checkpoint is published and
before the old checkpoint is removed. Every checkpoint stores the state of `BestEval`, so a resumed run stops early at
the same step.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from chatmill.errors import DataError, UsageError
from chatmill.load.loader import EpisodeLoader
from chatmill.load.row_size import marked_tokens
from chatmill.store import files
from chatmill.train.checkpoint_files import BEST, step_name
from chatmill.train.config import TrainConfig


@dataclass
class BestEval:
    """The lowest val loss of a run, and the number of evaluations since it last improved."""

    loss: float | None = None
    step: int = 0
    reference: float | None = None
    """A val loss is an improvement if it is lower than `reference` by more than early_stop_min_delta."""
    waited: int = 0
    """Number of evaluations since the last improvement."""

    def add(self, loss: float | None, step: int, *, min_delta: float) -> bool:
        """Record the loss of an evaluation; return whether the loss is finite and the lowest so far."""
        if loss is None:
            return False
        is_finite = math.isfinite(loss)
        if is_finite and (self.reference is None or loss < self.reference - min_delta):
            self.reference, self.waited = loss, 0
        else:
            self.waited += 1
        is_best = is_finite and (self.loss is None or loss < self.loss)
        if is_best:
            self.loss, self.step = loss, step
        return is_best

    def stops(self, config: TrainConfig) -> bool:
        return config.early_stop_patience is not None and self.waited >= config.early_stop_patience

    def reason(self, config: TrainConfig) -> str:
        """Explain why the run stopped early."""
        least = f" by more than {config.early_stop_min_delta:g}" if config.early_stop_min_delta else ""
        below = "" if self.reference is None else f" below {self.reference:.4f}{least}"
        evaluations = "1 evaluation" if self.waited == 1 else f"{self.waited} evaluations"
        return f"val loss has not fallen{below} for {evaluations} (early_stop_patience {config.early_stop_patience})"

    def compared(self, is_best: bool, config: TrainConfig) -> str:
        """Return a comparison of the last val loss with the lowest, or "" if the run does not track the lowest loss."""
        if self.loss is None or not (config.keeps_best or config.early_stop_patience):
            return ""
        return ", the lowest so far" if is_best else f"; the lowest was {self.loss:.4f} at step {self.step:,}"

    def folder(self, run: Path, *, writing: int | None = None) -> Path | None:
        """Return the folder of the checkpoint with the lowest val loss, or None if the folder does not exist. The
        folder of step `writing` is returned even if it does not exist yet.
        """
        path = run / step_name(self.step)
        return path if self.loss is not None and (self.step == writing or path.is_dir()) else None


def check_evaluates(config: TrainConfig, loader: EpisodeLoader) -> None:
    """Raise `UsageError` if early stopping or keep_best needs a val loss that the data cannot provide."""
    if config.early_stop_patience is None and not config.keeps_best:
        return
    why = "keep_best is true" if config.early_stop_patience is None else "early_stop_patience is set"
    sources = loader.sources_of("val")
    if not sources:
        raise UsageError(
            f"{why}, but the val split of {loader.dataset_dir} is empty; prepare the dataset with --val-split"
        )
    if config.use_loss_mask and not any(marked_tokens(source, "val") for source in sources):
        raise UsageError(
            f"{why}, but the val split of {loader.dataset_dir} has no trained tokens; prepare the dataset with a "
            f"larger --val-split"
        )


def link_best(run: Path, checkpoint: Path | None) -> None:
    """Point the symlink `best` of a run to a checkpoint; if `checkpoint` is None, remove the symlink."""
    link = run / BEST
    if os.path.lexists(link) and not link.is_symlink():
        raise DataError(
            f"{link}: is not a link to the best checkpoint; rename this file or folder, or set keep_best to false"
        )
    if checkpoint is None:
        if link.is_symlink():
            files.disk.remove(link)
            files.disk.sync(run)
        return
    if link.is_symlink() and str(link.readlink()) == checkpoint.name:
        return
    aside = run / f".{BEST}.part"
    if os.path.lexists(aside):
        files.disk.remove(aside)
    files.disk.symlink(checkpoint.name, aside)
    files.disk.rename(aside, link)
    files.disk.sync(run)
