from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill import Message, Record, ToolCall
from chatmill.errors import RecordError
from chatmill.records.shapes import messages
from chatmill.records.shapes.decode import decode_object

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TEXT = st.text(max_size=8)
CONTENT = st.one_of(TEXT, TEXT, st.none(), st.integers(), st.lists(st.just({"type": "text", "text": "a"}), max_size=2))
CALLS = st.one_of(
    st.none(), st.just([]), st.just([CALL]), st.just([{"name": "f", "arguments": {}}]), st.just([{}]), TEXT
)
ODD = st.one_of(
    st.none(), st.none(), st.booleans(), st.integers(-1, 2), st.floats(), TEXT, st.just([]), st.just({"a": 1})
)
NULLABLE = st.none() | TEXT | st.integers()
FIELDS = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "bot"]) | ODD},
    optional={
        "content": CONTENT,
        "tool_calls": CALLS,
        "name": NULLABLE,
        "tool_call_id": NULLABLE,
        "reasoning_content": NULLABLE,
        "reasoning": NULLABLE,
        "thinking": NULLABLE,
        "train": ODD,
        "weight": ODD,
        "refusal": st.none() | TEXT,
        "audio": st.none(),
        "function_call": st.none() | st.just({"name": "f"}),
        "annotations": st.just([]),
    },
)


def outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except RecordError as fault:
        return str(fault).replace("the message", "message 0")


@given(FIELDS)
def test_the_constructor_and_the_reader_agree(fields):
    data = json.dumps({"messages": [fields]}).encode()
    read = outcome(lambda: messages.parse(decode_object(data)).messages)
    if isinstance(read, str) and read.startswith("invalid JSON"):
        # JSON has no NaN or infinity, so the constructor rejects them with a different message.
        read = outcome(lambda: [Message(**fields)])
        assert isinstance(read, str)
    elif isinstance(read, str):
        # Only the reader's errors suggest a command-line option.
        read = read.partition("; --columns")[0]
    assert outcome(lambda: [Message(**fields)]) == read
    assert outcome(lambda: Record(messages=[fields]).messages) == read


def test_an_openai_message_with_a_tool_call_is_accepted():
    dumped = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": [CALL],
    }
    assert Message(**dumped) == Message("assistant", tool_calls=(ToolCall("f", '{"a":1}', "c1"),))


def test_parts_reasoning_and_train_become_text_reasoning_and_weight():
    parts = [{"type": "text", "text": "2 + 2 "}, {"type": "text", "text": "is 4"}]
    for key in ("reasoning_content", "reasoning", "thinking"):
        message = Message(role="assistant", content=parts, train=False, **{key: "I add."})
        assert message == Message("assistant", "2 + 2 is 4", "I add.", weight=0.0)


def test_an_invalid_message_is_reported_in_one_line():
    for fields, fault in (
        ({"role": "bot", "content": "x"}, 'the message has role "bot"; expected system, user, assistant or tool'),
        ({"role": "user"}, "the message has no content; expected a string or a list of text parts"),
        (
            {"role": "user", "content": "x", "wieght": 0},
            'the message has the unknown key "wieght"; expected only role, ',
        ),
        (
            {"role": "user", "content": object()},
            "the message: content is a Python object; expected a string or a list",
        ),
    ):
        with pytest.raises(RecordError) as refused:
            Message(**fields)
        assert str(refused.value).startswith(fault)
    with pytest.raises(TypeError, match="at most once"):
        Message("user", "x", role="user")


def test_a_record_accepts_messages_dicts_and_tool_definitions():
    hello = {"role": "user", "content": "Hi"}
    record = Record((hello, Message("assistant", "Hello")), id=7, tools=[{"name": "f"}])
    assert record == Record([Message(**hello), Message("assistant", "Hello")], "7", ('{"name":"f"}',))
    assert Record([]).messages == []
    for turns, fault in (
        ([hello, "Hello"], "message 1 is a string; expected an object"),
        (
            "Hi",
            '"messages" is a string that is not JSON: invalid JSON at column 1 (invalid character); '
            "expected a list of messages, or a list as JSON text",
        ),
    ):
        with pytest.raises(RecordError) as refused:
            Record(turns)
        assert str(refused.value) == fault


def test_messages_compare_and_hash_by_value():
    message = Message("assistant", "x", complete=False)
    assert not message.complete
    assert copy.deepcopy(message) == message == msgspec.structs.replace(message)
    assert len({message, Message("assistant", "x", complete=False), Message("assistant", "x")}) == 2
