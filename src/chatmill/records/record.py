"""The one form of a conversation that every shape is read into: `Record`, `Message`, `ToolCall`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from types import MethodType
from typing import Any, Literal, get_args

import msgspec

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)
NO_ROLE: Literal["none"] = "none"
"""The role of text outside of every span of a transcript; complete if an `<|END|>` that closes nothing follows it."""

_construct = msgspec.StructMeta.__call__


class _FromFields(msgspec.StructMeta):
    """Makes `Message(**fields)` and `Record(**fields)` check and convert their fields as the reader does."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:  # noqa: N805
        if cls not in (Message, Record):
            return _construct(cls, *args, **fields)
        from chatmill.records.shapes.messages import message_from_fields, record_from_fields

        names = cls.__struct_fields__[: len(args)]
        if len(args) > len(names) or not fields.keys().isdisjoint(names):
            raise TypeError(f"{cls.__name__}() takes each of {', '.join(cls.__struct_fields__)} at most once")
        parse = message_from_fields if cls is Message else record_from_fields
        return parse({**dict(zip(names, args, strict=True)), **fields})


class ToolCall(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True):
    """A function call by the assistant. `arguments` is compact JSON with the key order of the input.

    >>> call = chatmill.ToolCall("weather", '{"city":"Oslo"}', id="call_1")
    >>> call.name, call.arguments_text
    ('weather', '{"city": "Oslo"}')
    """

    name: str
    arguments: str
    id: str | None = None
    raw_arguments: str = ""
    """The arguments as the record wrote them, where it gave a text that `json.dumps` does not write."""

    @property
    def arguments_text(self) -> str:
        """The arguments as the record wrote them; an object as `json.dumps` and the `tojson` of templates write it."""
        return self.raw_arguments or spaced_json(msgspec.json.decode(self.arguments))


class Message(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, metaclass=_FromFields):
    """One message of a conversation. It takes the fields of OpenAI and Hugging Face messages.

    >>> call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    >>> chatmill.Message(role="assistant", content=None, tool_calls=[call]).tool_calls
    (ToolCall(name='weather', arguments='{}', id='c1'),)
    >>> chatmill.Message("assistant", [{"type": "text", "text": "4"}], thinking="2 + 2 = 4", train=True).weight
    1.0

    `content` may be a list of text parts, or None with tool calls; the reasoning may be called `reasoning_content`,
    `reasoning` or `thinking`; `train` is a weight of 1 or 0. What cannot be read is a `RecordError`.
    """

    role: Role | Literal["none"]
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    weight: float | None = None
    """None leaves the choice to the format and `--train-on`; a number takes precedence over both."""
    complete: bool = True
    """False for a transcript span that never closed: rendered without its close, and never trained."""
    train_ranges: tuple[tuple[int, int, float], ...] = ()
    """(start, stop, weight): weights of characters of the content, which take precedence over that of the message."""


class Record(msgspec.Struct, frozen=True, metaclass=_FromFields):
    """A conversation and its origin: the `source` it is mixed by, and the `file` and `line` it was read from.

    >>> record = chatmill.Record([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
    >>> record.messages[1].content
    'Hello'

    Messages are `Message` objects or dicts of their fields; tools are definitions, or compact JSON of them.
    """

    messages: list[Message]
    id: str | None = None
    tools: tuple[str, ...] = ()
    """The definitions of the functions that the assistant may call, each as compact JSON."""
    source: str = ""
    file: str = ""
    line: int = 0
    weight: float = 1.0
    """Multiplies the loss weight of every trained token."""
    template_kwargs: str = ""
    """Variables for the chat template, from `chat_template_kwargs`, as compact JSON."""
    unread_keys: tuple[str, ...] = ()
    """Keys that the reader does not know, such as `score` or `messages[].lang`."""
    is_text: bool = False
    """One text without roles, in a message of the assistant; only `--format text` writes it."""


new_message: Callable[..., Message] = MethodType(_construct, Message)
"""`Message` without checks, for fields that were checked already."""
new_record: Callable[..., Record] = MethodType(_construct, Record)

_ENCODER = msgspec.msgpack.Encoder()


def spaced_json(value: Any) -> str:
    """A JSON value as `json.dumps` writes it, with its characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def record_key(record: Record) -> bytes:
    """Sixteen bytes that identify a conversation, whatever its id and origin, and spaces in its arguments.

    Whitespace between the turns of a transcript does not count either.
    """
    messages = [
        without_raw_arguments(message) if message.tool_calls else message
        for message in record.messages
        if message.role != NO_ROLE or not is_layout(message)
    ]
    return hashlib.sha256(_ENCODER.encode((messages, record.tools))).digest()[:16]


def is_layout(message: Message) -> bool:
    """Whether a message is only whitespace between the turns of a transcript."""
    return message.role == NO_ROLE and not message.complete and message.content.isspace()


def without_raw_arguments(message: Message) -> Message:
    calls = tuple(ToolCall(call.name, call.arguments, call.id) for call in message.tool_calls)
    return msgspec.structs.replace(message, tool_calls=calls)
