"""The `oasst1` shape: message trees, each read as one conversation that follows the best-ranked replies.

A tree is stored as one JSON object, or as one message per line, which `grouped` joins into a JSON list.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from typing import Any

import msgspec

from chatmill.errors import RecordError
from chatmill.records.record import Message, Role, new_message
from chatmill.records.shapes import fields
from chatmill.records.shapes.decode import named, wrong_type
from chatmill.records.shapes.fields import KeyReader, Object, ParsedRecord, quoted

_ROLES: dict[str, Role] = {"prompter": "user", "assistant": "assistant"}
_READ = ("message_id", "message_tree_id", "parent_id", "role", "text", "rank", "deleted", "replies")
"""Message keys that are read."""


class _FlatMessage(msgspec.Struct, gc=False):
    """The fields needed to group messages into trees; an object with `prompt` is already a whole tree."""

    message_tree_id: str
    message_id: str | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")


_DECODER = msgspec.json.Decoder(_FlatMessage)


def parse(record: Any) -> ParsedRecord:
    """Parse one tree: an object with `prompt` or `replies`, or a list of flat messages."""
    if type(record) is list and record and all(type(message) is dict for message in record):
        tree = {"message_tree_id": record[0].get("message_tree_id")}
        return _conversation(tree, *_flat_tree(record), messages=record)
    if type(record) is not dict:
        raise RecordError(f"the record is {named(record)}", "expected one JSON object", kind="object")
    if "prompt" not in record and type(record.get("replies")) is list:
        return _conversation({"message_tree_id": record.get("message_id")}, record, {}, messages=[record])
    if "prompt" not in record:
        right = 'expected "prompt", "replies", or the strings "message_id" and "message_tree_id"'
        raise RecordError("the record is neither a message tree nor a message of a tree", right, kind="missing")
    tree = {key: value for key, value in record.items() if key != "prompt"}
    return _conversation(tree, record["prompt"], {}, messages=[record["prompt"]])


def _conversation(tree: Object, root: Any, replies: dict[str, list[Object]], *, messages: list[Object]) -> ParsedRecord:
    """Return the conversation along the best-ranked replies, with the unread keys of all messages."""

    def read_messages(record: KeyReader) -> list[Message]:
        path = _best_path(root, replies)
        others = list(messages)
        while others:
            message = others.pop()
            if type(message) is dict:
                unread = {key: None for key in message if key not in _READ}
                record.child("a message", "messages[].", unread).finish()
                below = message.get("replies")
                others += below if type(below) is list else []
        return path

    return fields.read_record(tree, read_messages, id_key="message_tree_id")


def grouped(units: Iterable[tuple[int, bytes]], *, limit: int) -> Generator[tuple[int, bytes], None, None]:
    """Join the consecutive flat messages of a tree into one JSON list.

    a1 a2 b1 tree a3  ->  [a1,a2] [b1] tree [a3]
    """
    tree, line, size = None, 0, 0
    lines: list[bytes] = []
    for number, data in units:
        try:
            message = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield number, data
            continue
        whole = bytes(message.prompt) != b"null"
        if lines and (whole or message.message_tree_id != tree):
            yield line, b"[" + b",".join(lines) + b"]"
            lines = []
        if whole or message.message_id is None:
            yield number, data
            continue
        if not lines:
            tree, line, size = message.message_tree_id, number, 0
        if size <= limit:
            # A tree over the limit is rejected later, so add no more lines.
            lines.append(data)
            size += len(data) + 1
    if lines:
        yield line, b"[" + b",".join(lines) + b"]"


def _flat_tree(messages: list[Object]) -> tuple[Object, dict[str, list[Object]]]:
    """Return the root message of a tree that is given as a list of messages, and the replies to each message."""
    replies: dict[str, list[Object]] = {}
    for index, message in enumerate(messages):
        name = _fields(f"message {index}", message).text("message_id")
        if name in replies:
            what = f"message {index} repeats message_id {quoted(name)}"
            raise RecordError(what, "expected each message once", kind="tree")
        replies[name] = []
    roots = []
    for index, message in enumerate(messages):
        parent = _fields(f"message {index}", message).optional_text("parent_id")
        if parent is None:
            roots.append(message)
        elif parent in replies:
            replies[parent].append(message)
        else:
            what = f"message {index} replies to {quoted(parent)}, which is not in its tree"
            raise RecordError(what, "expected all messages of a tree on consecutive lines", kind="tree")
    if len(roots) != 1:
        what = f"the tree has {len(roots)} messages without parent_id"
        raise RecordError(what, "expected one root message", kind="tree")
    return roots[0], replies


def _best_path(root: Any, replies: dict[str, list[Object]]) -> list[Message]:
    path: list[Message] = []
    choice = _undeleted("the prompt", [root])
    while choice:
        owner = f"message {len(path)}"
        best = min(choice, key=lambda reply: math.inf if reply.get("rank") is None else reply["rank"])
        message = _fields(owner, best)
        path.append(new_message(message.role("role", _ROLES, has_columns=False), message.text("text")))
        below = replies[best["message_id"]] if replies else best.get("replies") or []
        if type(below) is not list:
            raise RecordError(wrong_type(owner, "replies", below), "expected a list of messages", kind="type")
        choice = _undeleted(f"a reply to {owner}", below)
    if not path:
        raise RecordError("the prompt of the tree is deleted", "expected a prompt that is not deleted", kind="empty")
    return path


def _fields(owner: str, message: Object) -> KeyReader:
    return KeyReader(owner, "", message, {})


def _undeleted(owner: str, messages: list[Any]) -> list[Object]:
    for message in messages:
        if type(message) is not dict:
            raise RecordError(f"{owner} is {named(message)}", "expected a message object", kind="type")
        if type(message.get("deleted")) not in (bool, type(None)):
            what = wrong_type(owner, "deleted", message["deleted"])
            raise RecordError(what, "expected true or false", kind="type")
        if type(message.get("rank")) not in (int, float, type(None)):
            raise RecordError(wrong_type(owner, "rank", message["rank"]), "expected a number", kind="type")
    return [message for message in messages if not message.get("deleted")]
