from __future__ import annotations

import json
import math
import random
import sys

import pytest

from chatmill.errors import DataError, RecordError, UsageError
from chatmill.records import Message, Record, ToolCall, read_records

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(rows, **options):
        parquet.write_table(pyarrow.Table.from_pylist(rows), "a.parquet", **options)

    return write


def found(*messages: Message, id: str | None = None, line: int = 1, unread_keys: tuple[str, ...] = ()) -> Record:
    return Record(list(messages), id, source="a", file="a.parquet", line=line, unread_keys=unread_keys)


def test_rows_are_records_with_their_row_numbers(table):
    call = {"id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns = [
        {"role": "user", "content": "é", "tool_calls": None, "weight": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "weight": 0.5},
    ]
    table(
        [
            {"id": 5, "messages": turns, "embedding": b"\xff", "score": math.nan},
            {"id": None, "messages": turns[:1], "embedding": None, "score": 1.0},
        ],
        row_group_size=1,
    )
    calls, unread_keys = (ToolCall("f", '{"x":1}', "c"),), ("score", "embedding")
    answer = Message("assistant", tool_calls=calls, weight=0.5)
    assert list(read_records(["a.parquet"])) == [
        found(Message("user", "é"), answer, id="5", unread_keys=unread_keys),
        found(Message("user", "é"), line=2, unread_keys=unread_keys),
    ]


@pytest.mark.parametrize("empty", [None, []])
def test_rows_with_images_are_refused_and_rows_without_are_read(table, empty):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    images = [empty, [{"bytes": b"\x89PNG", "path": "a.png"}], empty] * 9
    table([{"messages": turns, "images": each} for each in images])
    faults: list[str] = []
    records = list(read_records(["a.parquet"], on_error="skip", on_reject=lambda fault: faults.append(str(fault))))
    assert [record.line for record in records] == [at for at in range(1, 28) if at % 3 != 2]
    assert {record.unread_keys for record in records} == {()}
    assert len(faults) == 9
    assert faults[0].startswith('a.parquet:2: the record has "images", but chatmill trains only on text; remove')


def test_bytes_are_never_read_as_text(table):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "image": {"bytes": b"\x89PNG"}}]
    for row, fault in (
        ({"text": b"abc"}, "text is bytes; expected a string"),
        ({"prompt": "q", "completion": b"a"}, "completion is bytes; expected a string or a list"),
        ({"messages": turns}, "messages is bytes; expected a list of messages"),
        ({"instruction": "q", "output": b"a"}, "output is bytes; expected a string"),
    ):
        table([row])
        with pytest.raises(RecordError, match=fault):
            list(read_records(["a.parquet"]))


def test_two_columns_with_the_same_name_are_refused(tmp_path):
    column = pyarrow.array([[{"role": "user", "content": "a"}]])
    parquet.write_table(pyarrow.Table.from_arrays([column, column], ["messages", "messages"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match='two columns named "messages"; expected each name once'):
        list(read_records([tmp_path / "a.parquet"], shape="messages"))


def test_messages_as_json_text_in_a_table(table):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    table([{"messages": json.dumps(turns), "id": "1"}])
    assert list(read_records(["a.parquet"])) == [found(Message("user", "q"), Message("assistant", "a"), id="1")]


def test_many_rows_are_read_in_order(table):
    table([{"instruction": str(index), "output": "x"} for index in range(1000)])
    expected = [found(Message("user", str(index)), Message("assistant", "x"), line=index + 1) for index in range(1000)]
    assert list(read_records(["a.parquet"])) == expected


def test_flat_trees_in_a_table(table):
    table(
        [
            {
                "message_id": "a",
                "parent_id": None,
                "message_tree_id": "t",
                "text": "q",
                "role": "prompter",
                "rank": None,
            },
            {
                "message_id": "b",
                "parent_id": "a",
                "message_tree_id": "t",
                "text": "x",
                "role": "assistant",
                "rank": 1.0,
            },
            {
                "message_id": "c",
                "parent_id": "a",
                "message_tree_id": "t",
                "text": "y",
                "role": "assistant",
                "rank": 0.0,
            },
        ]
    )
    assert list(read_records(["a.parquet"])) == [found(Message("user", "q"), Message("assistant", "y"), id="t")]


def test_a_faulty_row_names_its_number(table):
    table([{"instruction": "a", "output": "x"}, {"instruction": None, "output": "x"}])
    faults = []
    read_on = list(read_records(["a.parquet"], on_error="skip", on_reject=lambda fault: faults.append(str(fault))))
    assert read_on == [found(Message("user", "a"), Message("assistant", "x"))]
    assert faults == ["a.parquet:2: instruction is null; expected a string"]


@pytest.mark.parametrize("keep", [0, 10, 0.5])
def test_a_damaged_table_is_one_fault(table, tmp_path, keep):
    table([{"instruction": "a", "output": "x"}] * 10)
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data[: int(keep * len(data)) if keep == 0.5 else keep])
    faults = []
    assert list(read_records(["a.parquet"], on_error="skip", on_reject=lambda fault: faults.append(str(fault)))) == []
    assert faults == ["a.parquet:1: the Parquet file is corrupt; expected a whole file; copy it again"]


def test_a_damaged_table_gives_only_records_and_faults(table, tmp_path):
    turns = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "x"}]
    table([{"id": index, "messages": turns} for index in range(50)])
    whole = (tmp_path / "a.parquet").read_bytes()
    chance = random.Random(1)
    seen = set()
    for _ in range(200):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (tmp_path / "a.parquet").write_bytes(data)
        faults = []
        records = list(read_records(["a.parquet"], shape="messages", on_error="skip", on_reject=faults.append))
        assert records or faults
        seen |= {fault.kind for fault in faults}
    assert "parquet" in seen


def test_without_pyarrow_one_line_names_the_package_to_install(table, monkeypatch):
    table([{"instruction": "a", "output": "x"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError) as caught:
        read_records(["a.parquet"])
    assert str(caught.value) == "a.parquet: Parquet needs pyarrow; pip install 'chatmill[parquet]'"


def test_a_table_cannot_be_a_transcript_stream(table):
    table([{"text": "<|USER|>"}])
    with pytest.raises(UsageError) as caught:
        read_records(["a.parquet"], shape="transcript-stream")
    assert str(caught.value) == "a.parquet: a table cannot have shape transcript-stream; expected transcript-lines"
