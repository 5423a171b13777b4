from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.errors import RecordError
from chatmill.records import Message, Record, read_records
from chatmill.records.shapes import parser

NAMES = st.sampled_from(
    [
        *(
            "weight",
            "train",
            "training",
            "loss",
            "loss_weight",
            "loss_scale",
            "masked",
            "mask",
            "only_last",
            "thinking",
        ),
        *("reasoning", "images", "image", "videos", "audio", "chosen", "rejected", "rejected_response", "label"),
        *("kto_tag", "tools", "system", "functions", "chat_template_kwargs", "id", "name", "history", "input", "lang"),
        *("score", "source", "role ", "", "é", "tool_calls", "tool_call_id", "function_call", "refusal", "annotations"),
        *("train_ranges", "train_detail", "complete", "context", "category", "parallel_tool_calls", "text", "prompt"),
    ]
) | st.text("aé_z[]", max_size=3)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 0.5, 2, -1, "", "x", "[]", "{}", [], {}, ["x"], {"x": 1}, [0, 1], "user", "User"]),
)
EXTRA = st.dictionaries(NAMES, VALUES, max_size=4)


def shaped(shape: str) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    pairs = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    return {
        "messages": ({"messages": turns}, turns, "messages[]."),
        "tool": ({"messages": turns}, turns, "messages[]."),
        "sharegpt": ({"conversations": pairs}, pairs, "conversations[]."),
        "alpaca": ({"instruction": "q", "output": "a"}, [], ""),
        "dolly": ({"instruction": "q", "response": "a"}, [], ""),
        "prompt-completion": ({"prompt": "q", "completion": "a"}, [], ""),
        "text": ({"text": "a"}, [], ""),
    }[shape]


SHAPES = ["messages", "tool", "sharegpt", "alpaca", "dolly", "prompt-completion", "text"]


def outcome(shape: str, record: dict[str, Any]) -> Record | RecordError:
    (result,) = parser(shape, file="a.jsonl", source="a", limit=2**20)(1, json.dumps(record).encode())
    return result


def with_name(record: dict[str, Any], place: str, key: str, value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(record))
    owner = copy if not place else copy[place][-1]
    owner[key] = value
    return copy


def matters(shape: str, record: dict[str, Any], place: str, key: str) -> bool:
    known = outcome(shape, record)
    for value in (None, True, False, 0, 0.5, "x", [], {}, ["x"], {"x": 1}, [[0, 1, 0]]):
        other = outcome(shape, with_name(record, place, key, value))
        if isinstance(other, RecordError) or isinstance(known, RecordError):
            return True
        if (other.messages, other.id, other.tools, other.weight, other.template_kwargs) != (
            *(known.messages, known.id, known.tools, known.weight, known.template_kwargs),
        ):
            return True
    return False


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=40)
@given(data=st.data())
def test_keys_are_read_refused_or_reported(shape, data):
    record, turns, path = shaped(shape)
    extra = {key: value for key, value in data.draw(EXTRA).items() if key not in record}
    record |= extra
    place = path.removesuffix("[].")
    more = {}
    if turns:
        more = {key: value for key, value in data.draw(EXTRA).items() if key not in turns[-1]}
        turns[-1].update(more)
    read = outcome(shape, record)
    if isinstance(read, RecordError):
        return
    reported = set(read.unread_keys)
    expected = {*extra, *(path + key for key in more)}
    assert reported <= expected
    for key in extra:
        if key not in reported:
            assert matters(shape, record, "", key), key
    for key in more:
        if path + key not in reported:
            assert matters(shape, record, place, key), key


@pytest.mark.parametrize("shape", SHAPES)
def test_a_reported_key_does_not_change_the_record(shape):
    record, turns, path = shaped(shape)
    plain = outcome(shape, record)
    assert isinstance(plain, Record)
    assert plain.unread_keys == ()
    record |= {"score": 3, "source": None}
    for turn in turns:
        turn["lang"] = {"messages": []}
    noted = outcome(shape, record)
    assert isinstance(noted, Record)
    assert noted.messages == plain.messages
    assert set(noted.unread_keys) == {"score", "source"} | ({f"{path}lang"} if turns else set())


@pytest.mark.parametrize(
    ("key", "value", "weight"),
    [
        *(("weight", 0.5, 0.5), ("weight", 0, 0.0), ("train", False, 0.0), ("train", True, 1.0)),
        *(("training", False, 0.0), ("loss", False, 0.0), ("loss_weight", 0.25, 0.25), ("loss_scale", 2.0, 2.0)),
        *(("masked", True, 0.0), ("masked", False, 1.0), ("weight", None, None)),
    ],
)
def test_weights_of_messages_with_the_keys_of_other_trainers(key, value, weight):
    for shape in ("messages", "sharegpt", "tool"):
        record, turns, _ = shaped(shape)
        turns[-1][key] = value
        read = outcome(shape, record)
        assert isinstance(read, Record)
        assert [message.weight for message in read.messages] == [None, weight]
        assert read.unread_keys == ()


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_of_records(shape):
    for key, value, weight in (("weight", 0.5, 0.5), ("train", False, 0.0), ("train", True, 1.0), ("weight", None, 1)):
        record, *_ = shaped(shape)
        read = outcome(shape, record | {key: value})
        assert isinstance(read, Record)
        assert (read.weight, read.unread_keys) == (weight, ())


def test_training_keys_of_other_trainers_are_refused_on_other_roles():
    for key, value in (("loss", True), ("loss_weight", 1.0), ("loss_scale", 1.0)):
        turns = [{"role": "user", "content": "q", key: value}, {"role": "assistant", "content": "a"}]
        refused = outcome("messages", {"messages": turns})
        assert isinstance(refused, RecordError)
        assert f"message 0 has {key}, which is only for assistant messages, but its role is user" in str(refused)
        turns[0][key] = 0 if key != "loss" else False
        assert isinstance(outcome("messages", {"messages": turns}), Record)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        *(("images", ["a.png"], "media"), ("image", {"bytes": ""}, "media"), ("videos", ["a"], "media")),
        *(("audios", ["a"], "media"), ("chosen", "x", "preference"), ("rejected", "", "preference")),
        *(("rejected_response", "x", "preference"), ("label", True, "preference"), ("label", False, "preference")),
        *(("kto_tag", "x", "preference"), ("mask", "Assistant", "keys"), ("only_last", True, "keys")),
    ],
)
def test_keys_that_change_the_meaning_are_refused(shape, key, value, kind):
    record, *_ = shaped(shape)
    refused = outcome(shape, record | {key: value})
    assert isinstance(refused, RecordError)
    assert refused.kind == kind
    assert f'"{key}"' in refused.what
    assert "\n" not in str(refused)


@pytest.mark.parametrize("shape", SHAPES)
def test_empty_media_are_read(shape):
    record, *_ = shaped(shape)
    for value in (None, [], "", {}):
        read = outcome(shape, record | {"images": value, "audio": value})
        assert isinstance(read, Record)
        assert read.unread_keys == ()


def test_thinking_is_reasoning_in_both_shapes():
    for shape in ("messages", "sharegpt"):
        record, turns, _ = shaped(shape)
        turns[-1]["thinking"] = "hm"
        read = outcome(shape, record)
        assert isinstance(read, Record)
        assert read.messages[-1] == Message("assistant", "a", reasoning="hm")


def test_chat_template_kwargs_are_read_sorted_and_without_nulls():
    record, *_ = shaped("messages")
    read = outcome("messages", record | {"chat_template_kwargs": {"b": [1], "a": False, "c": None}})
    assert isinstance(read, Record)
    assert (read.template_kwargs, read.unread_keys) == ('{"a":false,"b":[1]}', ())
    for wrong in (3, {"messages": []}, {"a b": 1}, ["x"], {"tokenize": True}):
        refused = outcome("messages", record | {"chat_template_kwargs": wrong})
        assert isinstance(refused, RecordError)
        assert refused.kind == "template_kwargs"


@pytest.mark.parametrize(
    "data",
    [
        '{"messages": [], "messages": [{"role": "user", "content": "a"}]}',
        '{"messages": [{"role": "assistant", "role": "user", "content": "a"}]}',
        '{"messages": [{"role": "user", "content": "a"}], "x": {"y": 1, "\\u0079": 2}}',
        '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{\\"a\\": 1, '
        '\\"a\\": 2}"}]}]}',
        '{"messages": [{"role": "user", "content": "a"}], "tools": "[{\\"name\\": 1, \\"name\\": 2}]"}',
    ],
)
@pytest.mark.parametrize("many", [1, 300])
def test_a_repeated_key_is_an_error_at_any_depth(tmp_path, data, many):
    path = tmp_path / "a.jsonl"
    good = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    path.write_text("\n".join([good] * (many - 1) + [data]))
    faults: list[RecordError] = []
    records = list(read_records([path], shape="messages", on_error="skip", on_reject=faults.append))
    assert len(records) == many - 1
    assert [fault.line for fault in faults] == [many]
    assert "is given twice in one object" in faults[0].what


class Pairs(list[Any]):
    """A JSON object as a list of (key, value) pairs, in which a key may occur more than once."""


JSON = st.recursive(
    st.none() | st.integers() | st.sampled_from(['a"b', "{", "\\", ",", "a"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(st.tuples(st.sampled_from('abc"\\é'), inner), max_size=5).map(Pairs)
    ),
    max_leaves=20,
)


def written(value: Any) -> str:
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(key)} : {written(each)}" for key, each in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def repeats(value: Any) -> bool:
    if isinstance(value, Pairs):
        return len({key for key, _ in value}) < len(value) or any(repeats(each) for _, each in value)
    return isinstance(value, list) and any(map(repeats, value))


@given(JSON)
def test_repeated_keys_are_found_in_any_json(value):
    from chatmill.records.shapes.decode import may_repeat_key, repeated_key

    data = written(value).encode()
    assert (repeated_key(data) is not None) == repeats(value)
    assert may_repeat_key(data) or not repeats(value)


def test_many_keys_and_deep_nesting_are_left_to_the_parser():
    from chatmill.records.shapes.decode import repeated_key

    many = {str(number): {} for number in range(5000)}
    assert repeated_key(json.dumps(many).encode()) is None
    assert repeated_key(json.dumps(many)[:-1].encode() + b', "7": 1}') == "7"
    assert repeated_key(b"[" * 100 + b'{"a": 1, "a": 2}' + b"]" * 100) == "a"


def test_names_of_unread_keys_are_few_short_and_on_one_line():
    record, *_ = shaped("messages")
    read = outcome("messages", record | {f"key {number}\n{'x' * 200}": 1 for number in range(200)})
    assert isinstance(read, Record)
    assert len(read.unread_keys) == 65
    assert read.unread_keys[-1] == "(other keys)"
    assert all(len(name) < 100 and "\n" not in name for name in read.unread_keys)


@pytest.mark.parametrize("shape", ["sharegpt", "tool"])
def test_a_system_text_and_another_system_message_are_refused(shape):
    record, turns, _ = shaped(shape)
    keys = ("from", "value") if shape == "sharegpt" else ("role", "content")
    turns.insert(0, dict(zip(keys, ("system", "be brief"), strict=True)))
    once = outcome(shape, record | {"system": "be brief"})
    assert isinstance(once, Record)
    assert [message.role for message in once.messages] == ["system", "user", "assistant"]
    refused = outcome(shape, record | {"system": "be long"})
    assert isinstance(refused, RecordError)
    assert str(refused).endswith(
        'the record has a "system" text and another system message; expected only one system text'
    )
