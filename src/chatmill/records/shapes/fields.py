"""Read and validate the keys of a record, and report keys that were not read.

Error messages name the object that has or lacks a key, such as `message 3`; messages are numbered from 0.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from chatmill.errors import RecordError, one_line
from chatmill.records.record import ROLES, Message, Role, ToolCall, new_message, spaced_json
from chatmill.records.shapes.decode import compact, decode, named, wrong_type
from chatmill.records.shapes.preferences import PREFERENCE_DATA_KEYS, refuse_preferences

Object = dict[str, Any]

TEXT_ROLES: dict[str, Role] = {role: role for role in ROLES if role != "tool"}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
FLAG_KEYS = ("train", "training", "loss", "masked")
"""Boolean keys that select messages: `training` is from Axolotl, `loss` from ms-swift, `masked` from torchtune."""
WEIGHT_KEYS = ("weight", "loss_weight", "loss_scale")
"""Numeric keys: `loss_weight` is from LLaMA-Factory, `loss_scale` from ms-swift."""
ANSWER_KEYS = ("loss", "loss_weight", "loss_scale")
"""Keys that may set a weight above 0 only in assistant messages, as in the trainers that use these keys."""
# The smallest and largest normal float32 values.
_MIN_WEIGHT, _MAX_WEIGHT = 1.1754943508222875e-38, 3.4028234663852886e38

MEDIA_KEYS = ("images", "image", "videos", "video", "audios", "audio")
ROLE_NAMES: dict[str, Role] = {
    **dict.fromkeys(("model", "bot", "chatbot", "ai", "gpt", "answer"), "assistant"),
    **dict.fromkeys(("human", "prompter", "question"), "user"),
    **dict.fromkeys(("function", "observation", "ipython"), "tool"),
}
"""Role names of other formats, for hints in errors."""
RESERVED_KWARGS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template")
"""Arguments of `apply_chat_template` that a record must not set."""

MAX_UNREAD = 64
"""Number of unread keys to list per record; further keys are listed as `OTHER_KEYS`."""
OTHER_KEYS = "(other keys)"


class ParsedRecord(NamedTuple):
    """The parsed contents of a record, without its source, file and line number."""

    messages: list[Message]
    id: str | None = None
    tools: tuple[str, ...] = ()
    weight: float = 1.0
    template_kwargs: str = ""
    unread_keys: tuple[str, ...] = ()
    is_text: bool = False


class KeyReader:
    """Reads and validates the values of a JSON object. `finish` adds the keys that were not read to `unread`.

    >>> turn = KeyReader("message 0", "messages[].", {"role": "user", "content": "Hi", "lang": "en"}, unread := {})
    >>> turn.text("role"), turn.text("content")
    ('user', 'Hi')
    >>> turn.finish()
    >>> list(unread)
    ['messages[].lang']
    """

    __slots__ = ("_given", "_path", "_unread", "_values", "owner")

    def __init__(self, owner: str, path: str, values: Object, unread: dict[str, None]) -> None:
        self.owner = owner
        self._path, self._given, self._values, self._unread = path, values, dict(values), unread

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def child(self, owner: str, path: str, values: Object) -> KeyReader:
        """Return a reader for a nested object; both readers add their unread keys to the same dict."""
        return KeyReader(owner, self._path + path, values, self._unread)

    def finish(self) -> None:
        for key in self._values:
            if len(self._unread) >= MAX_UNREAD:
                self._unread[OTHER_KEYS] = None
                return
            self._unread[one_line(self._path + key)] = None

    # Methods that return a value of any type.

    def take(self, key: str) -> Any:
        """Remove `key` and return its value, or None if it is null or missing."""
        return self._values.pop(key, None)

    def peek(self, key: str) -> Any:
        return self._values.get(key)

    def required(self, key: str) -> Any:
        """Remove `key` and return its value, which may be null; raise `RecordError` if the key is missing."""
        if key not in self._values:
            keys = keys_shown(list(self._given)) or "none"
            what = f'{self.owner} has no "{key}"'
            raise RecordError(what, f"expected this key (found: {keys})", kind="missing")
        return self._values.pop(key)

    def text(self, key: str) -> str:
        value = self.required(key)
        if type(value) is not str:
            raise RecordError(wrong_type(self.owner, key, value), "expected a string", kind="content")
        return value

    def optional_text(self, key: str) -> str | None:
        """Remove `key` and return its string, or None if it is null or missing."""
        if self.peek(key) is None:
            self.take(key)
            return None
        return self.text(key)

    def role(self, key: str, roles: Mapping[str, Role], *, has_columns: bool = True) -> Role:
        """Read a role name from `key`, and return the role that `roles` maps it to.

        If `has_columns` is true, the error for an unknown role suggests a `--columns` option that maps the role.
        """
        right = f"expected {listed(tuple(roles))}"
        if key not in self:
            raise RecordError(f"{self.owner} has no {key}", right, kind="role")
        value = self.take(key)
        if type(value) is not str:
            raise RecordError(wrong_type(self.owner, key, value), right, kind="role")
        if value not in roles:
            hint = _role_hint(value, roles) if has_columns and self._path else ""
            raise RecordError(f"{self.owner} has {key} {quoted(value)}", right + hint, kind="role")
        return roles[value]

    # Reject keys that are not supported.

    def refuse(self, *keys: str, right: str) -> None:
        """Raise `RecordError` if one of `keys` has a value, because the value would otherwise be lost silently."""
        for key in keys:
            if self.take(key) is not None:
                raise RecordError(f'{self.owner} has a "{key}"', right, kind="keys")

    def refuse_media(self) -> None:
        """Raise `RecordError` if the object has images, videos or audio; empty values are allowed."""
        for key in MEDIA_KEYS:
            if self.take(key) not in (None, [], "", {}):
                what = f'{self.owner} has "{key}", but chatmill trains only on text'
                raise RecordError(what, "remove the record or the key", kind="media")

    def refuse_preferences(self) -> None:
        """Reject preference data: DPO pairs and KTO labels."""
        for key in PREFERENCE_DATA_KEYS.intersection(self._values):
            refuse_preferences(self.owner, self._given)
            if self.peek(key) is None:
                self.take(key)

    def refuse_masks(self) -> None:
        """Reject keys that other trainers use to select the messages to train on."""
        if type(mask := self.peek("mask")) is str and mask.lower() == "user":
            self.take("mask")
        elif type(mask) is str:
            what = f'{self.owner} has "mask", which NeMo uses to select the roles to train on'
            raise RecordError(what, 'set "train" to true or false in each message instead', kind="keys")
        if self.peek("only_last") is True:
            what = f'{self.owner} has "only_last"'
            raise RecordError(what, "remove the key, and use --train-on last", kind="keys")

    def only(self, known: Sequence[str]) -> None:
        """Raise `RecordError` if the object has an unread key that is not in `known`."""
        if unknown := [key for key in self._values if key not in known]:
            noun = "key" if len(unknown) == 1 else "keys"
            what = f"{self.owner} has the unknown {noun} {keys_shown(unknown)}"
            raise RecordError(what, f"expected only {listed(known, 'and')}", kind="keys")


def quoted(text: str) -> str:
    """Return the text on one line, in double quotes."""
    return f'"{one_line(text)}"'


def listed(words: Sequence[str], last: str = "or") -> str:
    """`a, b or c`."""
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _role_hint(name: str, roles: Mapping[str, Role]) -> str:
    """Return a hint on how to map an unknown role name with `--columns`, or an empty string if there is no hint."""
    if name in ROLES or not re.fullmatch(r"[\w.-][\w .-]{,39}(?<! )", name):
        return ""
    role = roles.get(name.lower()) or ROLE_NAMES.get(name.lower())
    if role is None:
        return f"; --columns maps other roles, such as {shlex.quote(f'user={name}')}"
    return f"; {shlex.join(['--columns', f'{role}={name}'])} maps this role" if role in roles else ""


def keys_shown(keys: Sequence[str]) -> str:
    """Return the first few keys in quotes, for an error message."""
    return ", ".join(quoted(key) for key in keys[:6]) + (", …" if len(keys) > 6 else "")


# Records.


def read_record(
    values: Object, read_messages: Callable[[KeyReader], list[Message]], *, id_key: str = "id"
) -> ParsedRecord:
    """Parse the messages of a record with `read_messages`, and the keys that all shapes have in common."""
    unread: dict[str, None] = {}
    record = KeyReader("the record", "", values, unread)
    record.refuse_media()
    record.refuse_preferences()
    record.refuse_masks()
    turns = read_messages(record)
    weight = read_weight(record)
    if weight is not None and any(turn.weight and weight * turn.weight > _MAX_WEIGHT for turn in turns):
        raise RecordError(
            "the record weight times a message weight is too large", "expected smaller weights", kind="weight"
        )
    parsed = ParsedRecord(
        turns, record_id(record, id_key), tools(record), 1.0 if weight is None else weight, template_kwargs(record)
    )
    record.finish()
    return parsed._replace(unread_keys=tuple(unread)) if unread else parsed


class PlainMessages(NamedTuple):
    """The two key names and the role names of messages that contain only a role and a text."""

    role: str
    text: str
    roles: Mapping[str, Role]


def messages(
    record: KeyReader, key: str, read_message: Callable[[KeyReader], Message], plain: PlainMessages
) -> list[Message]:
    """Parse the list of messages under `key`, which must not be empty and may be given as a JSON string."""
    role_key, text_key, roles = plain
    out: list[Message] = []
    for index, turn in enumerate(message_list(record, key)):
        # A faster branch for plain messages, which are the most common.
        role, text = (turn.get(role_key), turn.get(text_key)) if len(turn) == 2 else (None, None)
        if type(text) is str and type(role) is str and role in roles:
            out.append(new_message(roles[role], text))
        else:
            out.append(read_turn(record, f"message {index}", f"{key}[].", turn, read_message))
    return out


def message_list(record: KeyReader, key: str) -> list[Any]:
    """Return the messages under `key` as a non-empty list of dicts or `Message` objects."""
    turns = record.required(key)
    if type(turns) is str:
        what = f'"{key}" is a string that is not JSON'
        turns = json_value(turns, what, "expected a list of messages, or a list as JSON text", kind="type")
    if type(turns) not in (list, tuple):
        raise RecordError(wrong_type("the record", key, turns), "expected a list of messages", kind="type")
    if not turns:
        raise RecordError(f"{key} is an empty list", "expected at least one message", kind="empty")
    for index, message in enumerate(turns):
        if type(message) not in (dict, Message):
            raise RecordError(f"message {index} is {named(message)}", "expected an object", kind="type")
    return list(turns)


def read_turn(
    record: KeyReader, owner: str, path: str, values: Object, read_message: Callable[[KeyReader], Message]
) -> Message:
    turn = record.child(owner, path, values)
    turn.refuse_media()
    message = read_message(turn)
    turn.finish()
    return message


def with_system(record: KeyReader, turns: list[Message]) -> list[Message]:
    """Prepend the record's top-level `system` text as a message, unless the messages already start with it."""
    first = system(record)
    if first and turns and turns[0].role == "system":
        if turns[0].content != first[0].content:
            what = 'the record has a "system" text and another system message'
            raise RecordError(what, "expected only one system text", kind="content")
        return turns
    return first + turns


def system(record: KeyReader) -> list[Message]:
    """Return a list with one system message, or an empty list if the record has no top-level `system` text."""
    text = record.optional_text("system")
    return [new_message("system", text)] if text else []


def record_id(record: KeyReader, key: str = "id") -> str | None:
    """Return the id of a record: a string, or an integer as a string."""
    value = record.take(key)
    if value is None or type(value) is str:
        return value
    if type(value) is int:
        return str(value)
    raise RecordError(wrong_type("the record", key, value), "expected a string or an integer", kind="type")


def tools(record: KeyReader) -> tuple[str, ...]:
    """Return each tool definition as compact JSON; the record may contain the list as a JSON string."""
    given, right = record.take("tools"), "expected a list of tool definitions"
    if given is None or (type(given) is str and not given.strip()):
        return ()
    given = json_value(given, "tools is not JSON", right, kind="tools")
    if given is None:
        return ()
    if type(given) is not list:
        raise RecordError(wrong_type("the record", "tools", given), right, kind="tools")
    for index, tool in enumerate(given):
        if type(tool) is not dict:
            raise RecordError(f"tool {index} is {named(tool)}", "expected an object", kind="tools")
    return tuple(compact(tool) for tool in given)


def template_kwargs(record: KeyReader) -> str:
    """Return `chat_template_kwargs` as compact JSON, or an empty string."""
    given, right = record.take("chat_template_kwargs"), 'expected an object such as {"enable_thinking": false}'
    given = json_value(given, "chat_template_kwargs is not JSON", right, kind="template_kwargs")
    if given is None or given == {}:
        return ""
    if type(given) is not dict:
        what = wrong_type("the record", "chat_template_kwargs", given)
        raise RecordError(what, right, kind="template_kwargs")
    for name in given:
        if not name.isidentifier() or name in RESERVED_KWARGS:
            what = f"chat_template_kwargs has {quoted(name)}"
            raise RecordError(what, "expected names of template variables", kind="template_kwargs")
    # In a table, all rows have the same keys, so null means that the key is missing.
    given = {name: value for name, value in sorted(given.items()) if value is not None}
    return compact(given) if given else ""


# Messages.


def read_weight(fields: KeyReader, role: Role | None = None) -> float | None:
    """Return the loss weight that a key in `FLAG_KEYS` or `WEIGHT_KEYS` sets, or None if no such key is set.

    A tool result cannot have a weight above 0.
    """
    given = {key: value for key in (*FLAG_KEYS, *WEIGHT_KEYS) if (value := fields.take(key)) is not None}
    if not given:
        return None
    owner, (key, number) = fields.owner, next(iter(given.items()))
    if len(given) > 1:
        raise RecordError(f"{owner} has both {' and '.join(given)}", "expected only one of these keys", kind="weight")
    if key in FLAG_KEYS:
        if type(number) is not bool:
            raise RecordError(wrong_type(owner, key, number), "expected true or false", kind="weight")
        number = number != (key == "masked")
    elif type(number) not in (int, float):
        raise RecordError(wrong_type(owner, key, number), "expected a number, 0 or more", kind="weight")
    elif number != 0 and not _MIN_WEIGHT <= number <= _MAX_WEIGHT:
        right = "expected 0 instead" if 0 < number < 1 else "expected a finite number, 0 or more"
        raise RecordError(f"{owner} has {key} {one_line(str(number))}", right, kind="weight")
    if number and key in ANSWER_KEYS and role not in (None, "assistant"):
        what = f"{owner} has {key}, which is only for assistant messages, but its role is {role}"
        raise RecordError(what, "use weight or train instead", kind="weight")
    if number and role == "tool":
        what = f"{owner} is a tool result with a weight above 0"
        raise RecordError(what, "expected no weight, or train: false", kind="weight")
    # Adding 0.0 turns -0.0 into 0.0.
    return float(number) + 0.0


def reasoning(turn: KeyReader, role: Role) -> str:
    """Return the text of `reasoning_content`, `reasoning` or `thinking`, or an empty string."""
    given = {text for key in REASONING_KEYS if key in turn and (text := turn.optional_text(key))}
    if len(given) > 1:
        what = f"{turn.owner} has reasoning under two keys, with different texts"
        raise RecordError(what, "expected reasoning under only one key", kind="content")
    if given and role != "assistant":
        what = f"{turn.owner} has reasoning, but its role is {role}"
        raise RecordError(what, "expected reasoning only in assistant messages", kind="content")
    return given.pop() if given else ""


def json_value(value: Any, what: str, right: str, *, kind: str) -> Any:
    """Decode `value` if it is a JSON string; for invalid JSON, the error message starts with `what`."""
    try:
        return decode(value.encode()) if type(value) is str else value
    except RecordError as fault:
        raise RecordError(f"{what}: {fault.what}", right, kind=kind) from None


def tool_call(call: KeyReader, id: str | None = None) -> ToolCall:
    """Parse a tool call `{"name": …, "arguments": …}`; arguments may be an object or JSON text."""
    owner, right = call.owner, "expected a JSON object"
    name, given = call.text("name"), call.required("arguments")
    raw = given if type(given) is str else ""
    given = json_value(given, f"{owner} has arguments that are not JSON", right, kind="arguments")
    if type(given) is not dict:
        raise RecordError(wrong_type(owner, "arguments", given), right, kind="arguments")
    return ToolCall(name, compact(given), id, "" if not raw or raw == spaced_json(given) else raw)


def call_fields(turn: KeyReader, owner: str, path: str, value: Any) -> KeyReader:
    if type(value) is not dict:
        raise RecordError(f"{owner} is {named(value)}", "expected an object with name and arguments", kind="arguments")
    return turn.child(owner, path, value)
