"""A format as a dataset or a model remembers it, back again."""

from __future__ import annotations

from typing import Any

from chatmill.errors import DataError, one_line
from chatmill.format.chat_format import PRESETS, ChatFormat, Turn, load_format


def stored_format(value: Any, *, where: str) -> ChatFormat:
    """The format that `to_json` gave this value, or the preset of this name; `DataError` if it is neither.

    What comes back writes conversations just as the one that was stored did.
    """
    if isinstance(value, str) and value in PRESETS:
        return load_format(value)
    try:
        made = ChatFormat(
            name=value["name"],
            tokens=dict(value["tokens"]),
            turns={role: Turn(*pair) for role, pair in value["turns"].items()},
            trained=tuple(value["trained"]),
            default_system=value["default_system"],
            begin=value["begin"],
            end=value["end"],
            body=dict(value["body"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        shown = one_line(str(value["name"] if isinstance(value, dict) and "name" in value else value))
        raise DataError(
            f"{where}: its format {shown} is not one that is written by turns; name one with --format"
        ) from None
    if made.to_json() != value:
        raise DataError(
            f"{where}: its format {one_line(made.name)} was stored by another version; name one with --format"
        )
    return made
