"""Read config files of other trainers, in YAML or JSON, with limits on size and nesting."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatmill.errors import DataError, one_line
from chatmill.plain_file import check_plain, read_plain
from chatmill.remote.named_files import local_file
from chatmill.remote.urls import Place, place

LIMIT = 1 << 20
"""Maximum size of a config file in bytes."""
MOST_VALUES = 100_000
"""Maximum number of values in a config, with YAML aliases expanded."""
DEPTH = 50


def read_config(path: str | Place, what: str) -> dict[str, Any]:
    """Read a config from a file or URL; `what` describes the expected file in error messages."""
    name = str(place(path))
    try:
        local = local_file(path if isinstance(path, str | Path) else path.address, limit=LIMIT)
        if (size := check_plain(local)) > LIMIT:
            raise DataError(f"{name}: is {size:,} bytes; expected {what} of at most {LIMIT:,} bytes")
        data = read_plain(local, LIMIT)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror}); expected {what}") from None
    table = _parse_json(data, name) if name.lower().endswith(".json") else _parse_yaml(data, name)
    if not isinstance(table, dict):
        raise DataError(f"{name}: the file has no keys at the top level; expected {what}")
    _check_size(table, name)
    if wrong := [key for key in table if not isinstance(key, str)]:
        raise DataError(f"{name}: the key {one_line(repr(wrong[0]))} is not a string; expected {what}")
    return table


def _parse_yaml(data: bytes, name: str) -> Any:
    try:
        from chatmill.integrations.configs.their_yaml import TrainerYaml
        from chatmill.prepare.yaml_loader import parse_yaml
    except ImportError:
        raise DataError(f"{name}: YAML needs PyYAML; run pip install 'chatmill[recipe]'") from None
    return parse_yaml(data, name, TrainerYaml)


def _parse_json(data: bytes, name: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
            raise DataError(f'{name}: the key "{one_line(twice)}" occurs twice; expected each key once')
        return table

    try:
        return json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: is not valid JSON ({one_line(str(error), 300)})") from None


def _check_size(table: Mapping[Any, Any], name: str) -> None:
    """Raise `DataError` for too many values, deep nesting, non-finite numbers or lone surrogates."""
    left: list[tuple[Any, int]] = [(table, 0)]
    count = 0
    while left:
        value, depth = left.pop()
        count += 1
        if count > MOST_VALUES:
            raise DataError(f"{name}: contains more than {MOST_VALUES:,} values, including aliases; expected fewer")
        if depth > DEPTH:
            raise DataError(f"{name}: is nested deeper than {DEPTH} levels; expected fewer levels")
        if isinstance(value, float) and not math.isfinite(value):
            raise DataError(f"{name}: contains a number that is not finite; expected finite numbers")
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            raise DataError(f"{name}: contains a lone surrogate; expected valid Unicode")
        if isinstance(value, dict):
            left += [(each, depth + 1) for each in (*value.keys(), *value.values())]
        elif isinstance(value, list):
            left += [(each, depth + 1) for each in value]
