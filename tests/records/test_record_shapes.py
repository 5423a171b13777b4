from __future__ import annotations

import json
from typing import Any

import pytest

from chatmill.records import SHAPES, Message, Record, ToolCall
from chatmill.records.record import Role


def record(
    *messages: Message, id: str | None = None, tools: tuple[str, ...] = (), line: int = 1, **others: Any
) -> Record:
    return Record(list(messages), id, tools, source="a", file="a.jsonl", line=line, **others)


@pytest.fixture
def one(read_bytes):
    def read_values(shape, *values):
        records, faults = read_bytes("\n".join(json.dumps(value) for value in values).encode(), shape=shape)
        assert faults == []
        return records

    return read_values


def user(content: str) -> Message:
    return Message("user", content)


def assistant(content: str) -> Message:
    return Message("assistant", content)


def test_the_list_of_shapes():
    assert (
        *("messages", "sharegpt", "alpaca", "dolly", "prompt-completion", "text", "tool", "primer", "oasst1"),
        *("transcript", "transcript-lines", "transcript-stream"),
    ) == SHAPES


def test_messages_with_plain_texts(one):
    turns = [{"role": role, "content": f"é {role}"} for role in ("system", "user", "assistant", "tool")]
    roles: tuple[Role, ...] = ("system", "user", "assistant", "tool")
    messages = [Message(role, f"é {role}") for role in roles]
    found = one("messages", {"messages": turns}, {"id": 7, "messages": turns}, {"messages": turns, "id": "x"})
    assert found == [
        record(*messages),
        record(*messages, id="7", line=2),
        record(*messages, id="x", line=3),
    ]


def test_messages_with_every_field(one):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": "é\\u00e9"}'}}
    flat = {"name": "g", "arguments": {"z": [1.5, None], "a": {}}}
    turns = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "q", "name": "ann", "other": 1},
        {"role": "assistant", "content": None, "tool_calls": [call, flat], "reasoning_content": "hm"},
        {"role": "tool", "content": "4", "tool_call_id": "c1", "train": False},
        {"role": "assistant", "content": "4", "reasoning": "so", "refusal": None, "weight": 2},
        {"role": "assistant", "content": "5", "train": True, "tool_calls": []},
        {"role": "assistant", "content": "6", "weight": 0.25},
    ]
    tool = {"type": "function", "function": {"name": "f", "description": "ü"}}
    found = one("messages", {"messages": turns, "tools": [tool]})
    calls = (
        ToolCall("f", '{"b":1,"a":"éé"}', "c1", '{"b": 1, "a": "é\\u00e9"}'),
        ToolCall("g", '{"z":[1.5,null],"a":{}}'),
    )
    assert found == [
        record(
            Message("system", "be brief"),
            Message("user", "q", name="ann"),
            Message("assistant", "", reasoning="hm", tool_calls=calls),
            Message("tool", "4", tool_call_id="c1", weight=0.0),
            Message("assistant", "4", reasoning="so", weight=2.0),
            Message("assistant", "5", weight=1.0),
            Message("assistant", "6", weight=0.25),
            tools=('{"type":"function","function":{"name":"f","description":"ü"}}',),
            unread_keys=("messages[].other",),
        )
    ]


def test_numbers_in_arguments_keep_their_digits(one):
    call = {"name": "f", "arguments": '{"big": 123456789012345678901234567890, "small": 1e-7, "int": -0}'}
    (found,) = one("messages", {"messages": [{"role": "assistant", "tool_calls": [call]}]})
    compact = '{"big":123456789012345678901234567890,"small":1e-7,"int":0}'
    calls = (ToolCall("f", compact, raw_arguments=call["arguments"]),)
    assert found == record(Message("assistant", tool_calls=calls))


def test_an_escaped_nul_is_valid_json(read_bytes):
    data = b'{"messages": [{"role": "user", "content": "a\\u0000b"}]}'
    assert read_bytes(data, shape="messages") == ([record(user("a\0b"))], [])


def test_sharegpt_with_calls_and_observations(one):
    calls = '[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": "{}"}]'
    turns = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"ж": "é"}}'},
        {"from": "observation", "value": '{"y": 2}'},
        {"from": "gpt", "value": "ok", "weight": 0},
        {"from": "user", "value": "more"},
        {"from": "function_call", "value": calls},
        {"from": "tool", "value": "r"},
        {"from": "assistant", "value": "done"},
    ]
    tools = '[{"name": "f", "parameters": {"type": "object"}}]'
    found = one("sharegpt", {"conversations": turns, "system": "be brief", "tools": tools, "id": "s1"})
    assert found == [
        record(
            Message("system", "be brief"),
            user("hi"),
            Message("assistant", tool_calls=(ToolCall("f", '{"ж":"é"}'),)),
            Message("tool", '{"y": 2}'),
            Message("assistant", "ok", weight=0.0),
            user("more"),
            Message("assistant", tool_calls=(ToolCall("f", '{"x":1}'), ToolCall("g", "{}"))),
            Message("tool", "r"),
            assistant("done"),
            id="s1",
            tools=('{"name":"f","parameters":{"type":"object"}}',),
        )
    ]


def test_sharegpt_with_a_system_turn_and_no_tools(one):
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}]
    found = one("sharegpt", {"conversations": turns, "system": "", "tools": ""})
    assert found == [record(Message("system", "s"), user("q"))]


def test_alpaca_joins_input_below_the_instruction(one):
    found = one(
        "alpaca",
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Greet.", "input": "", "output": "hi", "system": "s", "history": [["a", "b"], ["c", "d"]]},
        {"instruction": "Greet.", "output": "hi", "input": None, "system": None, "history": None, "id": 3},
        {"instruction": "", "input": "only this", "output": "ok"},
    )
    assert found == [
        record(user("Add.\n\n1 2"), assistant("3")),
        record(
            *(Message("system", "s"), user("a"), assistant("b"), user("c"), assistant("d")),
            *(user("Greet."), assistant("hi")),
            line=2,
        ),
        record(user("Greet."), assistant("hi"), id="3", line=3),
        record(user("only this"), assistant("ok"), line=4),
    ]


def test_dolly_joins_context_below_the_instruction(one):
    found = one(
        "dolly",
        {"instruction": "Who?", "context": "Ann came.", "response": "Ann", "category": "closed_qa"},
        {"instruction": "Who?", "context": "", "response": "?", "category": 1},
    )
    assert found == [
        record(user("Who?\n\nAnn came."), assistant("Ann"), unread_keys=("category",)),
        record(user("Who?"), assistant("?"), line=2, unread_keys=("category",)),
    ]


def test_tool_turns(one):
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant_toolcall", "name": "f", "arguments": {"b": 1, "a": "é"}},
        {"role": "toolresult", "content": {"b": [1, "é"]}, "name": "f"},
        {"role": "assistant_toolcall", "name": "g", "arguments": '{"x": 2}', "id": "c2", "content": "wait"},
        {"role": "toolresult", "content": "text", "tool_call_id": "c2"},
        {"role": "assistant", "content": "done", "train": False},
    ]
    assert one("tool", {"system": "s", "messages": turns, "id": "t"}, {"messages": turns[:1]}) == [
        record(
            Message("system", "s"),
            user("q"),
            Message("assistant", tool_calls=(ToolCall("f", '{"b":1,"a":"é"}'),)),
            Message("tool", '{"b":[1,"é"]}', name="f"),
            Message("assistant", "wait", tool_calls=(ToolCall("g", '{"x":2}', "c2"),)),
            Message("tool", "text", tool_call_id="c2"),
            Message("assistant", "done", weight=0.0),
            id="t",
        ),
        record(user("q"), line=2),
    ]


def test_primer(one):
    turns = [{"role": role, "content": ""} for role in ("assistant", "system", "user")]
    assert one("primer", {"messages": turns}) == [record(assistant(""), Message("system", ""), user(""))]
