from __future__ import annotations

import gzip
import io
import json
import tracemalloc
import warnings
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import DataError, RecordError, UsageError
from chatmill.records import FilePart, Message, Record, expand, plan, read_part, read_records
from chatmill.records.shapes import ShapeOptions, parser
from chatmill.records.units import elements


def line(text: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


def records(*found: tuple[int, str], file: str = "a.jsonl") -> list[Record]:
    return [Record([Message("user", text)], source="a", file=file, line=number) for number, text in found]


ABC = b"\n".join(map(line, "abc"))


@pytest.mark.parametrize(
    ("data", "numbers"),
    [
        (ABC, (1, 2, 3)),
        (ABC + b"\n", (1, 2, 3)),
        (b"\xef\xbb\xbf" + ABC, (1, 2, 3)),
        (ABC.replace(b"\n", b"\r\n") + b"\r\n", (1, 2, 3)),
        (b"\n \t\r\n" + ABC.replace(b"\n", b"\n\n\n") + b"\n\n", (3, 6, 9)),
    ],
)
@pytest.mark.parametrize("ending", [".jsonl", ".txt", ".jsonl.gz", ".txt.gz", ".json", ".json.gz", ".JSONL"])
def test_jsonl_with_any_line_endings_names_and_compression(read_bytes, data, numbers, ending):
    name = f"a{ending}"
    packed = gzip.compress(data) if ending.endswith(".gz") else data
    expected = records(*zip(numbers, "abc", strict=True), file=name)
    assert read_bytes(packed, name) == (expected, [])


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
@pytest.mark.parametrize(
    ("data", "numbers"),
    [
        (b"[" + ABC.replace(b"\n", b",") + b"]", (1, 1, 1)),
        (b"\xef\xbb\xbf\r\n [\r\n" + ABC.replace(b"\n", b"\r\n,\r\n  ") + b"\r\n]\r\n", (3, 5, 7)),
        (json.dumps([json.loads(text) for text in ABC.split(b"\n")], indent=1).encode(), (2, 10, 18)),
    ],
)
def test_an_array_with_any_layout_and_compression(read_bytes, data, numbers, ending):
    name = f"a{ending}"
    packed = gzip.compress(data) if ending.endswith(".gz") else data
    assert read_bytes(packed, name) == (records(*zip(numbers, "abc", strict=True), file=name), [])


def test_one_object_over_several_lines(read_bytes):
    data = b"\n" + json.dumps(json.loads(line("a")), indent=2).encode() + b"\n"
    assert read_bytes(data, "a.json") == (records((2, "a"), file="a.json"), [])


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt"])
@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file_has_no_records(read_bytes, data, name):
    assert read_bytes(data, name) == ([], [])


def test_an_empty_array_has_no_records(read_bytes):
    assert read_bytes(b"[ \n ]", "a.json") == ([], [])


@pytest.mark.parametrize(
    ("data", "found", "faults"),
    [
        (b"[%s,,%s]", (1, 1), ["1: invalid JSON at column 1 (unexpected end); expected one JSON object"]),
        (b"[%s,%s,\n]", (1, 1), ["2: invalid JSON at column 1 (unexpected end); expected one JSON object"]),
        (b"[%s}\n,\n%s]", (3,), ["1: invalid JSON at column {} (trailing characters); expected one JSON object"]),
        (
            b"[%s\n%s]",
            (),
            ["1: invalid JSON at column {} of line 2 of the record (trailing characters); expected one JSON object"],
        ),
        (b"[%s,\n%s", (1,), ['2: the file ends inside its array; expected "]" at the end of the file']),
        (b'[%s,%s,\n{"a', (1, 1), ['2: the file ends inside its array; expected "]" at the end of the file']),
        (b"[%s,%s,\n", (1, 1), ['2: the file ends inside its array; expected "]" at the end of the file']),
        (b"[%s,%s]\n\nx", (1, 1), ["3: text after the end of the array; expected one array in the file"]),
    ],
)
def test_an_invalid_array_is_one_fault(read_bytes, data, found, faults):
    texts = (line("a"), line("b"))
    column = 1 if b"," not in data else len(texts[0]) + 1
    got, lines = read_bytes(data % texts, "a.json", shape="messages")
    assert [record.line for record in got] == list(found)
    assert lines == [f"a.json:{fault.format(column)}" for fault in faults]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\[]{},\n é')),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.sampled_from('"\\]},')), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(JSON, max_size=6), st.sampled_from([None, 0, 2]), st.booleans(), st.sampled_from([1, 2, 3, 7, 64, 1 << 18])
)
def test_elements_of_an_array_do_not_depend_on_the_read_size(tmp_path_factory, values, indent, ascii_only, chunk):
    path = tmp_path_factory.mktemp("array") / "a.json"
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=ascii_only), encoding="utf-8")
    found = list(elements(path, limit=1 << 20, chunk=chunk))
    assert [json.loads(data) for _, data in found] == values
    numbers = [number for number, _ in found]
    if indent is None:
        assert numbers == [1] * len(values)
    else:
        heights = [json.dumps(value, indent=indent).count("\n") + 1 for value in values]
        assert numbers == [2 + sum(heights[:index]) for index in range(len(values))]


@given(st.sampled_from([1, 2, 3, 7, 1 << 18]), st.text(st.sampled_from('a"\\],'), min_size=20, max_size=40))
def test_only_the_element_over_the_limit_is_lost(tmp_path_factory, chunk, text):
    path = tmp_path_factory.mktemp("array") / "a.json"
    long = json.dumps([text, "\n", {"a": [text]}])
    path.write_text(f'["x",\n{long}, "y"]')
    assert list(elements(path, limit=10, chunk=chunk)) == [(1, b'"x"'), (2, long.encode()[:11]), (2, b'"y"')]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_a_line_is_too_long_from_one_byte_over_the_limit(read_bytes, end):
    limit = len(line("abc"))
    data = line("abc") + b"\n" + line("abcd") + b"\n" + line("x" * 300_000) + b"\r\n" + line("abc") + end
    found, faults = read_bytes(data, max_line_bytes=limit)
    assert found == records((1, "abc"), (4, "abc"))
    what = f"the record is longer than {limit} bytes; split the conversation, or remove it"
    assert faults == [f"a.jsonl:2: {what}", f"a.jsonl:3: {what}"]


@pytest.mark.parametrize("more", range(1, 12))
def test_a_line_cut_by_the_limit_inside_its_line_ending_is_too_long(read_bytes, monkeypatch, more):
    limit = len(line("abc"))
    monkeypatch.setattr("chatmill.records.units.BLOCK", limit + more)
    data = line("abc") + b"\r" + b" and more" * 9 + b"\n" + line("abc")
    found, (fault,) = read_bytes(data, shape="messages", max_line_bytes=limit)
    assert found == records((2, "abc"))
    assert fault.startswith(f"a.jsonl:1: the record is longer than {limit} bytes; ")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.txt.gz"])
@pytest.mark.parametrize("shape", ["messages", None])
def test_damaged_compression_is_one_fault_after_the_readable_records(read_bytes, name, shape):
    lines = [line(f"{index * 7919 % 10007} {'é' * (index % 50)}") for index in range(20_000)]
    data = b"[" + b",\n".join(lines) + b"]" if "json." in name else b"\n".join(lines)
    whole = gzip.compress(data, 1, mtime=0)
    for packed, what in [
        (whole[: len(whole) // 2], "the compressed file is truncated; expected the whole file; copy it again"),
        (
            whole[:-8] + b"xxxx" + whole[-4:],
            "the compressed data is corrupt; expected a valid gzip file; copy it again",
        ),
        (b"plain text", "the file is text, not gzip; remove .gz from the file name"),
    ]:
        found, faults = read_bytes(packed, name, shape="messages" if "txt" in name else shape)
        assert [record.line for record in found] == list(range(1, len(found) + 1))
        assert faults == [f"{name}:{len(found) + 1}: {what}"]


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(line(name))


def test_files_keep_the_given_order_and_are_sorted_within_a_glob(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "b.jsonl", "a.jsonl", "c10.jsonl", "c9.jsonl", "sub/d.jsonl", "sub/e.txt", "[x].jsonl")
    assert expand(["c*.jsonl", "b.jsonl"]) == [Path("c10.jsonl"), Path("c9.jsonl"), Path("b.jsonl")]
    assert expand(["**/*.jsonl"])[-1] == Path("sub/d.jsonl")
    assert expand(["[x].jsonl"]) == [Path("[x].jsonl")]
    assert expand([tmp_path / "sub" / "*"]) == [tmp_path / "sub/d.jsonl", tmp_path / "sub/e.txt"]
    assert [record.messages[0].content for record in read_records(["c*.jsonl", "a.jsonl"])] == [
        "c10.jsonl",
        "c9.jsonl",
        "a.jsonl",
    ]


def test_a_file_that_is_given_twice_is_read_once_at_its_first_position(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a.jsonl", "b.jsonl")
    assert expand(["b.jsonl", "*.jsonl", "./a.jsonl", tmp_path / "b.jsonl"]) == [Path("b.jsonl"), Path("a.jsonl")]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("none.jsonl", "none.jsonl: no such file; expected a file, a folder or a glob"),
        ("none*.jsonl", "none*.jsonl: the glob matches no file; expected at least one"),
        (
            "sub",
            "sub: the folder has no record files; expected .jsonl, .json, .txt, .parquet, .arrow, "
            "each also with .gz, .zst, .xz, .bz2",
        ),
        (
            "a.csv",
            "a.csv: unsupported file type; "
            "expected .jsonl, .json, .txt, .parquet, .arrow, each also with .gz, .zst, .xz, .bz2; "
            "docs/reference/records.md shows how to convert it",
        ),
    ],
)
def test_inputs_that_match_no_file_are_reported_immediately(tmp_path, monkeypatch, name, what):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a.csv", "sub/.a.jsonl")
    with pytest.raises(DataError) as caught:
        read_records([name])
    assert str(caught.value) == what


def test_a_file_that_cannot_be_opened_is_reported_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a.jsonl")
    parts = plan(["a.jsonl"])
    Path("a.jsonl").unlink()
    with pytest.raises(DataError) as caught:
        list(read_part(parts[0], on_fault=print))
    assert str(caught.value) == "a.jsonl: cannot be opened; No such file or directory"


def test_the_source_is_the_stem_or_the_name_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "v1.chat.jsonl")
    Path("b.json.gz").write_bytes(gzip.compress(line("b")))
    assert [record.source for record in read_records(["v1.chat.jsonl", "b.json.gz"])] == ["v1.chat", "b"]
    assert [record.source for record in read_records(["v1.chat.jsonl", "b.json.gz"], source="mine")] == ["mine", "mine"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"shape": "chat"}, 'unknown shape "chat"; expected messages, sharegpt, alpaca'),
        ({"on_error": "ignore"}, 'unknown on_error "ignore"; expected stop or skip'),
        ({"on_error": "skip"}, 'on_error "skip" requires on_reject, which receives the invalid records'),
    ],
)
def test_invalid_options_are_reported_immediately(tmp_path, options, what):
    write(tmp_path, "a.jsonl")
    with pytest.raises(UsageError) as caught:
        read_records([tmp_path / "a.jsonl"], **options)
    assert str(caught.value).startswith(what)


@pytest.mark.parametrize("size", [1, 50, 200, 10**6])
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\n\n"])
def test_the_parts_of_a_file_have_the_records_of_the_file(tmp_path, size, end, newline):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + newline.join(line("x" * (index % 30)) for index in range(40)) + end)
    (whole,) = plan([path])
    parts = whole.cut(size)
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert all(part.stop - part.start >= size for part in parts[:-1])
    assert len(parts) > 10 if size < 100 else len(parts) < 40
    found, counts = [], [0]
    for part in parts:
        before = sum(counts)
        for record in read_part(part, on_fault=_stop, on_end=counts.append):
            found.append(msgspec.structs.replace(record, line=record.line + before))
    assert found == list(read_records([path]))


def _stop(fault: RecordError) -> None:
    raise fault


def test_files_that_cannot_be_split_stay_whole(tmp_path):
    for name, shape in [("a.json", "messages"), ("a.jsonl.gz", "messages"), ("a.txt", "transcript-stream")]:
        part = FilePart(tmp_path / name, shape, "a")
        assert part.cut(1) == [part]
    flat = FilePart(tmp_path / "a.jsonl", "oasst1", "a")
    assert flat.cut(1) == [flat]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.jsonl.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    path = tmp_path / name
    count = 8000
    if name == "a.txt":
        path.write_bytes(b"<|EOS|>\n".join([b"<|USER|>\n" + b"x" * 1000 + b"<|END|>\n"] * count))
    elif name == "a.json":
        path.write_bytes(b"[" + b",\n".join([line("x" * 1000)] * count) + b"]")
    else:
        data = b"\n".join([line("x" * 1000)] * count)
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    tracemalloc.start()
    found = sum(1 for _ in read_records([path]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == count
    assert peak < 2**22


PIECES = [line("a"), line("b") + line("c"), line("d") + b" ", b" " + line("e"), line("f").replace(b":", b":\n", 1)]
PIECES += [b"", b" ", b"\r", b"{}", b"}", b"{", b'"x"', b'{"messages": []}', line("g").replace(b"}]", b"}\n]")]


@given(st.lists(st.sampled_from(PIECES), max_size=6), st.booleans())
def test_lines_read_together_give_the_same_records_as_lines_read_alone(tmp_path_factory, pieces, ended):
    path = tmp_path_factory.mktemp("block") / "a.jsonl"
    path.write_bytes(b"\n".join(pieces) + b"\n" * ended)
    found: list[Record | str] = []
    for record in read_records(
        [path], shape="messages", on_error="skip", on_reject=lambda fault: found.append(str(fault))
    ):
        found.append(record)
    alone: list[Record | str] = []
    parse = parser("messages", file=str(path), source="a", limit=10**6)
    for number, data in enumerate(path.read_bytes().replace(b"\r\n", b"\n").split(b"\n"), 1):
        if data.strip():
            alone += [each if isinstance(each, Record) else str(each) for each in parse(number, data)]
    assert found == alone


class Endless(io.RawIOBase):
    def __init__(self, most: int) -> None:
        self.left = most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer):
        self.left -= len(buffer)
        assert self.left > 0
        buffer[:] = b"a" * len(buffer)
        return len(buffer)

    def seek(self, offset, whence=0):
        return offset


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
@pytest.mark.parametrize("columns", [None, "messages=turns"])
def test_a_line_that_is_too_long_is_not_read_to_its_end_if_reading_stops_there(tmp_path, monkeypatch, name, columns):
    (tmp_path / name).write_bytes(b"a")
    monkeypatch.setattr("chatmill.records.files.open_raw", lambda *_, **__: Endless(1 << 24))
    options = ShapeOptions(columns=columns if name == "a.jsonl" else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reading = read_records([tmp_path / name], options=options, max_line_bytes=1000)
    with pytest.raises(RecordError, match="the record is longer than 1000 bytes; split "):
        next(reading)


def test_the_shape_of_a_file_is_detected_after_a_line_that_is_too_long_if_it_is_skipped(tmp_path):
    line = '{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}\n'
    (tmp_path / "a.jsonl").write_text("a" * 5000 + "\n" + line)
    faults: list[RecordError] = []
    reading = read_records([tmp_path / "a.jsonl"], on_error="skip", on_reject=faults.append, max_line_bytes=1000)
    assert [[turn.content for turn in record.messages] for record in reading] == [["hi", "yes"]]
    assert [fault.kind for fault in faults] == ["too_long"]


def test_a_text_file_that_is_not_utf8_is_reported_in_one_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xd3\n\x80\x81\n\xff")
    with pytest.raises(DataError, match=r"a\.txt: is not UTF-8 text; expected conversations in UTF-8$"):
        read_records([tmp_path / "a.txt"])
