"""The number of steps in a run: `max_iters`, `epochs`, or one pass over the data.

    epochs 2.5, packed:  steps of epoch 0 + steps of epoch 1 + half of those of epoch 2

Packing differs between epochs, so the loader's plan is used to count the steps in each epoch. Sampling from a mix never
ends. One epoch of a mix has as many episodes as all its sources together, drawn according to the mix weights. With
`mix_epochs`, one epoch of a mix contains the given number of epochs of each source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from chatmill.errors import UsageError, one_line
from chatmill.load.loader import EpisodeLoader
from chatmill.load.mix import MixedOrder
from chatmill.load.plan import LoadPlan
from chatmill.train.config import TrainConfig

FEW_STEPS = 10
"""A run with fewer steps than this prints a note."""


@dataclass(frozen=True)
class RunLength:
    """The number of steps in a run, and the number of episodes that are dropped at the end of an epoch."""

    steps: int
    left_out: int = 0
    """Number of episodes at the end of the last whole epoch that do not fill a batch."""
    whole_epochs: int = 0
    notes: Sequence[str] = ()

    def left_out_note(self, loader: EpisodeLoader) -> Iterator[str]:
        """Yield a message about the episodes that are dropped because they do not fill a batch, if any."""
        if self.left_out:
            # The number can differ between epochs, because packing depends on the order.
            about, which = ("", "the epoch") if self.whole_epochs == 1 else ("about ", "each epoch")
            episodes = f"{about}{self.left_out:,} of {loader.plan(loader.split).num_eligible:,} episodes"
            yield (
                f"{episodes} do not fill a batch at the end of {which} and are dropped; add --epoch_drop_last false to "
                "train on these episodes"
            )

    def short_note(self, config: TrainConfig) -> Iterator[str]:
        """Yield a message if the run has very few steps, unless `max_iters` sets their number."""
        if self.steps < FEW_STEPS and config.max_iters != self.steps:
            count = "1 optimizer step" if self.steps == 1 else f"{self.steps} optimizer steps"
            more = "lower --batch_size for more steps" if config.post_training else "raise --epochs to train longer"
            yield f"the run has only {count}; {more}"

    def further(self, config: TrainConfig) -> str:
        """Return advice on how to continue a run that has finished all its steps."""
        if config.epochs is not None:
            passes = "one pass" if config.epochs == 1 else f"{config.epochs:g} epochs"
            done = f"the run has completed {passes}"
            return done if config.post_training and config.epochs == 1 else f"{done}; raise epochs to continue"
        if config.max_iters is None or config.max_iters > self.steps:
            more = "" if config.post_training else "; set epochs or max_iters to continue"
            return f"the run has completed one pass{more}"
        return "raise max_iters (post-training stops after one pass)" if config.post_training else "raise max_iters"


def run_length(config: TrainConfig, loader: EpisodeLoader) -> RunLength:
    """Compute the number of steps in a run on the loader's dataset. Post-training runs stop after one epoch."""
    if config.max_iters is not None and not config.post_training:
        return RunLength(config.max_iters)
    plan = loader.plan(loader.split)
    if plan.order.length is None:
        # Only `mix_epochs` defines a pass over a mix; mix weights do not.
        epochs = 1 if config.epochs is None and plan.config.mix_epochs is not None else config.epochs
        if epochs is None or config.post_training or not isinstance(plan.order, MixedOrder):
            raise _has_no_epochs(config, plan)
        if config.batch_sampling_mode == "random":
            raise _has_no_epochs(config, plan)
        return _of_mix(epochs, plan, plan.order)
    length = _of_epochs(1 if config.epochs is None else config.epochs, plan)
    return length if config.max_iters is None or config.max_iters >= length.steps else RunLength(config.max_iters)


def _has_no_epochs(config: TrainConfig, plan: LoadPlan) -> UsageError:
    mixed = isinstance(plan.order, MixedOrder)
    if config.post_training:
        why, instead = "post_training runs for one pass", "set batch_sampling_mode to epoch"
        if mixed:
            instead = f"set dataset_dir to one source of the mix, and remove {plan.config.mix_key}"
            if plan.sources[0].dataset.whole is not None:
                instead = f"remove {plan.config.mix_key}, or weight and epochs in the recipe of the dataset"
    elif config.epochs is not None:
        why, instead = f"epochs is {config.epochs:g}", "set max_iters, or batch_sampling_mode to epoch"
    else:
        why = "max_iters is null, which means one pass"
        instead = "set max_iters or epochs" if mixed and config.batch_sampling_mode != "random" else "set max_iters"
    return UsageError(f"{why}, but the order {plan.order.name} has no epochs; {instead}")


def _of_epochs(epochs: float, plan: LoadPlan) -> RunLength:
    """Return the number of steps in `epochs` epochs; the steps of a fraction of an epoch are rounded up."""
    # Parse the decimal representation, so that 0.1 is exactly one tenth.
    exact = Fraction(str(epochs))
    whole, share = divmod(exact, 1)
    counts = [_count(plan, epoch) for epoch in range(math.ceil(exact) if plan.config.packing != "none" else 1)]
    if plan.config.packing == "none":
        counts *= math.ceil(exact)
    steps = sum(in_epoch for in_epoch, _ in counts[:whole])
    steps += math.ceil(share * counts[whole][0]) if share else 0
    left_out = plan.last_episodes(whole - 1, counts[whole - 1][1]) if whole and plan.drop_last else 0
    return RunLength(steps, left_out, whole)


def _count(plan: LoadPlan, epoch: int) -> tuple[int, int]:
    """Return the number of steps in an epoch, and the number of rows in its last, incomplete batch. Raise `UsageError`
    if the epoch has no steps.
    """
    return plan.num_steps(epoch), plan.count_rows(epoch) % plan.config.batch_size


def _of_mix(epochs: float, plan: LoadPlan, order: MixedOrder) -> RunLength:
    episodes = math.ceil(Fraction(str(epochs)) * plan.pass_episodes)
    rows, size = plan.rows_of_episodes(episodes), plan.config.batch_size
    steps = rows // size if plan.drop_last else -(-rows // size)
    if not steps:
        raise UsageError(
            f"{plan.split}: {epochs:g} epochs of the mix have {rows} rows, but a batch has {size} rows; "
            "lower batch_size, or set epoch_drop_last to false"
        )
    passes = (f"{one_line(name)} {count:.3g}" for name, count in order.passes(episodes).items())
    return RunLength(
        steps, notes=[f"{epochs:g} epochs of the mix correspond to these passes over each source: {', '.join(passes)}"]
    )
