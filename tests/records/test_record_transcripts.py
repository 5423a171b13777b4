"""Transcripts: exact text, incomplete spans, a record a line or one stream a file."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.records import Message, Record, read_records
from chatmill.records.units import conversations

LINE = b"<|USER|> hi <|END|> <|ASSISTANT|> yo <|END|>"
EXCHANGE = [Message("user", " hi "), Message("assistant", " yo ")]


def found(*conversations: tuple[int, list[Message]], file: str = "a.txt") -> list[Record]:
    return [Record(turns, source="a", file=file, line=line) for line, turns in conversations]


def test_a_record_a_line_in_three_spellings(read_bytes):
    data = LINE + b'\r\n\n"<|USER|>a\\nb<|END|>"\n{"text": "<|SYSTEM|>s<|END|><|EOS|><|USER|>q<|END|>"}\n' + LINE
    expected = found(
        (1, EXCHANGE),
        (3, [Message("user", "a\nb")]),
        (4, [Message("system", "s")]),
        (4, [Message("user", "q")]),
        (5, EXCHANGE),
    )
    assert read_bytes(data, "a.txt") == (expected, [])


def test_the_id_of_an_object_names_each_of_its_conversations(read_bytes):
    data = b'{"text": "<|USER|>a<|END|><|EOS|><|USER|>b<|END|>", "id": 5}'
    records, _ = read_bytes(data)
    assert [record.id for record in records] == ["5", "5"]


def test_a_stream_is_cut_at_eos_and_says_where_each_conversation_begins(read_bytes):
    data = b"\n<|USER|> hi <|END|>\n<|ASSISTANT|> yo <|END|>\n<|EOS|>\n\n  <|USER|>\r\nx\n<|END|><|EOS|> <|EOS|>" + LINE
    expected = found((2, EXCHANGE), (6, [Message("user", "\r\nx\n")]), (8, EXCHANGE))
    assert read_bytes(data, "a.txt") == (expected, [])


@pytest.mark.parametrize("shape", ["transcript-lines", "transcript-stream"])
def test_a_span_without_its_end_is_kept_as_incomplete(read_bytes, shape):
    data = b"<|SYSTEM|>s<|USER|>u <|END|><|ASSISTANT|>a<|EOS|><|USER|> open "
    expected = found(
        (1, [Message("system", "s", complete=False), Message("user", "u "), Message("assistant", "a", complete=False)]),
        (1, [Message("user", " open ", complete=False)]),
    )
    assert read_bytes(data, "a.txt", shape=shape) == (expected, [])


def test_whether_lines_are_records_is_told_from_the_first_line(read_bytes):
    stream = b"<|USER|>a<|END|>\n<|ASSISTANT|>b<|END|>\n"
    whole = [Message("user", "a"), Message("assistant", "b")]
    assert read_bytes(stream, "a.txt") == (found((1, whole)), [])
    assert read_bytes(stream, "a.txt", shape="transcript") == (found((1, whole)), [])
    assert read_bytes(stream, "a.txt", shape="transcript-lines") == (found((1, whole[:1]), (2, whole[1:])), [])
    lines = b"\n" + LINE + b"\n" + LINE
    assert read_bytes(lines, "a.txt") == (found((2, EXCHANGE), (3, EXCHANGE)), [])
    joined = found((2, EXCHANGE + EXCHANGE))
    assert read_bytes(lines, "a.txt", shape="transcript-stream") == (joined, [])
    unanswered = b"<|USER|>a<|ASSISTANT|>b<|USER|>c<|END|>\n<|ASSISTANT|>d<|END|>"
    assert len(read_bytes(unanswered, "a.txt")[0]) == 1


def test_a_fault_in_a_stream_costs_one_conversation(read_bytes):
    data = b"junk " + LINE + b"<|EOS|>\n" + LINE + b"<|END|>\n<|EOS|>\xff<|EOS|><|USER|>\0<|EOS|>" + LINE
    right = "expected <|SYSTEM|>, <|USER|> or <|ASSISTANT|> before it"
    assert read_bytes(data, "a.txt", shape="transcript-stream") == (
        found((3, EXCHANGE)),
        [
            f'a.txt:1: "junk" after 0 spans is outside of every span; {right}',
            f"a.txt:2: <|END|> after 2 spans closes nothing; {right}",
            "a.txt:3: not UTF-8 at column 1 (byte 0xff); expected UTF-8 text",
            "a.txt:3: a NUL byte at column 9; expected text without NUL bytes",
        ],
    )


@pytest.mark.parametrize("data", [b'""', b'{"text": " "}', b'"<|EOS|>"'])
def test_a_json_transcript_without_spans_is_a_fault(read_bytes, data):
    line = "a.jsonl:1: the transcript has no spans; expected <|SYSTEM|>, <|USER|> or <|ASSISTANT|>"
    assert read_bytes(data, shape="transcript") == ([], [line])


def test_a_conversation_over_the_limit_is_one_fault_and_is_not_held(read_bytes):
    data = LINE + b"<|EOS|>\n<|USER|>" + b"x\n" * 500_000 + b"<|END|><|EOS|>" + LINE
    records, faults = read_bytes(data, "a.txt", shape="transcript-stream", max_line_bytes=100)
    assert records == found((1, EXCHANGE), (500_002, EXCHANGE))
    assert faults == ["a.txt:2: the record is longer than 100 bytes; expected at most that, or a higher limit"]


@given(st.lists(st.sampled_from([b"<|EOS|>", b"<|", b"EOS", b"|>", b"\n", b" ", b"ab"]), max_size=12), st.data())
def test_the_size_of_what_is_read_at_once_changes_nothing(tmp_path_factory, parts, data):
    path = tmp_path_factory.mktemp("stream") / "a.txt"
    path.write_bytes(b"".join(parts))
    limit = data.draw(st.sampled_from([3, 1000]))
    pieces = b"".join(parts).split(b"<|EOS|>")
    expected = [piece.strip()[:limit] for piece in pieces if piece.strip()] if limit == 1000 else None
    found = list(conversations(path, limit=limit))
    for chunk in (1, 2, 5):
        assert list(conversations(path, limit=limit, chunk=chunk)) == found
    if expected is not None:
        assert [text.strip() for _, text in found] == expected


TEXT = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<|" not in text)
SPAN = st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXT, st.booleans())


@given(st.lists(st.lists(SPAN, min_size=1, max_size=4), min_size=1, max_size=4))
def test_any_text_comes_back_exactly_from_a_json_string(tmp_path_factory, conversations):
    text = "<|EOS|>".join(
        "".join(f"<|{role.upper()}|>{said}" + ("<|END|>" if closed else "") for role, said, closed in turns)
        for turns in conversations
    )
    path = tmp_path_factory.mktemp("exact") / "a.txt"
    path.write_text(json.dumps(text), encoding="utf-8")
    expected = [[Message(role, said, complete=closed) for role, said, closed in turns] for turns in conversations]
    assert [record.messages for record in read_records([path])] == expected
