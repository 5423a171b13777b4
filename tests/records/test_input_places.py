from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pyarrow
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from chatmill.errors import DataError, RecordError, UsageError
from chatmill.records import FilePart, plan, read_part, read_records, standard_input
from chatmill.records.compressed import MAX_WINDOW
from chatmill.records.files import KINDS, SUFFIXES, expand
from chatmill.records.raw_files import RemoteFile
from chatmill.records.read_log import ReadLog
from chatmill.remote.urls import Url

COMPRESS = {
    "": bytes,
    ".gz": partial(gzip.compress, mtime=0),
    ".zst": lambda data: zstandard.ZstdCompressor(level=3).compress(data),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
CHATS = [
    [{"role": "user", "content": f"question {n} é"}, {"role": "assistant", "content": "yes " * (n % 7)}]
    for n in range(40)
]


@pytest.fixture(autouse=True)
def memory():
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


def content(kind: str, chats=CHATS) -> bytes:
    out = io.BytesIO()
    rows = [{"messages": chat} for chat in chats]
    if kind == ".json":
        return json.dumps(rows, indent=1).encode()
    if kind == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), out, row_group_size=7)
    elif kind == ".arrow":
        table = pyarrow.Table.from_pylist(rows)
        with ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    else:
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    return out.getvalue()


def said(records) -> list[list[dict]]:
    return [[{"role": each.role, "content": each.content} for each in record.messages] for record in records]


def read_all(parts) -> list:
    return [record for part in parts for record in read_part(part, on_fault=raise_it)]


def raise_it(fault):
    raise fault


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_kind_of_file_gives_the_same_records_locally_and_at_a_url(tmp_path, memory, suffix):
    kind = next(each for each in sorted(KINDS, key=len, reverse=True) if suffix.startswith(each))
    data = COMPRESS[suffix.removeprefix(kind)](content(kind))
    path = tmp_path / f"chat{suffix}"
    path.write_bytes(data)
    memory.pipe_file(f"/b/chat{suffix}", data)
    here, there = list(read_records([path])), list(read_records([f"memory://b/chat{suffix}"]))
    assert said(here) == said(there) == CHATS
    assert [record.line for record in here] == [record.line for record in there]
    assert {record.source for record in here + there} == {"chat"}
    assert {record.file for record in there} == {f"memory://b/chat{suffix}"}


def test_arrow_files_in_the_file_format_and_with_large_batches_are_read(tmp_path):
    table = pyarrow.Table.from_pylist([{"messages": chat} for chat in CHATS * 20])
    with ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    assert said(read_records([tmp_path / "a.arrow"])) == CHATS * 20


def test_the_arrow_files_of_hugging_face_datasets_are_read_from_their_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list([{"messages": chat} for chat in CHATS])
    saved.save_to_disk(tmp_path / "saved", num_shards=3)
    with pytest.warns(UserWarning, match="skipped 2 files with other extensions: dataset_info.json, state.json"):
        records = list(read_records([tmp_path / "saved"]))
    assert said(records) == list(datasets.load_from_disk(str(tmp_path / "saved"))["messages"]) == CHATS


@pytest.mark.parametrize("compress", [bytes, None])
@pytest.mark.parametrize("ending", [".gz", ".zst", ".xz", ".bz2"])
def test_an_empty_compressed_file_has_no_records(tmp_path, pipe, ending, compress):
    empty = (compress or COMPRESS[ending])(b"")
    (tmp_path / f"a.jsonl{ending}").write_bytes(empty)
    (tmp_path / "b.jsonl").write_bytes(content(".jsonl"))
    assert said(read_records([tmp_path / f"a.jsonl{ending}"])) == []
    assert said(read_records([tmp_path])) == CHATS
    pipe(empty)
    assert said(read_records(["-"])) == []


@pytest.mark.parametrize("ending", [".gz", ".zst", ".xz", ".bz2"])
def test_a_compressed_file_may_have_several_streams(tmp_path, ending):
    data = content(".jsonl")
    cuts = [0, 0, 17, 1000, len(data), len(data)]
    pieces = [COMPRESS[ending](data[start:stop]) for start, stop in pairwise(cuts)]
    padding = {".xz": bytes(8), ".zst": b"\x50\x2a\x4d\x18\x03\0\0\0abc"}.get(ending, b"")
    (tmp_path / f"a.jsonl{ending}").write_bytes(padding.join(pieces) + padding)
    assert said(read_records([tmp_path / f"a.jsonl{ending}"])) == CHATS


@pytest.mark.parametrize("ending", [".gz", ".zst", ".xz", ".bz2"])
@settings(max_examples=30)
@given(data=st.data())
def test_a_truncated_or_damaged_compressed_file_is_always_reported(tmp_path_factory, ending, data):
    whole = COMPRESS[ending](content(".jsonl"))
    at = data.draw(st.integers(2, len(whole) - 1))
    kind = data.draw(st.sampled_from(["cut", "garbage"]))
    path = tmp_path_factory.mktemp("a") / f"a.jsonl{ending}"
    path.write_bytes(whole[:at] if kind == "cut" else whole + b"garbage at the end"[:at])
    faults: list[RecordError] = []
    records = list(read_records([path], shape="messages", on_error="skip", on_reject=faults.append))
    assert said(records) == CHATS[: len(records)]
    # The last line may also be truncated, which is reported as a separate error.
    name = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bzip2"}[ending]
    expected = {"cut": "the compressed file is truncated", "garbage": f"other data follows the end of the {name} data"}[
        kind
    ]
    assert faults[-1].what == expected and faults[-1].line == len(records) + len(faults)
    assert faults[-1].kind == name


@pytest.mark.parametrize(
    ("name", "data", "line"),
    [
        ("a.jsonl.gz", content(".jsonl"), "the file is text, not gzip; remove .gz from the file name"),
        ("a.jsonl.xz", "\ufeffé".encode(), "the file is text, not xz; remove .xz from the file name"),
        ("a.jsonl.gz", COMPRESS[".zst"](b"{}"), "the file is zstd, not gzip; use a file name that ends with .zst"),
        ("a.jsonl.zst", COMPRESS[".gz"](b"{}"), "the file is gzip, not zstd; use a file name that ends with .gz"),
        ("a.jsonl", COMPRESS[".gz"](b"{}"), "the file is gzip, not .jsonl text; use a file name that ends with .gz"),
        ("a.json", bz2.compress(b"{}"), "the file is bzip2, not .json text; use a file name that ends with .bz2"),
        ("a.txt.gz", COMPRESS[".xz"](b"{}"), "the file is xz, not gzip; use a file name that ends with .xz"),
        ("a.txt", content(".parquet"), "the file is Parquet, not .txt text; use a file name that ends with .parquet"),
        (
            "a.jsonl.gz",
            COMPRESS[".gz"](COMPRESS[".gz"](b"{}")),
            "the decompressed content is gzip, not .jsonl text; use a file name that ends with .gz",
        ),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "the file is UTF-16 text, not .jsonl text; convert the file to UTF-8"),
        (
            "a.jsonl",
            '{"a": 1}'.encode("utf-16-le"),
            "the file is UTF-16 text, not .jsonl text; convert the file to UTF-8",
        ),
        ("a.txt", "<|USER|>".encode("utf-16-be"), "the file is UTF-16 text, not .txt text; convert the file to UTF-8"),
        (
            "a.parquet",
            content(".jsonl"),
            "the file is text, not Parquet; use a file name that ends with .jsonl or .json",
        ),
        ("a.arrow", content(".parquet"), "the file is Parquet, not Arrow; use a file name that ends with .parquet"),
        ("a.parquet", COMPRESS[".gz"](b"{}"), "the file is gzip, not Parquet; use a file name that ends with .gz"),
        ("a.jsonl.gz", b"\x80\x01", "the compressed data is corrupt; expected a valid gzip file; copy it again"),
    ],
)
def test_a_file_with_the_wrong_suffix_is_reported_with_its_real_kind(tmp_path, name, data, line):
    (tmp_path / name).write_bytes(data)
    for shape in (None, "transcript-lines"):
        with pytest.raises(RecordError) as caught:
            list(read_records([tmp_path / name], shape=shape))
        assert str(caught.value) == f"{tmp_path / name}:1: {line}"


def test_a_zstd_window_over_the_limit_is_refused_and_one_at_the_limit_is_read(tmp_path):
    data = content(".jsonl")
    for log, is_read in ((27, True), (28, False)):
        parameters = zstandard.ZstdCompressionParameters(window_log=log)
        compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        (tmp_path / "a.jsonl.zst").write_bytes(compressor.compress(data) + compressor.flush())
        assert (1 << log <= MAX_WINDOW) == is_read
        if is_read:
            assert said(read_records([tmp_path / "a.jsonl.zst"])) == CHATS
        else:
            with pytest.raises(
                RecordError, match=r"a\.jsonl\.zst:1: decompression needs more than 128 MiB of memory; "
            ):
                list(read_records([tmp_path / "a.jsonl.zst"], shape="messages"))


def test_zstd_without_its_library_is_reported_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(COMPRESS[".zst"](content(".jsonl")))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DataError, match=r"a\.jsonl\.zst: \.zst needs zstandard; pip install 'chatmill\[zstd\]'$"):
        list(read_records([tmp_path / "a.jsonl.zst"]))


@pytest.mark.parametrize("form", ["stream", "file"])
@settings(max_examples=30)
@given(data=st.data())
def test_a_damaged_arrow_file_is_reported_in_one_line_or_has_its_rows(tmp_path_factory, form, data):
    out = io.BytesIO()
    table = pyarrow.Table.from_pylist([{"messages": chat} for chat in CHATS])
    with (ipc.new_stream if form == "stream" else ipc.new_file)(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    whole = out.getvalue()
    at = data.draw(st.integers(0, len(whole) - 1))
    path = tmp_path_factory.mktemp("a") / "a.arrow"
    is_cut = data.draw(st.booleans())
    path.write_bytes(whole[:at] if is_cut else whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
    faults: list[RecordError] = []
    records = list(read_records([path], shape="messages", on_error="skip", on_reject=faults.append))
    assert not is_cut or faults[-1].what == "the Arrow file is corrupt"
    assert len(records) <= len(CHATS)


# Cuts.


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_splitting_an_object_of_lines_anywhere_does_not_change_its_records(memory, end):
    lines = [json.dumps({"messages": chat}) for chat in CHATS[:4]]
    lines[1:1] = ["", "  "]
    data = "\ufeff".encode() + ("\r\n" if end == "\r\n" else "\n").join(lines).encode() + end.encode()
    memory.pipe_file("/b/a.jsonl", data)
    [part] = plan(["memory://b/a.jsonl"])
    whole = read_all([part])
    assert said(whole) == CHATS[:4]
    for size in [*range(1, 60), *range(60, len(data) + 2, 7)]:
        pieces = part.cut(size)
        assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
        assert (pieces[0].start, pieces[-1].stop) == (0, len(data))
        assert said(read_all(pieces)) == CHATS[:4], size


@pytest.mark.parametrize("where", ["here", "there"])
def test_splitting_a_parquet_file_at_row_groups_does_not_change_its_records(tmp_path, memory, where):
    data = content(".parquet")
    memory.pipe_file("/b/a.parquet", data)
    (tmp_path / "a.parquet").write_bytes(data)
    [part] = plan([tmp_path / "a.parquet" if where == "here" else "memory://b/a.parquet"])
    counts = set()
    for size in [1, 100, 900, 1500, len(data) // 2, len(data), 10**9]:
        pieces = part.cut(size)
        counts.add(len(pieces))
        assert said(read_all(pieces)) == CHATS
    assert counts >= {1, 2, -(-len(CHATS) // 7)}


def test_a_piece_of_an_object_reads_only_its_bytes(memory, monkeypatch):
    data = content(".jsonl", CHATS * 40)
    memory.pipe_file("/b/a.jsonl", data)
    ranges = []
    monkeypatch.setattr(
        "chatmill.remote.objects.read",
        lambda url, start=0, stop=None: ranges.append((start, stop)) or data[start:stop],
    )
    part = FilePart(Url("memory://b/a.jsonl"), "messages", "a")
    pieces = part.cut(20_000, end=len(data))
    ranges.clear()
    for piece in pieces:
        log = ReadLog()
        list(read_part(piece, on_fault=raise_it, log=log))
        assert log.bytes_read().ranges[-1] == (piece.start, piece.stop)
        assert log.bytes_read().ends == ()
    assert max(stop for _, stop in ranges) == len(data)
    assert sum(stop - start for start, stop in ranges) <= len(data)


def test_a_piece_of_a_parquet_object_reads_its_row_groups_and_the_footer(memory, monkeypatch):
    chats = [[{"role": "user", "content": random.Random(n).randbytes(3000).hex()}, *CHATS[0][1:]] for n in range(200)]
    data = content(".parquet", chats)
    memory.pipe_file("/b/a.parquet", data)
    part = FilePart(Url("memory://b/a.parquet"), "messages", "a")
    pieces = part.cut(200_000, end=len(data))
    read = 0

    def counted(url, start=0, stop=None):
        nonlocal read
        read += len(data[start:stop])
        return data[start:stop]

    monkeypatch.setattr("chatmill.remote.objects.read", counted)
    records = [record for piece in pieces for record in read_part(piece, on_fault=raise_it, log=ReadLog())]
    assert said(records) == chats
    # pyarrow reads the last 64 KiB of the file for the footer, once for each piece.
    assert len(pieces) > 4 and read < len(data) + len(pieces) * (1 << 17)


@settings(max_examples=30)
@given(data=st.data())
def test_an_object_reads_and_seeks_like_a_file(data):
    whole = bytes(range(256)) * 30
    fsspec.filesystem("memory").pipe_file("/b/raw", whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chatmill.records.raw_files.FIRST_BYTES", data.draw(st.integers(1, 3000)))
        patch.setattr("chatmill.records.raw_files.MOST_BYTES", data.draw(st.integers(1, 5000)))
        log = ReadLog() if data.draw(st.booleans()) else None
        with RemoteFile(Url("memory://b/raw"), log) as file, io.BytesIO(whole) as known:
            for _ in range(data.draw(st.integers(1, 12))):
                if data.draw(st.booleans()):
                    at = data.draw(st.integers(0, len(whole) + 5))
                    assert file.seek(at) == known.seek(at)
                size = data.draw(st.integers(0, 9000))
                got = file.read(size)
                assert got == known.read(len(got)) and (got or not size or known.tell() >= len(whole))
            assert file.seek(0, io.SEEK_END) == len(whole)


# Names.


def names_of(paths) -> list[str]:
    return [str(path) for path in paths]


def test_globs_and_folders_give_the_same_files_locally_and_at_urls(tmp_path, memory):
    names = [
        "b.jsonl",
        "a/z.json",
        "a.x/y.txt",
        "a/.hidden.jsonl",
        ".h/c.jsonl",
        "a/b/c.parquet.zst",
        "n.md",
        "B.JSONL",
    ]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(b"{}\n")
        memory.pipe_file(f"/chat/{name}", b"{}\n")
    for pattern in ("", "/", "/**/*.jsonl", "/*.jsonl", "/a/*", "/[ab]*", "/a"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            here = [str(Path(path).relative_to(tmp_path)) for path in expand([f"{tmp_path}{pattern}"])]
            there = [str(path).removeprefix("memory://chat/") for path in expand([f"memory://chat{pattern}"])]
        assert here == there and here, pattern
    assert names_of(expand(["memory://chat/b.jsonl", "memory://chat/*.jsonl"])) == ["memory://chat/b.jsonl"]


def test_a_folder_without_records_and_its_unread_files_are_reported_in_one_line(tmp_path, memory):
    memory.pipe_file("/chat/x.csv", b"")
    memory.pipe_file("/chat/y.md", b"")
    with pytest.raises(DataError, match=r"^memory://chat/?: the folder has no record files; expected \.jsonl, "):
        expand(["memory://chat/"])
    memory.pipe_file("/chat/z.jsonl", b"{}\n")
    with pytest.warns(UserWarning, match=r"^memory://chat: skipped 2 files with other extensions: x\.csv, y\.md$"):
        assert names_of(expand(["memory://chat"])) == ["memory://chat/z.jsonl"]
    memory.pipe_file("/chat/dataset_metadata.json", b"{}")
    with pytest.raises(DataError, match=r"^memory://chat: is a dataset; expected a folder with only conversations, or"):
        expand(["memory://chat"])
    with pytest.raises(DataError, match=r"^memory:///?: contains the dataset memory://chat; expected a folder with "):
        expand([Url("memory://")])
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(b"{}\n")
    assert expand([tmp_path]) == [tmp_path / "a.jsonl"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("memory://none/a.jsonl", "memory://none/a.jsonl: no such object; check the name"),
        ("memory://none/*.jsonl", "memory://none/*.jsonl: the glob matches no object; expected at least one"),
    ],
)
def test_a_missing_url_is_reported_in_one_line(name, line):
    with pytest.raises(DataError) as caught:
        read_records([name])
    assert str(caught.value) == line


# Standard input.


@pytest.fixture
def pipe(monkeypatch):
    def give(data: bytes, *, is_terminal: bool = False) -> None:
        standard_input.remove_standard_input()
        stdin = SimpleNamespace(buffer=io.BytesIO(data), closed=False, isatty=lambda: is_terminal)
        monkeypatch.setattr(sys, "stdin", stdin)

    yield give
    standard_input.remove_standard_input()


@pytest.mark.parametrize(("kind", "ending"), [*zip(KINDS, COMPRESS, strict=True), (".jsonl", ".zst"), (".txt", "")])
def test_stdin_can_be_any_kind_of_file(pipe, kind, ending):
    pipe(COMPRESS[ending](content(kind)))
    records = list(read_records(["-"]))
    assert said(records) == CHATS
    assert {(record.file, record.source) for record in records} == {("-", "stdin")}


@pytest.mark.parametrize(
    ("data", "suffix"),
    [
        (b'{"messages": []}\n{"messages": []}\n', ".jsonl"),
        (b'\n\n  {"a": 1}\n', ".jsonl"),
        (b'{"a": 1}', ".jsonl"),
        (b'[{"a": 1}]', ".jsonl"),
        (b'{"a":\n {"b": 1}}\n', ".json"),
        (b'{"a": \n{"b": 1}\n', ".jsonl"),
        (b"<|USER|>hi<|END|>\n", ".txt"),
        (b"", ".jsonl"),
        (b"\x1f\x8bbroken", ".jsonl.gz"),
    ],
)
def test_the_kind_of_stdin_is_detected_from_its_first_bytes(pipe, data, suffix):
    pipe(data)
    assert standard_input.standard_input().name == f"stdin{suffix}"


def test_a_fault_in_stdin_has_its_line_and_the_temporary_file_is_removed(pipe):
    pipe(content(".jsonl", CHATS[:2]) + b"{\n")
    with pytest.raises(RecordError, match=r"^-:3: ") as caught:
        list(read_records(["-"]))
    assert caught.value.file == "-"
    folder = standard_input.standard_input().parent
    assert folder.is_dir()
    standard_input.remove_standard_input()
    assert not folder.exists()


def test_stdin_can_be_given_once_and_a_terminal_gets_a_hint(pipe, capsys):
    pipe(content(".jsonl"), is_terminal=True)
    with pytest.raises(UsageError, match=r"^-: is given twice, but standard input can be read only once; remove one$"):
        read_records(["-", "-"])
    assert capsys.readouterr().err == ""
    assert len(expand(["-"])) == 1
    assert capsys.readouterr().err == "chatmill: reading records from the terminal; press Ctrl-D to finish\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_process_removes_the_temporary_file_of_stdin(tmp_path, number):
    code = "from chatmill.records.standard_input import standard_input; standard_input()"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=environment) as process:
        process.stdin.write(b"{}\n")
        process.stdin.flush()
        try:
            while not any(tmp_path.glob("*/stdin")):
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(number)
            assert process.wait(60) == -number
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []


# Changes.


@pytest.mark.parametrize("change", ["grow", "shrink", "replace", "remove", "same"])
def test_an_object_that_changes_while_it_is_read_is_detected(memory, change):
    data = content(".jsonl")
    memory.pipe_file("/b/a.jsonl", data)
    records = read_records(["memory://b/a.jsonl"])
    next(records)
    other = {
        "grow": data + data[: data.index(b"\n") + 1],
        "shrink": data[: data.index(b"\n") + 1],
        "replace": data.replace(b"question 39", b"question 00"),
        "same": data,
    }
    if change == "remove":
        memory.rm_file("/b/a.jsonl")
    else:
        memory.pipe_file("/b/a.jsonl", other[change])
    if change == "same":
        assert len(list(records)) == len(CHATS) - 1
        return
    what = {"grow": "grew from", "shrink": "shrank from", "replace": "was changed", "remove": "was removed"}[change]
    with pytest.raises(DataError, match=rf"^memory://b/a\.jsonl: {what}.* while it was being read; build again"):
        list(records)
