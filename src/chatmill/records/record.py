"""One conversation as chatmill knows it, whatever the shape of the file it came from."""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

import msgspec

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)


class ToolCall(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A function the assistant calls. `arguments` is compact JSON with the key order of the input."""

    name: str
    arguments: str
    id: str | None = None


class Message(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One turn. `weight` None leaves the choice to the format and `--train-on`; a number wins over both."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    weight: float | None = None
    complete: bool = True
    """False for a transcript span that never closed: rendered without its close, and never trained."""


class Record(msgspec.Struct, frozen=True):
    """A conversation and where it stands: `source` is the name it is mixed by, `file` and `line` its place."""

    messages: list[Message]
    id: str | None = None
    tools: tuple[str, ...] = ()
    """The definitions offered to the assistant, each as compact JSON."""
    source: str = ""
    file: str = ""
    line: int = 0


_ENCODER = msgspec.msgpack.Encoder()


def record_key(record: Record) -> bytes:
    """Sixteen bytes that are the same for the same conversation, wherever it stands and whatever its id is."""
    return hashlib.sha256(_ENCODER.encode((record.messages, record.tools))).digest()[:16]
