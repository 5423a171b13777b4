from __future__ import annotations

import json
import pickle

import pytest

from chatmill.errors import RecordError
from chatmill.records import read_records

ROLES = "expected system, user, assistant or tool"
PARTS = "expected a string or a list of text parts"
JSON = "expected one JSON object"
OBJECT = "expected a JSON object"
SPANS = "expected <|SYSTEM|>, <|USER|> or <|ASSISTANT|> before it"

BYTES = [
    (b'{"messages', f"invalid JSON at column 11 (unexpected end); {JSON}"),
    (b'{"m\xc3\xa9": [}', f"invalid JSON at column 9 (invalid character); {JSON}"),
    (b"<|USER|>", f"invalid JSON at column 1 (invalid character); {JSON}"),
    (b'{"a": 1,}', f"invalid JSON at column 9 (trailing comma in object); {JSON}"),
    (b'{"a": 1} {}', f"invalid JSON at column 10 (trailing characters); {JSON}"),
    (b'{"a": NaN}', f"invalid JSON at column 7 (invalid character); {JSON}"),
    (b'{"a": "tab\there"}', f"invalid JSON at column 11 (invalid character); {JSON}"),
    (b'{"a": 1e999}', "a number is out of range; expected numbers that fit in a double"),
    (b'{"a": "\xc3\xa9\xff"}', "not UTF-8 at column 9 (byte 0xff); expected UTF-8 text"),
    (b'{"a": "\xed\xa0\x80"}', "not UTF-8 at column 8 (byte 0xed); expected UTF-8 text"),
    (b'{"a": "x\0"}', "a NUL byte at column 9; expected text without NUL bytes"),
    (b'{"a": "\\ud800"}', "unpaired surrogate at column 8; expected a surrogate pair, or the character itself"),
    (b'{"a": "\\\\\\udc00"}', "unpaired surrogate at column 10; expected a surrogate pair, or the character itself"),
    (
        b'{"a": "\\ud800\\ud83d\\ude00"}',
        "unpaired surrogate at column 8; expected a surrogate pair, or the character itself",
    ),
    # Python 3.11 allows 1,000 levels of nesting; since Python 3.12, compiled code may use 10,000 levels.
    (b'{"a":' * 100_000, "the record is nested too deeply; expected fewer levels"),
    (b"[" * 100_000 + b"]" * 100_000, "the record is nested too deeply; expected fewer levels"),
    (b"3", f"the record is a number; {JSON}"),
    (b'"text"', f"the record is a string; {JSON}"),
    (b"[[3]]", f"the record is a list; {JSON}"),
    (b"null", f"the record is null; {JSON}"),
]


def turn(**fields):
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **fields}]}


def call(**fields):
    return turn(tool_calls=[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}, **fields}])


RECORDS = {
    "messages": [
        ({}, 'the record has no "messages"; expected this key (found: none)'),
        ({"a\n": 1, "b": 2}, 'the record has no "messages"; expected this key (found: "a\\n", "b")'),
        ({"messages": {}}, "messages is an object; expected a list of messages"),
        ({"messages": []}, "messages is an empty list; expected at least one message"),
        ({"messages": [{}, "x"]}, "message 1 is a string; expected an object"),
        ({"messages": [{}]}, f"message 0 has no role; {ROLES}"),
        (turn(role="bot"), f'message 1 has role "bot"; {ROLES}; --columns assistant=bot maps this role'),
        (turn(role="User"), f'message 1 has role "User"; {ROLES}; --columns user=User maps this role'),
        (turn(role="a b"), f"message 1 has role \"a b\"; {ROLES}; --columns maps other roles, such as 'user=a b'"),
        (turn(role="a,b"), f'message 1 has role "a,b"; {ROLES}'),
        (turn(role="x" * 100), f'message 1 has role "{"x" * 80}…"; {ROLES}'),
        (turn(role=None), f"message 1: role is null; {ROLES}"),
        (turn(content=3), f"message 1: content is a number; {PARTS}"),
        (turn(content=None), f"message 1: content is null; {PARTS}"),
        (turn(content={"a": 1}), f"message 1: content is an object; {PARTS}"),
        ({"messages": [{"role": "user"}]}, f"message 0 has no content; {PARTS}"),
        (
            turn(content=["x"]),
            'message 1, part 0 is a string; expected {"type": "text", "text": …}, or the types reasoning and tool_call',
        ),
        (
            turn(content=[{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "u"}]),
            'message 1, part 1 has type "image_url"; chatmill trains only on text; remove the record',
        ),
        (
            turn(content=[{"text": "a"}]),
            'message 1, part 0 has no type; expected {"type": "text", "text": …}, or the types reasoning and tool_call',
        ),
        (turn(content=[{"type": "text", "text": 1}]), "message 1, part 0: text is a number; expected a string"),
        (turn(name=3), "message 1: name is a number; expected a string"),
        (turn(tool_call_id=[]), "message 1: tool_call_id is a list; expected a string"),
        (turn(reasoning_content=1), "message 1: reasoning_content is a number; expected a string"),
        (
            turn(reasoning_content="a", reasoning="b"),
            "message 1 has reasoning under two keys, with different texts; expected reasoning under only one key",
        ),
        (
            turn(role="user", reasoning="b"),
            "message 1 has reasoning, but its role is user; expected reasoning only in assistant messages",
        ),
        (turn(train=1), "message 1: train is a number; expected true or false"),
        (turn(weight="1"), "message 1: weight is a string; expected a number, 0 or more"),
        (turn(weight=True), "message 1: weight is true; expected a number, 0 or more"),
        (turn(weight=-0.5), "message 1 has weight -0.5; expected a finite number, 0 or more"),
        (turn(weight=1e-46), "message 1 has weight 1e-46; expected 0 instead"),
        (turn(weight=1e39), "message 1 has weight 1e+39; expected a finite number, 0 or more"),
        (turn(weight=0, train=False), "message 1 has both train and weight; expected only one of these keys"),
        (
            turn(role="tool", train=True),
            "message 1 is a tool result with a weight above 0; expected no weight, or train: false",
        ),
        (
            turn(role="tool", weight=0.5),
            "message 1 is a tool result with a weight above 0; expected no weight, or train: false",
        ),
        (turn(function_call={"name": "f"}), 'message 1 has a "function_call"; expected tool_calls'),
        (turn(refusal="no"), 'message 1 has a "refusal"; expected the text of the refusal as content'),
        (
            turn(audio={"id": "x"}),
            'message 1 has "audio", but chatmill trains only on text; remove the record or the key',
        ),
        (turn(tool_calls={}), "message 1: tool_calls is an object; expected a list"),
        (turn(tool_calls=["f"]), "message 1, tool call 0 is a string; expected an object with name and arguments"),
        (
            turn(role="user", tool_calls=[{"name": "f", "arguments": {}}]),
            "message 1 has tool_calls, but its role is user; expected tool_calls only in assistant messages",
        ),
        (call(type="custom"), 'message 1, tool call 1 has type "custom"; expected "function"'),
        (call(id=1), "message 1, tool call 1: id is a number; expected a string"),
        (call(name=None), "message 1, tool call 1: name is null; expected a string"),
        (
            call(function={"name": "f"}),
            'message 1, tool call 1 has no "arguments"; expected this key (found: "name")',
        ),
        (
            call(arguments="{x"),
            "message 1, tool call 1 has arguments that are not JSON: "
            f"invalid JSON at column 2 (object keys must be strings); {OBJECT}",
        ),
        (
            call(arguments=""),
            "message 1, tool call 1 has arguments that are not JSON: "
            f"invalid JSON at column 1 (unexpected end); {OBJECT}",
        ),
        (call(arguments="[]"), f"message 1, tool call 1: arguments is a list; {OBJECT}"),
        (call(arguments=1), f"message 1, tool call 1: arguments is a number; {OBJECT}"),
        ({**turn(), "id": 1.5}, "id is a number; expected a string or an integer"),
        ({**turn(), "id": True}, "id is true; expected a string or an integer"),
        (
            {**turn(), "tools": "x"},
            "tools is not JSON: invalid JSON at column 1 (invalid character); expected a list of tool definitions",
        ),
        ({**turn(), "tools": {}}, "tools is an object; expected a list of tool definitions"),
        ({**turn(), "tools": [{}, 1]}, "tool 1 is a number; expected an object"),
        (
            {**turn(), "system": "s"},
            'the record has a "system"; expected the system text as the first message, or shape "tool"',
        ),
        ({**turn(), "functions": []}, 'the record has a "functions"; expected the keys tools and tool_calls instead'),
    ],
    "sharegpt": [
        ({}, 'the record has no "conversations"; expected this key (found: none)'),
        (
            {"conversations": [{"from": "bing", "value": "x"}]},
            'message 0 has from "bing"; '
            "expected system, human, gpt, function_call, observation, user, assistant or tool; "
            "--columns maps other roles, such as user=bing",
        ),
        ({"conversations": [{"from": "gpt"}]}, 'message 0 has no "value"; expected this key (found: "from")'),
        ({"conversations": [{"from": "gpt", "value": 1}]}, "message 0: value is a number; expected a string"),
        (
            {"conversations": [{"from": "function_call", "value": "get(x)"}]},
            "message 0 has a function_call that is not JSON: invalid JSON at column 1 (invalid character); "
            "expected an object with name and arguments",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "[]"}]},
            "message 0: function_call is an empty list; expected at least one call",
        ),
        (
            {"conversations": [{"from": "function_call", "value": '[{"name": "f"}]'}]},
            'message 0, tool call 0 has no "arguments"; expected this key (found: "name")',
        ),
        (
            {"conversations": [{"from": "observation", "value": "1", "weight": 1}]},
            "message 0 is a tool result with a weight above 0; expected no weight, or train: false",
        ),
        (
            {"conversations": [{"from": "gpt", "value": ""}], "system": 1},
            "system is a number; expected a string",
        ),
    ],
    "alpaca": [
        ({"output": "x"}, 'the record has no "instruction"; expected this key (found: "output")'),
        ({"instruction": "x", "output": None}, "output is null; expected a string"),
        ({"instruction": "x", "input": 3, "output": ""}, "input is a number; expected a string"),
        (
            {"instruction": "x", "output": "", "history": "a"},
            "history is a string; expected a list of [question, answer]",
        ),
        (
            {"instruction": "x", "output": "", "history": [["a", "b"], ["a"]]},
            "history 1 is not a pair of strings; expected a list of [question, answer]",
        ),
    ],
    "dolly": [
        (
            {"instruction": "x", "output": "y"},
            'the record has no "response"; expected this key (found: "instruction", "output")',
        ),
        ({"instruction": "x", "context": [], "response": ""}, "context is a list; expected a string"),
    ],
    "oasst1": [
        (
            {"text": "x"},
            "the record is neither a message tree nor a message of a tree; "
            'expected "prompt", "replies", or the strings "message_id" and "message_tree_id"',
        ),
        ({"prompt": 3}, "the prompt is a number; expected a message object"),
        ({"prompt": {"role": "user", "text": "x"}}, 'message 0 has role "user"; expected prompter or assistant'),
        ({"prompt": {"role": "prompter", "text": None}}, "message 0: text is null; expected a string"),
        ({"prompt": {"deleted": True}}, "the prompt of the tree is deleted; expected a prompt that is not deleted"),
        ({"prompt": {"deleted": 1}}, "the prompt: deleted is a number; expected true or false"),
        (
            {"prompt": {"role": "prompter", "text": "x", "replies": {"a": 1}}},
            "message 0: replies is an object; expected a list of messages",
        ),
        (
            {"prompt": {"role": "prompter", "text": "x", "replies": [{"rank": "1"}]}},
            "a reply to message 0: rank is a string; expected a number",
        ),
    ],
    "tool": [
        (
            turn(role="tool"),
            'message 1 has role "tool"; expected system, user, assistant, assistant_toolcall or toolresult',
        ),
        (turn(content=None), "message 1: content is null; expected a string"),
        (turn(role="assistant_toolcall"), 'message 1 has no "name"; expected this key (found: "role", "content")'),
        (
            turn(role="assistant_toolcall", name="f", arguments="1"),
            f"message 1: arguments is a number; {OBJECT}",
        ),
        ({"messages": [{"role": "toolresult"}]}, 'message 0 has no "content"; expected this key (found: "role")'),
        (turn(tool_calls=[]), 'message 1 has a "tool_calls"; expected a turn of role "assistant_toolcall"'),
        (
            {"messages": [{"role": "toolresult", "content": 1, "train": True}]},
            "message 0 is a tool result with a weight above 0; expected no weight, or train: false",
        ),
    ],
    "primer": [
        (turn(name=None), 'message 1 has the unknown key "name"; expected only role and content'),
        ({**turn(), "x": 1, "y": 1}, 'the record has the unknown keys "x", "y"; expected only messages'),
        (turn(role="tool"), 'message 1 has role "tool"; expected system, user or assistant'),
        (turn(content=[]), "message 1: content is a list; expected a string"),
        ({"messages": [{"role": "user"}]}, 'message 0 has no "content"; expected this key (found: "role")'),
        ({"messages": []}, "messages is an empty list; expected at least one message"),
    ],
    "transcript": [
        ({"id": 4}, 'the record has no "text"; expected this key (found: "id")'),
        ({"text": 4}, "text is a number; expected a string"),
    ],
}


@pytest.mark.parametrize(("data", "line"), BYTES)
def test_bytes_that_are_not_a_record(read_bytes, data, line):
    assert read_bytes(data, shape="messages") == ([], [f"a.jsonl:1: {line}"])


@pytest.mark.parametrize(("shape", "value", "line"), [(shape, *row) for shape, rows in RECORDS.items() for row in rows])
def test_errors_of_invalid_records(read_bytes, shape, value, line):
    name = f" (id={value['id']})" if isinstance(value.get("id"), int) and value["id"] is not True else ""
    assert read_bytes(json.dumps(value).encode(), shape=shape) == ([], [f"a.jsonl:1{name}: {line}"])


def test_a_fault_in_a_record_of_several_lines_names_the_line(read_bytes):
    data = b'[\n {"a":\n  [1,\n  x]}\n]'
    line = f"invalid JSON at column 3 of line 3 of the record (invalid character); {JSON}"
    assert read_bytes(data, "a.json", shape="messages") == ([], [f"a.json:2: {line}"])


def test_the_error_contains_the_id_of_the_record_on_one_line(read_bytes):
    _, faults = read_bytes(b'{"id": "a\\nb", "messages": 1}', shape="messages")
    assert faults == ["a.jsonl:1 (id=a\\nb): messages is a number; expected a list of messages"]


def test_the_first_fault_is_raised_after_all_earlier_records(tmp_path):
    path = tmp_path / "a.jsonl"
    good = b'{"messages": [{"role": "user", "content": "q"}]}\n'
    path.write_bytes(good + b'{"id": 8, "messages": []}\n' + b"{\n")
    records = read_records([path])
    assert next(records).line == 1
    with pytest.raises(RecordError) as caught:
        next(records)
    fault = caught.value
    assert (fault.file, fault.line, fault.id, fault.kind) == (str(path), 2, "8", "empty")
    assert fault.raw == b'{"id": 8, "messages": []}'


def test_a_fault_can_be_pickled_between_processes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": 8, "messages": []}\n')
    with pytest.raises(RecordError) as caught:
        list(read_records([path], shape="messages"))
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert (str(again), vars(again)) == (str(caught.value), vars(caught.value))
