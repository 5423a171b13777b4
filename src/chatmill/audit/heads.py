"""The heads of audit logs that checkpoints keep: a log must contain them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chatmill.errors import DataError


def checkpoint_heads(path: Path, log: Path) -> dict[str, str]:
    """The heads of this log in a checkpoint, or in the JSON file of its state, by the file that holds them."""
    heads: dict[str, str] = {}
    for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        try:
            state = json.loads(file.read_bytes())
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror}); expected the state of a checkpoint") from None
        except (ValueError, RecursionError):
            continue
        heads |= {str(file): kept["head"] for kept in _log_states(state) if kept["log"] == log.name}
    if not heads:
        raise DataError(f"{path}: keeps no head of {log.name}; expected the state of a checkpoint of that run")
    return heads


def _log_states(value: Any) -> Iterator[dict[str, str]]:
    """Every state of an audit log in a JSON value."""
    if isinstance(value, dict) and isinstance(value.get("log"), str) and isinstance(value.get("head"), str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _log_states(each)
