"""`Record`, `Message` and `ToolCall`: the classes to which input records of every shape are converted."""

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
"""Role of text outside the spans of a transcript. The message is complete if an `<|END|>` follows the text."""

_construct = msgspec.StructMeta.__call__


class _FromFields(msgspec.StructMeta):
    """A metaclass that makes `Message(...)` and `Record(...)` validate and convert their fields in the same way as the
    fields of a record in a file.
    """

    def __call__(cls, *args: Any, **fields: Any) -> Any:  # noqa: N805
        if cls not in (Message, Record):
            return _construct(cls, *args, **fields)
        from chatmill.records.shapes.messages import message_from_fields, record_from_fields

        names = cls.__struct_fields__[: len(args)]
        if len(args) > len(names) or not fields.keys().isdisjoint(names):
            raise TypeError(f"{cls.__name__}() takes each field at most once: {', '.join(cls.__struct_fields__)}")
        parse = message_from_fields if cls is Message else record_from_fields
        return parse({**dict(zip(names, args, strict=True)), **fields})


class ToolCall(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True):
    """A function call by the assistant. `arguments` is compact JSON, with keys in the order of the input.

    >>> call = chatmill.ToolCall("weather", '{"city":"Oslo"}', id="call_1")
    >>> call.name, call.arguments_text
    ('weather', '{"city": "Oslo"}')
    """

    name: str
    arguments: str
    id: str | None = None
    raw_arguments: str = ""
    """The arguments as text from the record, if `json.dumps` would write them differently."""

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON text: the text in the record if `raw_arguments` stores it, otherwise the output of
        `json.dumps`.
        """
        return self.raw_arguments or spaced_json(msgspec.json.decode(self.arguments))


class Message(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, metaclass=_FromFields):
    """One message of a conversation. The constructor accepts the fields of OpenAI and Hugging Face messages.

    >>> call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    >>> chatmill.Message(role="assistant", content=None, tool_calls=[call]).tool_calls
    (ToolCall(name='weather', arguments='{}', id='c1'),)
    >>> chatmill.Message("assistant", [{"type": "text", "text": "4"}], thinking="2 + 2 = 4", train=True).weight
    1.0

    `content` can be a list of text parts, or None if there are tool calls. Reasoning can be passed as
    `reasoning_content`, `reasoning` or `thinking`. `train=True` sets the weight to 1, and `train=False` sets it to 0.
    Invalid fields raise a `RecordError`.
    """

    role: Role | Literal["none"]
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    weight: float | None = None
    """Loss weight, which overrides `--train-on` and the format; None means no override."""
    complete: bool = True
    """False for a transcript span without an end marker; such a span is excluded from the loss."""
    train_ranges: tuple[tuple[int, int, float], ...] = ()
    """Character ranges (start, stop, weight) of the content; these weights override the message's weight."""


class Record(msgspec.Struct, frozen=True, metaclass=_FromFields):
    """A conversation, the `source` that it belongs to, and the `file` and `line` that it was read from.

    >>> record = chatmill.Record([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
    >>> record.messages[1].content
    'Hello'

    Messages can be passed as `Message` objects or as dicts of message fields. Tool definitions can be passed as dicts
    or as compact JSON strings.
    """

    messages: list[Message]
    id: str | None = None
    tools: tuple[str, ...] = ()
    """Tool definitions, each as compact JSON."""
    source: str = ""
    file: str = ""
    line: int = 0
    weight: float = 1.0
    """Factor for the loss weights of all tokens."""
    template_kwargs: str = ""
    """Variables for the chat template (`chat_template_kwargs`), as compact JSON."""
    unread_keys: tuple[str, ...] = ()
    """Keys that chatmill does not read, such as `score` or `messages[].lang`."""
    is_text: bool = False
    """Whether the record is plain text, stored as one assistant message."""


new_message: Callable[..., Message] = MethodType(_construct, Message)
"""Creates a `Message` without validation, from fields that were already checked."""
new_record: Callable[..., Record] = MethodType(_construct, Record)

_ENCODER = msgspec.msgpack.Encoder()


def spaced_json(value: Any) -> str:
    """Serialize a value with `json.dumps`, without escaping non-ASCII characters."""
    return json.dumps(value, ensure_ascii=False)


def record_key(record: Record) -> bytes:
    """Return a 16-byte hash of the messages and tools of a record.

    Whitespace in the JSON of tool arguments, and whitespace between the turns of a transcript, do not affect the hash.
    """
    messages = [
        without_raw_arguments(message) if message.tool_calls else message
        for message in record.messages
        if message.role != NO_ROLE or not is_layout(message)
    ]
    return hashlib.sha256(_ENCODER.encode((messages, record.tools))).digest()[:16]


def is_layout(message: Message) -> bool:
    """Whether a message consists only of the whitespace between two turns of a transcript."""
    return message.role == NO_ROLE and not message.complete and message.content.isspace()


def without_raw_arguments(message: Message) -> Message:
    calls = tuple(ToolCall(call.name, call.arguments, call.id) for call in message.tool_calls)
    return msgspec.structs.replace(message, tool_calls=calls)
