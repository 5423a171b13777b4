from __future__ import annotations

import json

import pytest

from chatmill.errors import RecordError
from chatmill.records import Message, Record
from chatmill.records.record import record_key
from chatmill.records.shapes.messages import parse
from chatmill.records.shapes.tool_turns import sharegpt, tool

TEXT = "I'm doing very well, thank you!"
DETAIL = [
    {"begin_offset": 0, "end_offset": 8, "train": False},
    {"begin_offset": 9, "end_offset": 18, "train": True},
    {"begin_offset": 19, "end_offset": 30, "train": False},
]


def read(key: str, value: object, role: str = "assistant", content: object = TEXT, **fields: object) -> Message:
    turn = {"role": role, "content": content, key: value, **fields}
    (message,) = parse(json.loads(json.dumps({"messages": [turn]}))).messages
    return message


@pytest.mark.parametrize(
    ("given", "ranges"),
    [
        ([[0, 3, 0]], ((0, 3, 0.0),)),
        ([[4, 31], [0, 3, 0.5]], ((0, 3, 0.5), (4, 31, 1.0))),
        ([[0, 1, True], [1, 2, False]], ((0, 1, 1.0), (1, 2, 0.0))),
        ([{"start": 0, "stop": 3, "weight": 2}, {"start": 3, "stop": 4, "train": False}], ((0, 3, 2.0), (3, 4, 0.0))),
        ([], ()),
        (None, ()),
    ],
)
def test_ranges_are_read_as_start_stop_and_weight(given, ranges):
    message = read("train_ranges", given)
    assert (message.train_ranges, message.weight) == (ranges, None)
    assert Message("assistant", TEXT, train_ranges=given) == message
    assert read("train_ranges", given, train=False).weight == 0


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ([[0, 3, 0], [2, 5, 1]], "message 0 has train_ranges for characters 2 to 4, which overlap another range"),
        ([[0, 32, 0]], "message 0 has train_ranges for characters 0 to 31; the content has only 31 characters"),
        ([[3, 3, 0]], "message 0, train_ranges 0 is empty; expected 0 <= start < stop"),
        ([[-1, 3, 0]], "message 0, train_ranges 0 is empty; expected 0 <= start < stop"),
        ([[0, 3.0, 0]], "message 0, train_ranges 0: position is a number; expected an integer"),
        ([[0, True]], "message 0, train_ranges 0: position is true; expected an integer"),
        ([[0, 3, -1]], "message 0, train_ranges 0 has weight -1; expected a finite number, 0 or more"),
        ([[0, 3, None]], "message 0, train_ranges 0: weight is null"),
        ([[0, 3, "yes"]], "message 0, train_ranges 0: weight is a string"),
        ([[0, 3, 0, 0]], r"message 0, train_ranges 0 has 4 values; expected \[start, stop, weight\]"),
        ([{"start": 0}], 'message 0, train_ranges 0 has no "stop"'),
        ([{"start": 0, "stop": 1, "wieght": 2}], 'message 0, train_ranges 0 has the unknown key "wieght"'),
        ([3], "message 0, train_ranges 0 is a number"),
        ("all", "message 0: train_ranges is a string; expected a list of ranges"),
    ],
)
def test_invalid_ranges_are_refused(given, fault):
    with pytest.raises(RecordError, match=f"^{fault}"):
        read("train_ranges", given)


@pytest.mark.parametrize("role", ["user", "system", "tool"])
@pytest.mark.parametrize("key", ["train_ranges", "train_detail", "training_detail"])
def test_ranges_are_only_for_assistant_messages_with_one_text(role, key):
    value = [[0, 3, 0]] if key == "train_ranges" else DETAIL
    with pytest.raises(
        RecordError, match=f"^message 0 has {key}, but its role is {role}; expected ranges only in assistant messages$"
    ):
        read(key, value, role)
    parts = [{"type": "text", "text": TEXT}]
    with pytest.raises(
        RecordError, match=f"^message 0 has {key}, but content is a list; expected the content as a string"
    ):
        read(key, value, content=parts)


@pytest.mark.parametrize("key", ["train_detail", "training_detail"])
def test_the_example_of_axolotl_is_read_as_axolotl_reads_it(key):
    # In Axolotl, end_offset is inclusive, and characters outside all ranges are not trained on.
    assert [TEXT[a:b] for a, b, weight in read(key, DETAIL).train_ranges if weight] == [" very well"]
    assert read(key, DETAIL).train_ranges == ((0, 9, 0.0), (9, 19, 1.0), (19, 31, 0.0))
    assert read(key, DETAIL[1:2]).train_ranges == ((0, 9, 0.0), (9, 19, 1.0), (19, 31, 0.0))
    assert read(key, DETAIL[1:2], weight=0.5).train_ranges == ((0, 9, 0.0), (9, 19, 0.5), (19, 31, 0.0))
    # `train=False` overrides all ranges. A message with an empty list of ranges is trained on only with `train=True`.
    assert read(key, DETAIL, train=False) == Message("assistant", TEXT, train=False)
    assert read(key, []) == Message("assistant", TEXT, train=False)
    assert read(key, [], train=True) == Message("assistant", TEXT, train=True)


def test_invalid_axolotl_details_are_refused():
    for entry, fault in (
        (
            {"begin_offset": 0, "end_offset": 31, "train": True},
            "has train_detail for characters 0 to 31; the content has",
        ),
        ({"begin_offset": 0, "end_offset": 3}, 'train_detail 0 has no "train"'),
        ({"begin_offset": 0, "end_offset": 3, "train": 1}, "train_detail 0: train is a number"),
        ({"begin_offset": 0, "end_offset": "3", "train": True}, "train_detail 0: position is a string"),
        ([0, 3, True], "train_detail 0 is a list; expected an object with begin_offset, end_offset and train"),
    ):
        with pytest.raises(RecordError, match=fault):
            read("train_detail", [entry])
    with pytest.raises(
        RecordError, match="message 0 has both train_ranges and train_detail; expected only one of these keys"
    ):
        read("train_detail", DETAIL, train_ranges=[[0, 3, 0]])


def test_sharegpt_and_tool_turns_can_have_ranges():
    turn = {"from": "gpt", "value": TEXT, "train_detail": DETAIL}
    assert sharegpt({"conversations": [turn]}).messages == [read("train_detail", DETAIL)]
    turn = {"role": "assistant", "content": TEXT, "train_ranges": [[0, 3, 0]]}
    assert tool({"messages": [turn]}).messages == [read("train_ranges", [[0, 3, 0]])]
    with pytest.raises(RecordError, match="message 0 has train_ranges, but its role is tool"):
        tool({"messages": [{"role": "toolresult", "content": "x", "train_ranges": [[0, 1, 0]]}]})


def test_conversations_with_different_ranges_are_not_duplicates():
    records = [Record([Message("assistant", TEXT, train_ranges=each)]) for each in ((), [[0, 3, 0]], [[0, 3, 1]])]
    assert len({record_key(record) for record in records}) == 3
