"""The audit: a listener of the loader that writes down what was really handed out.

    dataset_load     which dataset, under which config, in which order
    epoch_start      its effective seed and first episodes
    steps            a digest of the rows of some steps, as they were handed out
    drop_last        episodes that did not fill a batch
    epoch_complete   how many episodes the epoch had
    mix              what every source gave, against what was requested
    checkpoint       where the run stands; its hash, the head, is kept with the checkpoint
    resume           from which head a run goes on

What a line says is made by pure functions of the plan, so that `audit_check` can say it again from the dataset.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.audit.log import AuditError, AuditLog, Clock, now
from chatmill.load.config import LoadConfig
from chatmill.load.mix import MixedOrder, shares
from chatmill.load.order import effective_seed
from chatmill.load.plan import Cursor, LoadPlan, PlannedStep
from chatmill.load.source import DataSource

if TYPE_CHECKING:
    from chatmill.load.loader import EpisodeLoader

EVERY = 100
"""Steps that one digest covers at most."""
SHOWN = 10
"""Episodes of an epoch that its first line names."""
Numbers = NDArray[np.int64]
Reduce = Callable[[Numbers], Numbers]
"""What adds an array up over all ranks, on each of them."""


class Audit:
    """Writes the log of a run: `EpisodeLoader(…, listener=Audit("logs/audit"))`. Only rank 0 has a file.

    `every` is how many steps a digest covers at most. A run that goes on gives the `state` that `checkpoint` returned,
    and the log goes on too. With `reduce`, which adds an array up over all ranks, digests cover the
    rows of all ranks, else those of rank 0. A line that cannot be written raises `AuditError`.
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
        """Where the next batch must begin."""
        self._log: AuditLog | None = None
        self._plan: LoadPlan | None = None
        self._world = 1
        self._pending: list[PlannedStep] = []
        self._digest = np.zeros(2, dtype=np.uint64)
        self._given: Numbers | None = None
        self._total: dict[str, int] = {} if self._state is None else dict(self._state["given"])

    @property
    def path(self) -> Path | None:
        """The file; None on ranks that have none, and before a loader has told that it is there."""
        return None if self._log is None else self._log.path

    # What the loader tells.

    def loaded(self, loader: EpisodeLoader) -> None:
        if self._plan is not None:
            raise AuditError("one audit log is for one loader; make another Audit")
        self._plan, self._world = loader.plan(loader.split), loader.world_size
        if loader.rank != 0:
            return
        if self._state is None:
            self._log = AuditLog.create(self._folder, clock=self._clock)
        else:
            path = self._folder / self._state["log"]
            self._log, left = AuditLog.reopen(path, head=self._state["head"], clock=self._clock)
            self._log.add("resume", {**left, **self._at._asdict()}, durable=True)
        said = dataset_fields(loader.sources, self._plan, loader.splits)
        said |= {"dataset": str(loader.dataset_dir), **self._covers()}
        self._log.add("dataset_load", said, durable=True)

    def epoch_started(self, plan: LoadPlan, epoch: int) -> None:
        if plan is self._plan:
            self._write("epoch_start", start_fields(plan, epoch))

    def delivered(self, plan: LoadPlan, step: PlannedStep, digest: NDArray[np.uint64], given: Numbers | None) -> None:
        if plan is not self._plan:
            return
        if step.at != self._at:
            raise AuditError(
                f"the loader stands at step {step.at.step}, its audit log at {self._at.step}; "
                "give Audit the state that was saved with that of the loader"
            )
        self._pending.append(step)
        self._digest = self._digest + digest
        if given is not None:
            self._given = given if self._given is None else self._given + given
        self._at = step.after
        if len(self._pending) >= self._every or step.ends_epoch:
            self._flush()

    def epoch_completed(self, plan: LoadPlan, epoch: int, step: PlannedStep) -> None:
        if plan is self._plan:
            if len(step.dropped):
                self._write("drop_last", drop_fields(epoch, step))
            self._write("epoch_complete", complete_fields(plan, epoch, step), durable=True)

    # What the run asks for.

    def checkpoint(self) -> dict[str, Any] | None:
        """Write down where the run stands, durably; what is returned belongs into the checkpoint. None but on rank 0.

        If there is a `reduce`, all ranks call this, and `close`.
        """
        self._flush()
        self._write_mix()
        if self._log is None:
            return None
        head = self._log.add("checkpoint", self._at._asdict(), durable=True)
        return {"log": self._log.path.name, "head": head, "cursor": self._at._asdict(), "given": dict(self._total)}

    def close(self) -> None:
        """Write down the last steps and close the file."""
        self._flush()
        self._write_mix()
        if self._log is not None:
            self._log.close()

    def _flush(self) -> None:
        if not self._pending:
            return
        plan, digest, given = self._plan, self._digest, self._given
        assert plan is not None
        if self._reduce is not None:
            digest = self._reduce(digest.view(np.int64)).view(np.uint64)
            given = None if given is None else self._reduce(given)
        self._write("steps", steps_fields(plan, self._pending, digest, given))
        if given is not None and isinstance(plan.order, MixedOrder):
            self._total = added(self._total, plan.order.sources, given)
        self._pending, self._digest, self._given = [], np.zeros(2, dtype=np.uint64), None

    def _write_mix(self) -> None:
        if self._total:
            assert self._plan is not None
            self._write("mix", mix_fields(self._plan, self._total))

    def _write(self, action: str, said: Mapping[str, Any], *, durable: bool = False) -> None:
        if self._log is not None:
            self._log.add(action, said, durable=durable)

    def _covers(self) -> dict[str, Any]:
        ranks = "all" if self._reduce is not None or self._world == 1 else "0"
        return {"world_size": self._world, "ranks": ranks, "digest_steps": self._every}


def _checked_state(state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        log, head, cursor, given = (state[name] for name in ("log", "head", "cursor", "given"))
        whole = all(type(cursor[name]) is int for name in Cursor._fields) and len(cursor) == len(Cursor._fields)
        if not whole or not all(type(amount) is int for amount in given.values()) or Path(log).name != log:
            raise ValueError
        return {"log": log, "head": str(head), "cursor": dict(cursor), "given": dict(given)}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise AuditError("the state of the audit log is damaged; expected what checkpoint returned") from None


# What lines say, as functions of the plan: the loader's doings are written and recomputed with the same ones.


def dataset_fields(sources: Sequence[DataSource], plan: LoadPlan, splits: Sequence[str]) -> dict[str, Any]:
    """What is loaded, and all that decides the order."""
    config = {each.name: getattr(plan.config, each.name) for each in fields(LoadConfig)}
    order = plan.config.order_part()
    return {
        "epoch_seed": plan.config.epoch_seed,
        "epoch_shuffle": plan.config.epoch_shuffle,
        **{f"num_{name}_episodes": _stored(sources, name) if name in splits else 0 for name in ("train", "val")},
        "num_episodes": plan.num_eligible,
        "num_skipped": len(plan.skipped),
        "split": plan.split,
        "order": plan.order.name,
        "dataset_sha256": plan.sha256,
        "config_sha256": hashlib.sha256(json.dumps(order, sort_keys=True).encode()).hexdigest(),
        "config": config,
    }


def _stored(sources: Sequence[DataSource], split: str) -> int:
    return sum(len(source.episodes(split)) for source in sources)


def start_fields(plan: LoadPlan, epoch: int) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "seed": effective_seed(plan.config.epoch_seed, epoch),
        "first_episode_ids": plan.first_episodes(epoch, SHOWN).tolist(),
        "num_episodes": plan.num_eligible,
    }


def steps_fields(
    plan: LoadPlan, steps: Sequence[PlannedStep], digest: NDArray[np.uint64], given: Numbers | None
) -> dict[str, Any]:
    """The steps from the first to before the last, where the first begins, and what was in them."""
    first, last = steps[0].at, steps[-1].after
    said: dict[str, Any] = {"first_step": first.step, "stop_step": last.step, **first._asdict()}
    del said["step"]
    said["digest"] = digest.astype("<u8").tobytes().hex()
    if given is not None and isinstance(plan.order, MixedOrder):
        said["given"] = dict(zip(plan.order.sources, given.tolist(), strict=True))
    return said


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
    """The shares that were requested, and those that the sources have had since the first step."""
    everything = sum(total.values()) or 1
    return {
        "mix_by": plan.config.mix_by,
        "requested": {name: round(float(share), 6) for name, share in shares(plan.config.mix_sft or {}).items()},
        "realised": {name: round(amount / everything, 6) for name, amount in total.items()},
    }


def added(total: Mapping[str, int], sources: Sequence[str], given: Numbers) -> dict[str, int]:
    return {name: total.get(name, 0) + int(amount) for name, amount in zip(sources, given, strict=True)}
