"""Files of others are opened only if they are plain files, and nothing waits for a writer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chatmill.store.plain_file import check_plain, open_plain, read_plain


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
    with pytest.raises(OSError, match=f"it is {kind}, not a plain file"):
        read(tmp_path / "x")


def test_a_plain_file_is_read_up_to_the_limit(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("x")
    assert read_plain(tmp_path / "link", 5) == b"12345"
    assert check_plain(tmp_path / "x") == 5
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_plain(tmp_path / "x", 4)
