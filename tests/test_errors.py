from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from chatmill.errors import name_file, system_fault


def read_from(path: Path, code: int) -> None:
    with path.open("rb"):
        raise OSError(code, os.strerror(code))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOMEM, errno.EDQUOT])
def test_an_error_without_a_name_gets_that_of_the_innermost_path(tmp_path, code):
    here, other = tmp_path / "here", tmp_path
    here.touch()
    with pytest.raises(OSError, match=os.strerror(code)) as raised:
        read_from(here, code)
    assert other.exists()
    assert system_fault(raised.value) == f"{here}: {os.strerror(code)}"


def test_a_name_that_an_error_has_is_kept(tmp_path):
    with pytest.raises(OSError, match="No such file") as raised:
        (tmp_path / "gone\x1b").read_bytes()
    assert system_fault(raised.value) == f"{tmp_path}/gone\\x1b: No such file or directory"


def test_an_error_about_no_file_stays_as_it_is():
    error = OSError("something else")
    assert name_file(error) is error and error.filename is None
    assert system_fault(error) == "input or output: something else"
    assert system_fault(OSError(errno.EIO, "bad", b"\xff")) == "\\udcff: bad"
