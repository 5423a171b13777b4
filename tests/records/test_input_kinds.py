"""Kinds of input files: JSON, text, Parquet and Arrow, compressed or not, and damaged."""

from __future__ import annotations

import bz2
import io
import sys
from itertools import pairwise

import pyarrow
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from input_fixtures import CHATS, COMPRESS, content, said
from pyarrow import ipc

from chatmill.errors import DataError, RecordError
from chatmill.records import read_records
from chatmill.records.compressed import MAX_WINDOW
from chatmill.records.files import KINDS, SUFFIXES


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
