"""`--columns`: map the key and role names of a file to the names that chatmill reads.

    messages=conversations,role=from,content=value,user=human,assistant=gpt

In NAME=COLUMN, NAME is chatmill's name for the key or role, and COLUMN is the name in the file. Keys without a mapping
keep their names. The ShareGPT roles human and gpt need no mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chatmill.errors import RecordError, UsageError, one_line
from chatmill.records.record import ROLES
from chatmill.records.shapes.decode import decode
from chatmill.records.shapes.fields import (
    FLAG_KEYS,
    REASONING_KEYS,
    WEIGHT_KEYS,
    Object,
    ParsedRecord,
    listed,
)
from chatmill.records.shapes.preferences import PREFERENCE_KEYS, one_answer
from chatmill.records.shapes.ranges import RANGE_KEYS

MESSAGE_LISTS = ("messages", "conversations", "prompt", "completion")
"""Keys whose value can be a list of messages."""
JSON_LISTS = ("messages", "conversations")
"""Keys whose list of messages can also be given as a JSON string."""
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
RECORD_KEYS = (
    *("messages", "prompt", "completion"),
    *("text", "instruction", "input", "output", "context", "response", "history", "system", "tools", "id"),
    "chat_template_kwargs",
)
MESSAGE_KEYS = ("role", "content", *REASONING_KEYS, "tool_calls", "tool_call_id", "name", *RANGE_KEYS)
BOTH = (*FLAG_KEYS, *WEIGHT_KEYS)
"""Keys that both records and messages can have."""


@dataclass(frozen=True)
class ColumnMap:
    """Maps the record keys, message keys and roles of a file to chatmill's names."""

    record: Mapping[str, str]
    message: Mapping[str, str]
    roles: Mapping[str, str]

    def renamed(self, values: Object) -> tuple[Object, list[str]]:
        """Return the record with its keys renamed to chatmill's names, and the keys that were dropped."""
        out = {self.record[key]: value for key, value in values.items() if key in self.record}
        left_out = [key for key in values if key not in self.record and key in out]
        if any(key in self.record and key in values for key in PREFERENCE_KEYS):
            # The map selects one answer of a preference pair, so the other answer is not needed.
            left_out += [key for key in PREFERENCE_KEYS if key in values and key not in self.record]
        out |= {key: value for key, value in values.items() if key not in self.record and key not in left_out}
        for key in MESSAGE_LISTS:
            if isinstance(out.get(key), str) and key in JSON_LISTS:
                out[key] = _list_in_json(out[key])
            if isinstance(out.get(key), list):
                out[key] = [self._message(turn) for turn in out[key]]
            elif isinstance(out.get(key), dict):
                out[key] = [self._message(out[key])]
        return out, left_out

    def _message(self, turn: Any) -> Any:
        if not isinstance(turn, dict):
            return turn
        out = {self.message[key]: value for key, value in turn.items() if key in self.message}
        # If two keys get the same name, rename the unmapped key, so that it is reported as unread.
        out |= {key if key not in out else f"{key} ": value for key, value in turn.items() if key not in self.message}
        for key in ("role", "from"):
            if isinstance(role := out.get(key), str):
                out[key] = self.roles.get(role, role)
        return out

    def reported(self, parsed: ParsedRecord, left_out: list[str], values: Object) -> ParsedRecord:
        """Return the parsed record, with unread keys named as in the file; `values` is the record before renaming.

        Raise `RecordError` if `--columns` maps an answer of a preference pair to a key that this record shape does not
        have.
        """
        file_names = {key: name for name, key in self.record.items() if name in values}
        names = [_in_file(name, file_names) for name in parsed.unread_keys]
        for name in names:
            if name in PREFERENCE_KEYS and values[name] is not None:
                what = f'--columns reads "{name}" as "{self.record[name]}", a key that this record shape does not have'
                raise RecordError(what, one_answer(values), kind="preference")
        return parsed._replace(unread_keys=(*names, *map(one_line, left_out)))


def _list_in_json(text: str) -> Any:
    """Decode a list from JSON text; return any other text unchanged."""
    try:
        value = decode(text.encode())
    except (RecordError, RecursionError):
        return text
    return value if isinstance(value, list) else text


def _in_file(name: str, file_names: Mapping[str, str]) -> str:
    key, separator, below = name.partition("[].")
    return file_names.get(key, key) + separator + below.rstrip()


def parse_columns(text: str) -> ColumnMap:
    """Parse `NAME=COLUMN,NAME=COLUMN`; a role may have several names in the file."""
    record: dict[str, str] = {}
    message: dict[str, str] = {}
    roles: dict[str, str] = {}
    for pair in text.split(","):
        ours, separator, theirs = (piece.strip() for piece in pair.partition("="))
        if not separator or not ours or not theirs:
            example = "messages=conversations,role=from,content=value"
            raise UsageError(f'--columns "{one_line(pair)}" is not NAME=COLUMN; expected pairs such as {example}')
        tables = [
            table
            for table, names in ((record, (*RECORD_KEYS, *BOTH)), (message, (*MESSAGE_KEYS, *BOTH)), (roles, ROLES))
            if ours in names
        ]
        if not tables:
            known = listed([*dict.fromkeys((*RECORD_KEYS, *MESSAGE_KEYS, *ROLES))])
            raise UsageError(f'--columns has the unknown name "{one_line(ours)}"; expected one of {known}')
        for table in tables:
            if table.get(theirs, ours) != ours or (table is not roles and ours in table.values()):
                raise UsageError(f'--columns maps "{one_line(theirs)}" or "{ours}" twice; expected each name once')
            table[theirs] = ours
    return ColumnMap(record, message, SHAREGPT_ROLES | roles)
