from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chatmill.records import Record, read_records

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
