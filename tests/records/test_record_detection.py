from __future__ import annotations

import gzip
import json

import pytest

from chatmill.errors import DataError
from chatmill.records import Message, plan

PLAIN = {"messages": [{"role": "user", "content": "q"}]}
CALLED = {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}]}
PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]}
TOOL = {"messages": [{"role": "assistant_toolcall", "name": "f", "arguments": {}}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}], "system": "s"}
ALPACA = {"instruction": "q", "input": "", "output": "a", "text": "q a"}
DOLLY = {"instruction": "q", "context": "", "response": "a", "output": None}
TREE = {"message_tree_id": "t", "prompt": {"text": "q", "role": "prompter"}}
FLAT = {"message_id": "a", "parent_id": None, "message_tree_id": "t", "text": "q", "role": "prompter"}
TEXT = {"text": "<|USER|>q<|END|>"}
HINT = (
    "set the shape with --shape: messages, sharegpt, alpaca, dolly, prompt-completion, text, tool, primer, oasst1, "
    "transcript, transcript-lines, transcript-stream"
)
COLUMNS = "or map the keys with --columns"


@pytest.fixture
def shape_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def detect(*values, name="a.jsonl", shape=None):
        lines = (value if isinstance(value, bytes) else json.dumps(value).encode() for value in values)
        (tmp_path / name).write_bytes(b"\n".join(lines))
        (part,) = plan([name], shape=shape)
        return part.shape

    return detect


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        ([PLAIN], "messages"),
        ([PLAIN, CALLED], "messages"),
        ([PARTS, PLAIN], "messages"),
        ([PLAIN, TOOL], "tool"),
        ([{**PLAIN, "system": "s"}, PLAIN], "tool"),
        ([SHAREGPT], "sharegpt"),
        ([ALPACA], "alpaca"),
        ([DOLLY], "dolly"),
        ([TREE], "oasst1"),
        ([FLAT], "oasst1"),
        ([TEXT], "transcript-lines"),
        (["<|USER|>q<|END|>"], "transcript-lines"),
        ([b"<|USER|>q<|END|>"], "transcript-lines"),
        ([b"{", {"other": 1}, b"[]", 3, ALPACA], "alpaca"),
        ([*[PLAIN] * 16, ALPACA], "messages"),
        ([*[b"{"] * 500, ALPACA], "alpaca"),
        ([{"text": "plain"}], "text"),
        ([{"text": "plain", "url": "u", "response": None}], "text"),
        ([{"message_id": "1", "parent_id": None, "text": "q", "role": "prompter", "replies": []}], "oasst1"),
        ([{"prompt": "q", "completion": "a"}], "prompt-completion"),
        ([PLAIN["messages"]], "messages"),
        ([SHAREGPT["conversations"]], "sharegpt"),
    ],
)
def test_the_shape_is_detected_from_the_records(shape_of, values, shape):
    assert shape_of(*values) == shape


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.txt"])
def test_detection_does_not_depend_on_the_kind_of_file(read_bytes, name):
    data = json.dumps([ALPACA, ALPACA] if "json" in name else ALPACA).encode()
    records, faults = read_bytes(gzip.compress(data) if name.endswith(".gz") else data, name)
    assert {tuple(record.messages) for record in records} == {(Message("user", "q"), Message("assistant", "a"))}
    assert faults == []


def test_a_text_file_is_a_transcript_unless_it_holds_objects(shape_of):
    assert shape_of(b"<|USER|>q\n<|END|>", name="a.txt") == "transcript-stream"
    assert shape_of(b"anything", name="a.txt", shape="transcript") == "transcript-lines"
    assert shape_of("<|USER|>q<|END|>", name="a.txt") == "transcript-lines"
    assert shape_of(PLAIN, name="a.txt", shape="transcript") == "transcript-lines"


def test_an_explicit_shape_is_used(shape_of):
    for shape in ("primer", "tool", "sharegpt", "transcript-stream"):
        assert shape_of(PLAIN, shape=shape) == shape


def test_files_with_only_invalid_records_are_left_to_the_reader(read_bytes):
    assert read_bytes(b"{\n3") == (
        [],
        [
            "a.jsonl:1: invalid JSON at column 2 (unexpected end); expected one JSON object",
            "a.jsonl:2: the record is a number; expected one JSON object",
        ],
    )


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            [{"a": 1, "b\n": 2}],
            f'a.jsonl: cannot detect the shape of records with the keys "a", "b\\n"; {HINT}, {COLUMNS}',
        ),
        ([{}], f"a.jsonl: cannot detect the shape of records without keys; {HINT}, {COLUMNS}"),
        (
            [{"question": "a", "answer": "b"}],
            f'a.jsonl: cannot detect the shape of records with the keys "question", "answer"; {HINT}, or map the '
            "keys: --columns prompt=question,completion=answer",
        ),
        (
            [{"system": "s", "query": "a", "response": "b", "history": []}],
            'a.jsonl: cannot detect the shape of records with the keys "system", "query", "response", "history"; '
            f"{HINT}, or map the keys: --columns instruction=query,output=response",
        ),
        (
            [{"text": "the question", "outputs": [{"text": "the answer"}]}],
            f'a.jsonl: cannot detect the shape of records with the keys "text", "outputs"; {HINT}, {COLUMNS}',
        ),
        ([{**ALPACA, "response": "b"}], f"a.jsonl: the records match the shapes alpaca and dolly; {HINT}"),
        (
            [PLAIN, b"", ALPACA],
            f"a.jsonl:3: the file has records of shapes messages or tool and alpaca; split the file, or {HINT}",
        ),
        ([TOOL, CALLED], f"a.jsonl:2: the file has records of shapes tool and messages; split the file, or {HINT}"),
    ],
)
def test_a_failed_detection_is_reported_in_one_line_that_lists_the_shapes(shape_of, values, line):
    with pytest.raises(DataError) as caught:
        shape_of(*values)
    assert str(caught.value) == line
