from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from chatmill.errors import DataError
from chatmill.plain_file import check_plain, open_plain, read_plain
from chatmill.tokenizer import open_tokenizer


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a FIFO"),
        (Path.mkdir, "a folder"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
    ],
)
@pytest.mark.parametrize("read", [check_plain, open_plain, read_plain])
def test_what_is_no_plain_file_is_an_error_at_once(tmp_path, make, kind, read):
    make(tmp_path / "x")
    with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
        read(tmp_path / "x")


def test_a_plain_file_is_read_up_to_the_limit(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("x")
    assert read_plain(tmp_path / "link", 5) == b"12345"
    assert check_plain(tmp_path / "x") == 5
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_plain(tmp_path / "x", 4)


def test_a_tokenizer_that_is_a_fifo_is_one_line(tmp_path):
    os.mkfifo(tmp_path / "t.json")
    with pytest.raises(DataError, match="it is a FIFO, not a regular file"):
        open_tokenizer(str(tmp_path / "t.json"))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "tokenizer_config.json")
    with pytest.raises(DataError, match="it is a FIFO, not a regular file"):
        open_tokenizer(str(tmp_path / "folder"))


@pytest.mark.parametrize("size", [0, 1, 2, 99, 100, 101, 5000])
@pytest.mark.parametrize("limit", [0, 1, 100, 4999, 5000, 10**6])
def test_a_file_is_read_whole_or_refused(tmp_path, size, limit):
    data = bytes(number % 251 for number in range(size))
    (tmp_path / "x").write_bytes(data)
    if size <= limit:
        assert read_plain(tmp_path / "x", limit) == data
    else:
        with pytest.raises(OSError, match=f"larger than {limit:,} bytes"):
            read_plain(tmp_path / "x", limit)


def test_small_and_refused_files_need_little_memory(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    tracemalloc.start()
    try:
        read_plain(tmp_path / "x", 2**30)
        with (tmp_path / "large").open("wb") as file:
            file.truncate(2**30)
        with pytest.raises(OSError, match="larger"):
            read_plain(tmp_path / "large", 2**29)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_file_that_reports_no_size_is_read_whole():
    assert b"VmData" in read_plain(Path("/proc/self/status"))
