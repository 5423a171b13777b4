from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from chatmill.records import Record, read_records, standard_input

Read = Callable[..., tuple[list[Record], list[str]]]


@pytest.fixture
def read_bytes(tmp_path, monkeypatch) -> Read:
    """`read_bytes(data, name="a.jsonl", **options)` returns the records and the error lines."""
    monkeypatch.chdir(tmp_path)

    def read_file(data: bytes, name: str = "a.jsonl", **options: Any) -> tuple[list[Record], list[str]]:
        (tmp_path / name).write_bytes(data)
        faults: list[str] = []
        records = list(
            read_records([name], on_error="skip", on_reject=lambda fault: faults.append(str(fault)), **options)
        )
        return records, faults

    return read_file


@pytest.fixture
def memory():
    """The file system of memory:// URLs, empty before and after each test."""
    import fsspec  # Imported here, because `make sanitize` runs tests of this folder without fsspec.

    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


@pytest.fixture
def pipe(monkeypatch):
    """`pipe(data, is_terminal=False)` replaces standard input with `data`."""

    def give(data: bytes, *, is_terminal: bool = False) -> None:
        standard_input.remove_standard_input()
        stdin = SimpleNamespace(buffer=io.BytesIO(data), closed=False, isatty=lambda: is_terminal)
        monkeypatch.setattr(sys, "stdin", stdin)

    yield give
    standard_input.remove_standard_input()
