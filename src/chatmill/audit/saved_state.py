"""Compare the state saved in a checkpoint with the audit log, field by field.

    checkpoint   {"audit": {"log", "head", "cursor", "given"}, "loader": {"cursors", "dataset_sha256", …}, …}
    log          dataset_load … steps … checkpoint | step=30 | epoch=0 | …

In the checkpoint, `head` is the hash of the line that records this checkpoint in the log.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.audit.log import START, LogLine, TornLine, as_text
from chatmill.errors import DataError, one_line
from chatmill.load.config import LoadConfig, order_sha256
from chatmill.load.plan import Cursor
from chatmill.plain_file import read_plain

STATE_KEYS = ("log", "head", "cursor", "given")
LOADED_HASHES = ("dataset_sha256", "config_sha256")


class SavedState(NamedTuple):
    """The audit state in a checkpoint; `run` is the JSON object that contains the audit state and, usually, the loader
    state.
    """

    audit: Mapping[str, Any]
    run: Mapping[str, Any]

    @property
    def head(self) -> str:
        return str(self.audit["head"])


def saved_states(path: Path, log: Path) -> dict[str, SavedState]:
    """Return the audit states that a checkpoint folder or a JSON file stores for a log, keyed by file name."""
    states: dict[str, SavedState] = {}
    for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        try:
            content = json.loads(read_plain(file))
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror}); expected a file of a checkpoint") from None
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict) and {"files", "sha256", "version"} <= content.keys():
            body = {name: value for name, value in content.items() if name != "sha256"}
            if hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest() != content["sha256"]:
                raise DataError(f"{file}: is damaged; its hash differs from the hash that it records")
        here = [state for state in _states(content) if state.audit["log"] == log.name]
        states |= {f"{file} ({number})" if number else str(file): state for number, state in enumerate(here)}
    if not states:
        raise DataError(f"{path}: does not mention {log.name}; expected a checkpoint of the run that wrote this log")
    return states


def _states(content: Any) -> Iterator[SavedState]:
    """Yield every audit state in a JSON value."""
    stack: list[tuple[Any, Mapping[str, Any]]] = [(content, {})]
    while stack:
        value, around = stack.pop()
        if isinstance(value, dict) and isinstance(value.get("log"), str) and isinstance(value.get("head"), str):
            yield SavedState(value, around)
        elif isinstance(value, dict | list):
            inside = value.values() if isinstance(value, dict) else value
            stack += [(each, value if isinstance(value, dict) else {}) for each in inside]


class LoggedCheckpoint(NamedTuple):
    """A checkpoint, as the audit log records it."""

    fields: Mapping[str, str]
    """Fields of the checkpoint's line in the log, which contain the run's cursor."""
    loaded: Mapping[str, str]
    """Fields of the dataset_load line before the checkpoint, which identify the dataset and the config."""
    given: Mapping[str, int]
    """For each source of a mix, the amount of data read before the checkpoint; empty without a mix."""


def logged_checkpoints(lines: Sequence[LogLine | TornLine]) -> dict[str, LoggedCheckpoint]:
    """Return the checkpoints in the log, keyed by the hash of their line, up to the first break in the hash chain."""
    checkpoints: dict[str, LoggedCheckpoint] = {}
    loaded: Mapping[str, str] = {}
    given: dict[str, int] = {}
    previous = START
    for line in lines:
        if not isinstance(line, LogLine):
            continue
        if line.previous != previous:
            break
        previous = line.sha256
        if line.action == "dataset_load":
            loaded = line.fields
        elif line.action == "resume" and (head := line.fields.get("head", "")) in checkpoints:
            loaded, given = checkpoints[head].loaded, dict(checkpoints[head].given)
        elif line.action == "steps" and "given" in line.fields:
            given = {name: given.get(name, 0) + count for name, count in _counts(line.fields["given"]).items()}
        elif line.action == "checkpoint":
            checkpoints[line.sha256] = LoggedCheckpoint(line.fields, loaded, given)
    return checkpoints


def _counts(text: str) -> dict[str, int]:
    try:
        counts = json.loads(text)
        return {name: count for name, count in counts.items() if type(count) is int}
    except (AttributeError, ValueError, RecursionError):
        return {}


def first_difference(state: SavedState, logged: LoggedCheckpoint) -> str | None:
    """Describe the first value of a saved state that differs from the log, or return None if all values match."""
    return next(_differences(state, logged), None)


def _differences(state: SavedState, logged: LoggedCheckpoint) -> Iterator[str]:
    audit, run = state
    if unknown := [name for name in audit if name not in STATE_KEYS]:
        yield f"audit.{one_line(unknown[0])} is not a key of an audit state"
    yield from _cursor("audit.cursor", audit.get("cursor"), logged)
    yield from _value("audit.given", audit.get("given"), dict(logged.given))
    loader = run.get("loader")
    if loader is None:
        return
    if not isinstance(loader, dict) or not isinstance(cursors := loader.get("cursors"), dict):
        yield '"loader" is not the state of a loader'
        return
    for name in LOADED_HASHES:
        yield from _value(f"loader.{name}", loader.get(name), logged.loaded.get(name))
    order = loader.get("config")
    if not isinstance(order, dict) or order_sha256(order) != logged.loaded.get("config_sha256"):
        yield "loader.config differs from the config in the log"
    split = logged.loaded.get("split", "")
    yield from _cursor(f"loader.cursors.{split}", cursors.get(split), logged)
    if "stage" in run:
        yield from _run_differences(run, logged)


def _run_differences(run: Mapping[str, Any], logged: LoggedCheckpoint) -> Iterator[str]:
    """Yield the differences between the log and the values that only `chatmill train` saves."""
    stage = run["stage"]
    if not isinstance(stage, dict) or type(start := stage.get("start")) is not int:
        yield '"stage" is not the state of a training stage'
        return
    yield from _value("step", run.get("step"), start + int(logged.fields["step"]))
    yield from _value("stage.dataset_sha256", stage.get("dataset_sha256"), logged.loaded.get("dataset_sha256"))
    yield from _value("world_size", as_text(run.get("world_size")), logged.loaded.get("world_size"))
    config, loaded = run.get("config"), json.loads(logged.loaded.get("config", "{}"))
    for name in LoadConfig.__dataclass_fields__:
        # Skip keys that are null in the run's config, because the dataset determines their values.
        if not isinstance(config, dict) or (config.get(name) is not None and config[name] != loaded.get(name)):
            yield f"config.{name} differs from the log"


def _cursor(place: str, cursor: Any, logged: LoggedCheckpoint) -> Iterator[str]:
    expected = {name: int(logged.fields.get(name, "0")) for name in Cursor._fields}
    yield from _value(place, cursor, expected)


def _value(place: str, value: Any, expected: Any) -> Iterator[str]:
    # Compare the values as JSON text, because True == 1 in Python.
    if json.dumps(value, sort_keys=True) != json.dumps(expected, sort_keys=True):
        shown, right = (one_line(json.dumps(each, sort_keys=True), 100) for each in (value, expected))
        yield f"{one_line(place)} is {shown}, but the log records {right}"
