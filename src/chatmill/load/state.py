"""The state of a loader: the cursor of each split, and what must be the same to resume from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from chatmill.errors import UsageError, one_line
from chatmill.load.plan import Cursor

VERSION = 1


class WorkerInfo(NamedTuple):
    """One of several worker processes, which build the batches in turn."""

    number: int
    workers: int
    skip: int
    """Batches from the cursor on that other workers build before this worker's next one."""


def save(
    cursors: Mapping[str, Cursor], *, dataset_sha256: str, order: Mapping[str, Any], worker: WorkerInfo | None
) -> dict[str, Any]:
    """The state as a JSON value."""
    state: dict[str, Any] = {
        "version": VERSION,
        "dataset_sha256": dataset_sha256,
        "config": dict(order),
        "config_sha256": order_sha256(order),
        "cursors": {split: cursor._asdict() for split, cursor in sorted(cursors.items())},
    }
    return state if worker is None else {**state, "worker": worker._asdict()}


def restore(
    state: Mapping[str, Any], *, dataset_sha256: str, order: Mapping[str, Any], worker: WorkerInfo | None
) -> tuple[dict[str, Cursor], int | None]:
    """The cursors of a state, and the batches that its worker skips; `UsageError` names all differences."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != VERSION:
        raise UsageError(f"the state of a loader has version {_shown(version)}; this chatmill reads {VERSION}")
    faults = list(_differences(state, dataset_sha256, order))
    if faults:
        raise UsageError(f"the state of a loader does not fit: {'; '.join(faults)}")
    try:
        cursors = {
            split: Cursor(**{name: _whole(at[name]) for name in Cursor._fields})
            for split, at in state["cursors"].items()
        }
    except (AttributeError, KeyError, TypeError):
        raise UsageError("the state of a loader is damaged: its cursors cannot be read") from None
    return cursors, _skip(state.get("worker"), worker)


def _differences(state: Mapping[str, Any], dataset_sha256: str, order: Mapping[str, Any]) -> list[str]:
    faults = []
    if state.get("dataset_sha256") != dataset_sha256:
        saved = one_line(str(state.get("dataset_sha256")), 12)
        faults.append(f"the dataset was {saved}, now it is {one_line(dataset_sha256, 12)}")
    theirs = state.get("config")
    if not isinstance(theirs, Mapping) or state.get("config_sha256") != order_sha256(theirs):
        return [*faults, "its config does not have the hash it names"]
    # Compared as JSON, in which a list equals a tuple.
    mine = json.loads(json.dumps(order))
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            faults.append(f"{one_line(name)} was {_shown(theirs.get(name))}, now it is {_shown(mine.get(name))}")
    return faults


def _skip(saved: Any, mine: WorkerInfo | None) -> int | None:
    """Batches to skip before the first of this worker; None if the state was saved without workers."""
    if saved is None:
        return None
    if not isinstance(saved, Mapping) or mine is None or tuple(map(saved.get, ("number", "workers"))) != mine[:2]:
        here = "a loader without workers" if mine is None else f"worker {mine.number} of {mine.workers}"
        raise UsageError(f"the state is that of the worker {_shown(saved)}, and this is {here}; they must be the same")
    return _whole(saved.get("skip"))


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise UsageError(f"the state of a loader is damaged: {_shown(value)} is no whole number from 0 on")
    return value


def order_sha256(order: Mapping[str, Any]) -> str:
    """The hash of the config keys that decide the order."""
    return hashlib.sha256(json.dumps(order, sort_keys=True).encode()).hexdigest()


def _shown(value: Any) -> str:
    return one_line(json.dumps(value, default=str))
