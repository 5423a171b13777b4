from __future__ import annotations

import io
import json
import random
import warnings
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from input_fixtures import CHATS, content, raise_it, read_all, said

from chatmill.errors import DataError
from chatmill.records import FilePart, plan, read_part, read_records
from chatmill.records.files import expand
from chatmill.records.raw_files import RemoteFile
from chatmill.records.read_log import ReadLog
from chatmill.remote.urls import Url

pytestmark = pytest.mark.usefixtures("memory")

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
    # For each piece, pyarrow reads the last 64 KiB of the file again, which contain the footer.
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
