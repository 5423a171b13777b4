from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from chatmill.config import (
    Config,
    from_environment,
    from_flags,
    integer,
    key,
    keys_of,
    misfits,
    read_toml,
    read_values,
    required,
)
from chatmill.errors import DataError, UsageError


@dataclass(frozen=True, kw_only=True)
class Base(Config):
    steps: int | None = key(None, "optimizer steps; null: one pass", integer(1))
    name: str = key("run", "name of the run")


@dataclass(frozen=True, kw_only=True)
class Example(Base):
    width: int = required("width", integer(1, 8))
    rate: float = key(0.1, "rate", variable="RATE")
    fast: bool = key(False, "fast", variable="FAST")
    mode: Literal["a", "b"] | None = key(None, "mode")
    files: tuple[str, ...] = key((), "files", flag="--file", metavar="FILE")


def test_keys_are_declared_once_and_inherited_in_order():
    keys = keys_of(Example)
    assert list(keys) == ["steps", "name", "width", "rate", "fast", "mode", "files"]
    assert (keys["name"].default, keys["name"].help) == ("run", "name of the run")
    assert (keys["files"].flag, keys["files"].metavar, keys["rate"].variable) == ("--file", "FILE", "RATE")
    with pytest.raises(TypeError, match="width"):
        Example()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("width", 9, "an integer from 1 to 8"),
        ("name", "", "a non-empty string"),
        ("name", 3, "a non-empty string"),
        ("rate", "x", "a number"),
        ("rate", float("nan"), "a number"),
        ("rate", 10**400, "a number"),
        ("rate", True, "a number"),
        ("fast", 1, "true or false"),
        ("mode", "c", '"a" or "b", or null'),
        ("files", "a.txt", "a list of strings"),
        ("files", [1], "a list of strings"),
    ],
)
def test_a_key_without_a_check_accepts_the_values_of_its_type(name, value, expected):
    assert misfits(keys_of(Example), {name: value}) == [(name, value, expected, None)]
    with pytest.raises(UsageError, match="expected"):
        Example(**{"width": 1, name: value})


def test_right_values_of_every_type_are_accepted():
    right = {"steps": 1, "name": "x", "width": 8, "rate": 1, "fast": True, "mode": "b", "files": ["a"]}
    assert misfits(keys_of(Example), right) == []
    assert Example(**right).to_json() == right


def test_flags_are_json_where_the_key_accepts_that_and_text_otherwise():
    flags = {"steps": "3", "name": "12", "fast": "true", "mode": "null", "rate": "1e-3"}
    assert from_flags(Example, flags) == {"steps": 3, "name": "12", "fast": True, "mode": None, "rate": 0.001}
    with pytest.raises(
        UsageError, match=r'^the flags: steps is 0; expected .*; fast is "maybe"; expected true or false$'
    ):
        from_flags(Example, {"steps": "0", "fast": "maybe"})


def test_environment_variables_set_the_keys_that_name_them():
    assert from_environment(Example, {"RATE": ".5", "FAST": "1", "NAME": "x"}) == {"rate": 0.5, "fast": True}
    assert from_environment(Example, {"RATE": "", "HOME": "/"}) == {}
    with pytest.raises(UsageError, match=r"^RATE is much; expected a number; FAST is on; expected 0 or 1$"):
        from_environment(Example, {"RATE": "much", "FAST": "on"})


def test_a_toml_file_that_cannot_be_read_is_one_line(tmp_path):
    path = tmp_path / "a.toml"
    with pytest.raises(DataError, match=r"a.toml: cannot be read \(No such file or directory\); expected a recipe$"):
        read_toml(path, what="expected a recipe")
    for content in (b"a = [", b"\xff", b"a = 1\na = 2", b"a = " + b"[" * 20_000):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"a.toml: not valid TOML: [^\n]+$"):
            read_toml(path, what="", error=UsageError)
    path.write_text("[a]\nb = 1")
    assert read_toml(path, what="") == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOENT, UsageError), (errno.EMFILE, DataError), (errno.EIO, DataError)]
)
def test_a_file_that_the_system_cannot_read_is_no_fault_of_the_command(monkeypatch, code, kind):
    def fails(path):
        raise OSError(code, "it fails", str(path))

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(kind, match=r"^a.json: cannot be read \(it fails\)"):
        read_values(Path("a.json"))
