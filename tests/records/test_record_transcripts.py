from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import DataError
from chatmill.records import Message, Record, read_records
from chatmill.records.record import new_message
from chatmill.records.transcript_layout import transcript_layout
from chatmill.records.units import conversations


def outside(text: str, *, end: bool = False) -> Message:
    """Return a message for text outside spans; with `end`, an unmatched end marker follows the text."""
    return new_message("none", text, complete=end)


LINE = b"<|USER|> hi <|END|><|ASSISTANT|> yo <|END|>"
EXCHANGE = [Message("user", " hi "), Message("assistant", " yo ")]
SPACED = [EXCHANGE[0], outside("\n"), EXCHANGE[1]]


def found(*conversations: tuple[int, list[Message]], file: str = "a.txt") -> list[Record]:
    return [Record(turns, source="a", file=file, line=line) for line, turns in conversations]


def test_one_record_per_line_in_three_notations(read_bytes):
    data = LINE + b'\r\n\n"<|USER|>a\\nb<|END|>"\n{"text": "<|SYSTEM|>s<|END|><|EOS|><|USER|>q<|END|>"}\n' + LINE
    expected = found(
        (1, EXCHANGE),
        (3, [Message("user", "a\nb")]),
        (4, [Message("system", "s")]),
        (4, [Message("user", "q")]),
        (5, EXCHANGE),
    )
    assert read_bytes(data, "a.txt") == (expected, [])


def test_all_conversations_of_an_object_have_its_id(read_bytes):
    data = b'{"text": "<|USER|>a<|END|><|EOS|><|USER|>b<|END|>", "id": 5}'
    records, _ = read_bytes(data)
    assert [record.id for record in records] == ["5", "5"]


def test_a_stream_is_split_at_eos_and_each_conversation_has_its_first_line(read_bytes):
    data = b"\n<|USER|> hi <|END|>\n<|ASSISTANT|> yo <|END|>\n<|EOS|>\n\n  <|USER|>\r\nx\n<|END|><|EOS|> <|EOS|>" + LINE
    expected = found((2, SPACED), (6, [Message("user", "\r\nx\n")]), (8, EXCHANGE))
    assert read_bytes(data, "a.txt") == (expected, [])


@pytest.mark.parametrize("shape", ["transcript-lines", "transcript-stream"])
def test_a_span_without_its_end_is_kept_as_incomplete(read_bytes, shape):
    data = b"<|SYSTEM|>s<|USER|>u <|END|><|ASSISTANT|>a<|EOS|><|USER|> open "
    expected = found(
        (1, [Message("system", "s", complete=False), Message("user", "u "), Message("assistant", "a", complete=False)]),
        (1, [Message("user", " open ", complete=False)]),
    )
    assert read_bytes(data, "a.txt", shape=shape) == (expected, [])


@pytest.mark.parametrize("form", ["line", "string", "object"])
def test_text_outside_spans_is_kept_in_order(read_bytes, form):
    text = "junk <|USER|>u<|END|> \t<|ASSISTANT|>a<|END|><|END|> x <|END|><|USER|>v<|END|>y"
    data = {"line": text, "string": json.dumps(text), "object": json.dumps({"text": text})}[form].encode()
    turns = [
        outside("junk "),
        Message("user", "u"),
        outside(" \t"),
        Message("assistant", "a"),
        outside("", end=True),
        outside(" x ", end=True),
        Message("user", "v"),
        outside("y"),
    ]
    assert read_bytes(data, "a.txt", shape="transcript-lines") == (found((1, turns)), [])


def test_a_record_without_markers_is_read_as_text_outside_spans(read_bytes):
    records = found((1, [outside("no markers")]), (2, [outside("nor here")]), (3, EXCHANGE))
    assert read_bytes(b'no markers\n{"text": "nor here"}\n' + LINE, "a.txt", shape="transcript") == (records, [])


@pytest.mark.parametrize(("data", "what"), [(b"-1", "a number"), (b'["x"]', "a list"), (b"null", "null")])
def test_json_that_is_not_text_is_an_error(read_bytes, data, what):
    line = f'a.txt:1: the record is {what}; expected text, a string, or an object with "text"'
    assert read_bytes(data, "a.txt", shape="transcript-lines") == ([], [line])


def test_whitespace_around_a_conversation_is_layout_in_text_and_kept_in_json(read_bytes):
    data = b"  <|USER|> u <|END|> \n" + json.dumps(" <|USER|> u <|END|>\n<|EOS|>\n<|USER|>v").encode()
    u = Message("user", " u ")
    expected = [(1, [u]), (2, [outside(" "), u, outside("\n")])]
    expected += [(2, [outside("\n"), Message("user", "v", complete=False)])]
    assert read_bytes(data, "a.txt", shape="transcript-lines") == (found(*expected), [])


def test_a_file_that_reads_the_same_in_both_layouts_is_accepted(read_bytes):
    for data in (LINE + b"<|EOS|>\n" + LINE + b" <|EOS|>\n\n", LINE + b"\n<|EOS|>\n" + LINE, LINE + b"\n", b"", b"\n"):
        read = [read_bytes(data, "a.txt", shape=f"transcript{name}") for name in ("", "-lines", "-stream")]
        assert read[0] == read[1] == read[2]


def test_three_records_whose_first_line_has_no_answer_are_not_joined(read_bytes):
    system = b"<|SYSTEM|>s<|END|><|USER|>q<|END|>"
    # A second system span without an <|EOS|> suggests a new record, so this file is read as one record per line.
    data = system + b"\n" + system + b"<|ASSISTANT|>a<|END|>\n" + system + b"<|ASSISTANT|>b<|END|>\n"
    records, _ = read_bytes(data, "a.txt")
    assert [record.line for record in records] == [1, 2, 3]
    with pytest.raises(DataError) as asked:
        read_bytes(system + b"\n" + LINE + b"\n" + LINE, "a.txt", shape="transcript")
    assert str(asked.value) == (
        "a.txt: records may be separated by line breaks or by <|EOS|>; "
        "pass --shape transcript-lines or transcript-stream"
    )


def test_a_stream_whose_first_line_looks_like_a_record_is_read_as_a_stream(read_bytes):
    data = LINE + b"\n<|USER|>two\nlines<|END|><|ASSISTANT|>a<|END|>\n<|EOS|>" + LINE
    turns = [*EXCHANGE, outside("\n"), Message("user", "two\nlines"), Message("assistant", "a")]
    assert read_bytes(data, "a.txt") == (found((1, turns), (4, EXCHANGE)), [])


def test_a_file_with_one_span_per_line_is_a_stream(read_bytes):
    data = b"<|USER|> hi <|END|>\n<|ASSISTANT|> yo <|END|>\n"
    assert read_bytes(data, "a.txt") == (found((1, SPACED)), [])
    assert read_bytes(data, "a.txt", shape="transcript-lines")[0] == found((1, EXCHANGE[:1]), (2, EXCHANGE[1:]))


@pytest.mark.parametrize(
    "data",
    [
        LINE + b"\n" + LINE,
        LINE + b"\n<|USER|>a\nb<|END|>\n<|SYSTEM|>s<|END|>" + LINE,
        b'"<|USER|>a<|END|>"\n<|USER|>a\nb<|END|>',
    ],
)
def test_an_ambiguous_file_is_refused(read_bytes, data):
    with pytest.raises(DataError, match=r"pass --shape transcript-lines or transcript-stream$"):
        read_bytes(data, "a.txt")


def test_text_without_markers_is_a_transcript_only_if_the_shape_is_given(read_bytes):
    with pytest.raises(DataError, match=r"^a\.txt: is neither JSON nor a transcript with markers such as "):
        read_bytes(b"plain text\n", "a.txt")
    assert read_bytes(b"plain text\n", "a.txt", shape="transcript") == (found((1, [outside("plain text")])), [])


SOUP = ["<|SYSTEM|>", "<|USER|>", "<|ASSISTANT|>", "<|END|>", "<|END|>", "<|EOS|>", "\n", "\n", " ", "a", "<|", '"']


@given(st.lists(st.sampled_from(SOUP), max_size=24).map("".join))
def test_a_file_is_refused_only_if_its_layouts_give_different_records(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("soup") / "a.txt"
    path.write_text(text)

    def read(shape: str) -> list:
        faults: list = []
        records = read_records([path], shape=shape, on_error="skip", on_reject=faults.append)
        return [record.messages for record in records] + faults

    try:
        chosen = read("transcript")
    except DataError:
        assert read("transcript-lines") != read("transcript-stream")
        return
    if not any(line.lstrip()[:1] == '"' for line in text.split("\n")):
        assert chosen in (read("transcript-lines"), read("transcript-stream"))
        # Reading line by line would split a complete span, so the file is read as a stream.
        if "<|USER|>a\n<|END|>" in text:
            assert chosen == read("transcript-stream")


@given(st.lists(st.sampled_from(SOUP), max_size=24).map(lambda parts: "".join(parts).encode()), st.integers(1, 30))
def test_the_layout_of_a_file_does_not_depend_on_how_it_is_read(data, size):
    chunks = [data[at : at + size] for at in range(0, len(data), size)]
    assert transcript_layout(chunks) == transcript_layout([data])


def test_only_the_conversation_with_the_fault_is_lost_from_a_stream(read_bytes):
    data = LINE + b"<|EOS|>\n" + LINE + b"\n<|EOS|>\xff<|EOS|><|USER|>\0<|EOS|>" + LINE
    assert read_bytes(data, "a.txt", shape="transcript-stream") == (
        found((1, EXCHANGE), (2, EXCHANGE), (3, EXCHANGE)),
        [
            "a.txt:3: not UTF-8 at column 1 (byte 0xff); expected UTF-8 text",
            "a.txt:3: a NUL byte at column 9; expected text without NUL bytes",
        ],
    )


@pytest.mark.parametrize("data", [b'""', b'{"text": " "}', b'"<|EOS|>"'])
def test_a_json_transcript_without_text_is_a_fault(read_bytes, data):
    line = "a.jsonl:1: the transcript has no text; expected <|SYSTEM|>, <|USER|> or <|ASSISTANT|>"
    assert read_bytes(data, shape="transcript") == ([], [line])


def test_a_conversation_over_the_limit_is_one_fault_and_is_not_kept_in_memory(read_bytes):
    data = LINE + b"<|EOS|>\n<|USER|>" + b"x\n" * 500_000 + b"<|END|><|EOS|>" + LINE
    records, faults = read_bytes(data, "a.txt", shape="transcript-stream", max_line_bytes=100)
    assert records == found((1, EXCHANGE), (500_002, EXCHANGE))
    assert faults == ["a.txt:2: the record is longer than 100 bytes; split the conversation, or remove it"]


@given(st.lists(st.sampled_from([b"<|EOS|>", b"<|", b"EOS", b"|>", b"\n", b" ", b"ab"]), max_size=12), st.data())
def test_the_read_size_does_not_change_the_records(tmp_path_factory, parts, data):
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
def test_any_text_round_trips_through_a_json_string(tmp_path_factory, conversations):
    text = "<|EOS|>".join(
        "".join(f"<|{role.upper()}|>{said}" + ("<|END|>" if closed else "") for role, said, closed in turns)
        for turns in conversations
    )
    path = tmp_path_factory.mktemp("exact") / "a.txt"
    path.write_text(json.dumps(text), encoding="utf-8")
    expected = [[Message(role, said, complete=closed) for role, said, closed in turns] for turns in conversations]
    assert [record.messages for record in read_records([path])] == expected
