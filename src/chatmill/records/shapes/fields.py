"""Checked access to the fields that several shapes share; a fault names its owner (`message 3`, counted from 0)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from chatmill.errors import RecordError, one_line
from chatmill.records.record import ROLES, Message, Role, ToolCall, new_message, spaced_json
from chatmill.records.shapes.decode import compact, decode, named

Object = dict[str, Any]
TrainRanges = tuple[tuple[int, int, float], ...]

TEXT_ROLES: dict[str, Role] = {role: role for role in ROLES if role != "tool"}
RANGE_KEYS = ("train_ranges", "train_detail", "training_detail")
"""chatmill's own, and the two names that Axolotl's docs and code have for theirs."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
# Weights are stored as 32-bit floats, in which a larger one is infinite and a smaller one 0.
_MIN_WEIGHT, _MAX_WEIGHT = 1.1754943508222875e-38, 3.4028234663852886e38


class ParsedRecord(NamedTuple):
    """The conversation of one record; the reader adds its origin to make it a `Record`."""

    messages: list[Message]
    id: str | None = None
    tools: tuple[str, ...] = ()


def quoted(text: str) -> str:
    """Text from data in double quotes, safe to print on one line."""
    return f'"{one_line(text)}"'


def listed(words: Sequence[str], last: str = "or") -> str:
    """`a, b or c`."""
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def required(owner: str, fields: Object, key: str) -> Any:
    """The value under `key`, null included; a missing key is a fault."""
    if key not in fields:
        keys = keys_shown(list(fields)) or "none"
        raise RecordError(f'{owner} has no "{key}"', f"expected it among its keys ({keys})", kind="missing")
    return fields[key]


def text(owner: str, fields: Object, key: str) -> str:
    """The string under `key`."""
    value = required(owner, fields, key)
    if type(value) is not str:
        raise RecordError(f"{owner} has {named(value)} as {key}", "expected a string", kind="content")
    return value


def optional_text(owner: str, fields: Object, key: str) -> str | None:
    """The string under `key`; None where it is null or missing."""
    return text(owner, fields, key) if fields.get(key) is not None else None


def messages(fields: Object, key: str) -> list[Any]:
    """The list of messages under `key`, at least one: objects, or `Message` where Python code gives them."""
    turns = required("the record", fields, key)
    if type(turns) not in (list, tuple):
        raise RecordError(f"the record has {named(turns)} as {key}", "expected a list of messages", kind="type")
    if not turns:
        raise RecordError(f"the record has an empty list as {key}", "expected at least one message", kind="empty")
    for index, message in enumerate(turns):
        if type(message) not in (dict, Message):
            raise RecordError(f"message {index} is {named(message)}", "expected an object", kind="type")
    return list(turns)


def system(fields: Object) -> list[Message]:
    """The message that a top-level `system` text stands for; none if it is missing or empty."""
    text = optional_text("the record", fields, "system")
    return [new_message("system", text)] if text else []


def conversation(
    fields: Object,
    key: str,
    parse_message: Callable[[str, Object], Message],
    head: Callable[[Object], list[Message]] = lambda fields: [],
) -> ParsedRecord:
    """The conversation of a record with `id`, `tools`, and a list of messages under `key`, after those of `head`."""
    turns = enumerate(messages(fields, key))
    body = [*head(fields), *(parse_message(f"message {index}", turn) for index, turn in turns)]
    return ParsedRecord(body, record_id(fields), tools(fields))


def role(owner: str, fields: Object, key: str, roles: Mapping[str, Role]) -> Role:
    """The role to which `roles` maps the name under `key`."""
    right = f"expected {listed(tuple(roles))}"
    if key not in fields:
        raise RecordError(f"{owner} has no {key}", right, kind="role")
    value = fields[key]
    if type(value) is not str:
        raise RecordError(f"{owner} has {named(value)} as {key}", right, kind="role")
    if value not in roles:
        raise RecordError(f"{owner} has {key} {quoted(value)}", right, kind="role")
    return roles[value]


def record_id(fields: Object, key: str = "id") -> str | None:
    """The id of a record: a string, or a whole number as text."""
    value = fields.get(key)
    if value is None or type(value) is str:
        return value
    if type(value) is int:
        return str(value)
    raise RecordError(f"the record has {named(value)} as {key}", "expected a string or a whole number", kind="type")


def weight(owner: str, fields: Object, role: Role) -> float | None:
    """The weight that `train` or `weight` sets; None where neither is given. Tool results are never trained."""
    train, number = fields.get("train"), fields.get("weight")
    if train is not None and number is not None:
        raise RecordError(f"{owner} has both train and weight", "expected one of them", kind="weight")
    if train is not None:
        if type(train) is not bool:
            raise RecordError(f"{owner} has {named(train)} as train", "expected true or false", kind="weight")
        number = train
    elif number is not None:
        if type(number) not in (int, float):
            raise RecordError(f"{owner} has {named(number)} as weight", "expected a number from 0 up", kind="weight")
        if number != 0 and not _MIN_WEIGHT <= number <= _MAX_WEIGHT:
            what = f"{owner} has weight {one_line(str(number))}"
            right = "expected 0 instead" if 0 < number < 1 else "expected a finite number from 0 up"
            raise RecordError(what, right, kind="weight")
    if number and role == "tool":
        what = f"{owner} has a weight over 0 on a tool result"
        raise RecordError(what, "expected none, or train: false", kind="weight")
    return None if number is None else float(number)


def train_ranges(
    owner: str, fields: Object, role: Role, content: Any, weight: float | None
) -> tuple[TrainRanges, float | None]:
    """The ranges of `train_ranges`, or of Axolotl's `train_detail`, and the weight of the message with them.

    `content` is the content as the record has it: ranges are about a text, not about parts.
    """
    given = [key for key in RANGE_KEYS if fields.get(key) is not None]
    if not given:
        return (), weight
    key = given[0]
    if len(given) > 1:
        raise RecordError(f"{owner} has both {key} and {given[1]}", "expected one of them", kind="ranges")
    entries = fields[key]
    if type(entries) not in (list, tuple):
        raise RecordError(f"{owner} has {named(entries)} as {key}", "expected a list of ranges", kind="ranges")
    if role != "assistant" and entries:
        what = f"{owner} has {key} on role {role}"
        raise RecordError(what, "expected them on the assistant only", kind="ranges")
    if type(content) is not str and entries:
        what = f"{owner} has {key} and {named(content)} as content"
        raise RecordError(what, "expected its content as one text", kind="ranges")
    read = _range if key == "train_ranges" else _detail
    ranges = sorted(read(f"{owner}, {key} {index}", entry) for index, entry in enumerate(entries))
    for index, (start, stop, _) in enumerate(ranges):
        where = f"{owner} has {key} of characters {start} to {stop - 1}"
        if index and start < ranges[index - 1][1]:
            raise RecordError(f"{where}, which others overlap", "expected ranges that do not overlap", kind="ranges")
        if stop > len(content):
            raise RecordError(where, f"its content has {len(content)} characters, the first is 0", kind="ranges")
    if key == "train_ranges":
        return tuple(ranges), weight
    return _as_axolotl(ranges, len(content or ""), weight)


def _range(owner: str, entry: Any) -> tuple[int, int, float]:
    """[start, stop], [start, stop, weight], or the same by name, with weight or train."""
    right = "expected [start, stop, weight]"
    if type(entry) in (list, tuple):
        if len(entry) not in (2, 3):
            raise RecordError(f"{owner} has {len(entry)} values", right, kind="ranges")
        start, stop, value = (*entry, 1.0)[:3]
    elif type(entry) is dict:
        only(owner, entry, ("start", "stop", "weight", "train"))
        start, stop = required(owner, entry, "start"), required(owner, entry, "stop")
        value = weight(owner, entry, "assistant")
        value = 1.0 if value is None else value
    else:
        raise RecordError(f"{owner} is {named(entry)}", right, kind="ranges")
    number = weight(owner, {"train" if type(value) is bool else "weight": value}, "assistant")
    if number is None:
        raise RecordError(f"{owner} has null as weight", right, kind="ranges")
    return *_places(owner, start, stop), number


def _detail(owner: str, entry: Any) -> tuple[int, int, float]:
    """Axolotl's form: its `end_offset` is the last character."""
    keys = ("begin_offset", "end_offset", "train")
    if type(entry) is not dict:
        raise RecordError(f"{owner} is {named(entry)}", f"expected an object with {listed(keys, 'and')}", kind="ranges")
    only(owner, entry, keys)
    begin, end, train = (required(owner, entry, key) for key in keys)
    if type(train) is not bool:
        raise RecordError(f"{owner} has {named(train)} as train", "expected true or false", kind="ranges")
    return *_places(owner, begin, end + 1 if type(end) is int else end), float(train)


def _places(owner: str, start: Any, stop: Any) -> tuple[int, int]:
    for value in (start, stop):
        if type(value) is not int:
            raise RecordError(f"{owner} has {named(value)} as a place", "expected whole numbers", kind="ranges")
    if not 0 <= start < stop:
        what = f"{owner} holds no character"
        raise RecordError(what, "expected its start from 0 up, and its stop after that", kind="ranges")
    return start, stop


def _as_axolotl(ranges: TrainRanges | list[Any], size: int, weight: float | None) -> tuple[TrainRanges, float | None]:
    """Axolotl's rules: what no range trains is not trained, and nothing is if the message is not."""
    if weight == 0:
        return (), weight
    if not ranges:
        return (), 0.0 if weight is None else weight
    out: list[tuple[int, int, float]] = []
    at = 0
    for start, stop, train in ranges:
        out += [(at, start, 0.0)] if at < start else []
        out.append((start, stop, train and (1.0 if weight is None else weight)))
        at = stop
    return tuple([*out, (at, size, 0.0)] if at < size else out), weight


def reasoning(owner: str, fields: Object, role: Role) -> str:
    """The text of `reasoning_content`, `reasoning` or `thinking`; empty where none is given."""
    if fields.keys().isdisjoint(_REASONING):
        return ""
    given = {text for key in _REASONING if (text := optional_text(owner, fields, key))}
    if len(given) > 1:
        what = f"{owner} has a reasoning and another reasoning_content"
        raise RecordError(what, "expected one of them", kind="content")
    if given and role != "assistant":
        raise RecordError(f"{owner} has reasoning on role {role}", "expected it on the assistant only", kind="content")
    return given.pop() if given else ""


def refuse(owner: str, fields: Object, *keys: str, right: str) -> None:
    """Fault where one of `keys` is set, because its content would be lost without notice."""
    for key in keys:
        if fields.get(key) is not None:
            raise RecordError(f'{owner} has a "{key}"', right, kind="keys")


def only(owner: str, fields: Object, known: Sequence[str]) -> None:
    """Fault where there is any key besides the known ones."""
    if unknown := [key for key in fields if key not in known]:
        noun = "key" if len(unknown) == 1 else "keys"
        what = f"{owner} has the unknown {noun} {keys_shown(unknown)}"
        raise RecordError(what, f"expected only {listed(known, 'and')}", kind="keys")


def json_value(value: Any, what: str, right: str, *, kind: str) -> Any:
    """A value that may be given as JSON text, decoded; what is not JSON is the fault `what`."""
    try:
        return decode(value.encode()) if type(value) is str else value
    except RecordError as fault:
        raise RecordError(f"{what}: {fault.what}", right, kind=kind) from None


def tool_call(owner: str, fields: Any, id: str | None = None) -> ToolCall:
    """A call from `{"name": …, "arguments": …}`, with arguments as an object or as JSON text of one."""
    if type(fields) is not dict:
        raise RecordError(f"{owner} is {named(fields)}", "expected an object with name and arguments", kind="arguments")
    name, given, right = text(owner, fields, "name"), required(owner, fields, "arguments"), "expected a JSON object"
    raw = given if type(given) is str else ""
    given = json_value(given, f"{owner} has arguments that are not JSON", right, kind="arguments")
    if type(given) is not dict:
        raise RecordError(f"{owner} has {named(given)} as arguments", right, kind="arguments")
    return ToolCall(name, compact(given), id, "" if not raw or raw == spaced_json(given) else raw)


def tools(fields: Object) -> tuple[str, ...]:
    """The definitions under `tools`, a list of objects or JSON text of one, each as compact JSON."""
    given, right = fields.get("tools"), "expected a list of tool definitions"
    if given is None or (type(given) is str and not given.strip()):
        return ()
    given = json_value(given, "tools is not JSON", right, kind="tools")
    if given is None:
        return ()
    if type(given) is not list:
        raise RecordError(f"the record has {named(given)} as tools", right, kind="tools")
    for index, tool in enumerate(given):
        if type(tool) is not dict:
            raise RecordError(f"tool {index} is {named(tool)}", "expected an object", kind="tools")
    return tuple(compact(tool) for tool in given)


def keys_shown(keys: Sequence[str]) -> str:
    """The first few keys, for a fault."""
    return ", ".join(quoted(key) for key in keys[:6]) + (", …" if len(keys) > 6 else "")
