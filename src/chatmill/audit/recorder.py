"""A loader listener that records in the audit log which batches the loader returned.

    dataset_load     the dataset, the config and the order of episodes
    epoch_start      the effective seed and the first episodes of the epoch
    steps            a digest of the rows that the loader returned for a range of steps
    drop_last        the episodes at the end of the epoch that did not fill a batch
    epoch_complete   the number of episodes in the epoch
    mix              the requested and the realised share of each source
    checkpoint       the run's cursor; the saved checkpoint stores the hash of this line as `head`
    resume           the hash of the checkpoint line that the run resumes from

All fields that describe the data are computed from the load plan, so `verify_log` can recompute them from the dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.audit.log import AuditError, AuditLog, Clock, now, read_log
from chatmill.audit.saved_state import SavedState, first_difference, logged_checkpoints
from chatmill.errors import DataError, one_line
from chatmill.load.config import LoadConfig, order_sha256
from chatmill.load.mix import MixedOrder, shares
from chatmill.load.order import effective_seed
from chatmill.load.plan import Cursor, LoadPlan, PlannedStep, datasets_hash

if TYPE_CHECKING:
    from chatmill.load.loader import EpisodeLoader

EVERY = 100
"""Maximum number of steps per digest."""
ROW_DIGEST = "sha256"
"""Name of the row digest that loaders compute; a key of `DIGESTS`."""
SHOWN = 10
"""Maximum number of episodes listed in an epoch_start line."""
Numbers = NDArray[np.int64]
Reduce = Callable[[Numbers], Numbers]
"""A function that sums an array over all ranks (all-reduce)."""
BatchSum = tuple[NDArray[np.uint64] | None, Numbers | None]
"""The digest of a batch, and the amount of data from each source."""


class Audit:
    """Writes the audit log of a run; pass an instance to `EpisodeLoader` as `listener`. Only rank 0 writes the log.

    Each digest covers the rows of at most `every` steps. To resume a run and continue its log, pass the `state` that
    `checkpoint` returned. `reduce` sums an array over all ranks; without it, digests cover only the rows of rank 0. If
    a line cannot be written, `AuditError` is raised.

        audit = Audit("logs/audit")
        loader = EpisodeLoader("data/v1", config, listener=audit)
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int = EVERY,
        state: Mapping[str, Any] | None = None,
        reduce: Reduce | None = None,
        clock: Clock = now,
    ) -> None:
        self._folder, self._every, self._reduce, self._clock = Path(folder), every, reduce, clock
        self._state = None if state is None else _checked_state(state)
        self._at = Cursor() if self._state is None else Cursor(**self._state["cursor"])
        """The expected cursor of the next batch."""
        self._log: AuditLog | None = None
        self._plan: LoadPlan | None = None
        self._pending: list[PlannedStep] = []
        self._batches: list[BatchSum] = []
        """For each pending step, its digest and the amount of data from each source."""
        self._total: dict[str, int] = {} if self._state is None else dict(self._state["given"])

    @property
    def path(self) -> Path | None:
        """The path of the log file; None on ranks other than 0, and before the log is open."""
        return None if self._log is None else self._log.path

    # Methods that the loader calls.

    def loaded(self, loader: EpisodeLoader) -> None:
        if self._plan is not None:
            raise AuditError("an Audit can be used with only one loader; create another Audit")
        self._plan = loader.plan(loader.split)
        if loader.rank != 0:
            return
        if self._state is None:
            self._log = AuditLog.create(self._folder, clock=self._clock)
        else:
            path = self._folder / self._state["log"]
            _check_with_log(self._state, path, self._plan)
            self._log, fields = AuditLog.reopen(path, head=self._state["head"], clock=self._clock)
            self._log.add("resume", {**fields, **self._at._asdict()}, durable=True)
        ranks = "all" if self._reduce is not None or loader.world_size == 1 else "0"
        covered = {
            "world_size": loader.world_size,
            "ranks": ranks,
            "digest_steps": self._every,
            "row_digest": ROW_DIGEST,
        }
        loaded = {**dataset_fields(self._plan), "dataset": str(loader.dataset_dir), **covered}
        self._log.add("dataset_load", loaded, durable=True)

    def epoch_started(self, plan: LoadPlan, epoch: int) -> None:
        if plan is self._plan:
            self._write("epoch_start", start_fields(plan, epoch))

    def delivered(
        self, plan: LoadPlan, step: PlannedStep, digest: NDArray[np.uint64], source_counts: Numbers | None
    ) -> None:
        if plan is not self._plan:
            return
        if step.at != self._at:
            raise AuditError(
                f"the loader is at step {step.at.step}, but its audit log is at step {self._at.step}; "
                "pass Audit the state that was saved together with the loader state"
            )
        self._pending.append(step)
        self._batches.append((digest, source_counts))
        self._at = step.after
        if len(self._pending) >= self._every or step.ends_epoch:
            self._flush()

    def epoch_completed(self, plan: LoadPlan, epoch: int, step: PlannedStep) -> None:
        if plan is self._plan:
            if len(step.dropped):
                self._write("drop_last", drop_fields(epoch, step))
            self._write("epoch_complete", complete_fields(plan, epoch, step), durable=True)

    # Methods that the training run calls.

    def checkpoint(self) -> dict[str, Any] | None:
        """Log the run's cursor and sync the log; return the state for the checkpoint, or None on ranks other than 0.

        If `Audit` was created with `reduce`, all ranks must call `checkpoint` and `close`.
        """
        self._flush()
        self._write_mix()
        if self._log is None:
            return None
        head = self._log.add("checkpoint", self._at._asdict(), durable=True)
        return {"log": self._log.path.name, "head": head, "cursor": self._at._asdict(), "given": dict(self._total)}

    def close(self) -> None:
        """Log the pending steps and close the log."""
        self._flush()
        self._write_mix()
        if self._log is not None:
            self._log.close()

    def discard(self) -> None:
        """Remove the log of a run that ended before its first batch. If the run continued the log of an earlier run,
        the log is closed but not removed.
        """
        if self._log is not None:
            if self._state is None:
                self._log.remove()
            else:
                self._log.close()

    def _flush(self) -> None:
        if not self._pending:
            return
        plan, (digest, counts) = self._plan, sum_batches(self._batches)
        assert plan is not None
        if self._reduce is not None:
            digest = self._reduce(digest.view(np.int64)).view(np.uint64)
            counts = None if counts is None else self._reduce(counts)
        self._write("steps", steps_fields(plan, self._pending, digest, counts))
        if counts is not None:
            self._total = add_counts(self._total, plan, counts)
        self._pending, self._batches = [], []

    def _write_mix(self) -> None:
        if self._total:
            assert self._plan is not None
            self._write("mix", mix_fields(self._plan, self._total))

    def _write(self, action: str, fields: Mapping[str, Any], *, durable: bool = False) -> None:
        if self._log is not None:
            self._log.add(action, fields, durable=durable)


def _checked_state(state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        log, head, cursor, given = (state[name] for name in ("log", "head", "cursor", "given"))
        whole = all(type(cursor[name]) is int for name in Cursor._fields) and len(cursor) == len(Cursor._fields)
        if not whole or not all(type(amount) is int for amount in given.values()) or Path(log).name != log:
            raise ValueError
        return {"log": log, "head": str(head), "cursor": dict(cursor), "given": dict(given)}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise AuditError("the audit state is damaged; expected the state that Audit.checkpoint returned") from None


def _check_with_log(state: Mapping[str, Any], path: Path, plan: LoadPlan) -> None:
    """Raise `AuditError` if a saved state does not match the log or the dataset."""
    try:
        logged = logged_checkpoints(read_log(path)).get(state["head"])
    except DataError as error:
        raise AuditError(f"{error}; restore the log that belongs to the checkpoint") from None
    if logged is None:
        raise AuditError(
            f"{path}: no checkpoint line has the hash {one_line(state['head'], 12)} that the state records; "
            "the log was truncated or changed"
        )
    order = plan.config.order_part()
    loader = {"dataset_sha256": datasets_hash(plan.sources), "config": order, "config_sha256": order_sha256(order)}
    run = {"loader": {**loader, "cursors": {plan.split: state["cursor"]}}}
    if fault := first_difference(SavedState(state, run), logged):
        raise AuditError(f"{path}: does not match the checkpoint: {fault}; the log or the checkpoint was changed")


# Functions that compute the fields of log lines from the load plan; both `Audit` and `verify_log` use them.


def dataset_fields(plan: LoadPlan) -> dict[str, Any]:
    """Return the fields that identify the dataset, the config and the order of episodes."""
    config = {each.name: getattr(plan.config, each.name) for each in fields(LoadConfig)}
    for name in ("token_dtype", "mix_epochs"):
        if config[name] is None:
            # Omit keys that are null: logs of earlier versions lack these keys and must still pass verification.
            del config[name]

    def count(split: str) -> int:
        sources = plan.sources
        return sum(len(each.episodes(split)) for each in sources) if all(split in each for each in sources) else 0

    return {
        "epoch_seed": plan.config.epoch_seed,
        "epoch_shuffle": plan.config.epoch_shuffle,
        "num_train_episodes": count("train"),
        "num_val_episodes": count("val"),
        "num_episodes": plan.num_eligible,
        "num_skipped": len(plan.skipped),
        "split": plan.split,
        "order": plan.order.name,
        "dataset_sha256": datasets_hash(plan.sources),
        "config_sha256": order_sha256(plan.config.order_part()),
        "config": config,
    }


def start_fields(plan: LoadPlan, epoch: int) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "seed": effective_seed(plan.config.epoch_seed, epoch),
        "first_episode_ids": plan.first_episodes(epoch, SHOWN).tolist(),
        "num_episodes": plan.num_eligible,
    }


def steps_fields(
    plan: LoadPlan, steps: Sequence[PlannedStep], digest: NDArray[np.uint64], source_counts: Numbers | None
) -> dict[str, Any]:
    first, stop = steps[0].at, steps[-1].after.step
    position = {name: value for name, value in first._asdict().items() if name != "step"}
    fields = {"first_step": first.step, "stop_step": stop, **position, "digest": digest.astype("<u8").tobytes().hex()}
    return fields if source_counts is None else {**fields, "given": add_counts({}, plan, source_counts)}


def drop_fields(epoch: int, step: PlannedStep) -> dict[str, Any]:
    return {"epoch": epoch, "num_episodes": len(step.dropped), "episode_ids": step.dropped.tolist()}


def complete_fields(plan: LoadPlan, epoch: int, step: PlannedStep) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "seed_used": effective_seed(plan.config.epoch_seed, epoch),
        "episodes_seen": plan.num_eligible - len(step.dropped),
        "step": step.after.step,
    }


def mix_fields(plan: LoadPlan, total: Mapping[str, int]) -> dict[str, Any]:
    """Return the requested and the actual fraction of the data from each source, counted since the first step."""
    everything = sum(total.values()) or 1
    assert isinstance(plan.order, MixedOrder)
    requested = plan.order.shares if plan.config.mix_sft is None else shares(plan.config.mix_sft)
    return {
        "mix_by": plan.config.mix_by,
        "requested": {name: round(float(share), 6) for name, share in requested.items()},
        "realised": {name: round(amount / everything, 6) for name, amount in total.items()},
    }


def sum_batches(batches: Sequence[BatchSum]) -> tuple[NDArray[np.uint64], Numbers | None]:
    """Sum the digests of batches modulo 2^64, and sum the number of rows or tokens from each source."""
    digest = np.array([digest for digest, _ in batches], dtype=np.uint64).sum(axis=0)
    counts = [counts for _, counts in batches if counts is not None]
    return digest, np.sum(counts, axis=0) if counts else None


def add_counts(total: Mapping[str, int], plan: LoadPlan, counts: Numbers) -> dict[str, int]:
    """Add `counts[i]` to the total of the plan's i-th source, and return the new totals by source name."""
    names = [source.name for source in plan.sources]
    return {name: total.get(name, 0) + int(count) for name, count in zip(names, counts, strict=True)}
