"""Skipped records are written down with their reasons, and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatmill.errors import RecordError, UsageError
from chatmill.records import Rejects, read_records

GOOD = b'{"messages": [{"role": "user", "content": "q"}]}'
LONG = b'{"id": "x", "messages": "' + b"\xc3\xa9" * 4000 + b'"}'


def test_each_reject_has_its_place_its_reason_and_its_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([GOOD, b"{\xff", GOOD, LONG]))
    (tmp_path / "b.jsonl").write_bytes(b"\n".join([b'{"messages": []}', GOOD, b"\xfe"]))
    with Rejects("rejects.jsonl") as rejects:
        found = [(r.file, r.line) for r in read_records(["a.jsonl", "b.jsonl"], on_error="skip", on_reject=rejects)]
    assert found == [("a.jsonl", 1), ("a.jsonl", 3), ("b.jsonl", 2)]
    lines = [json.loads(line) for line in (tmp_path / "rejects.jsonl").read_text(encoding="utf-8").splitlines()]
    utf8 = "not UTF-8 at column {} (byte 0x{}); expected UTF-8 text"
    place = {"file": "a.jsonl", "line": 2, "id": None}
    assert lines == [
        {**place, "kind": "utf8", "reason": utf8.format(2, "ff"), "raw": "{�"},
        {
            "file": "a.jsonl",
            "line": 4,
            "id": "x",
            "kind": "type",
            "reason": "the record has a string as messages; expected a list of messages",
            "raw": LONG[:4096].decode(errors="replace"),
        },
        {
            "file": "b.jsonl",
            "line": 1,
            "id": None,
            "kind": "empty",
            "reason": "the record has an empty list as messages; expected at least one message",
            "raw": '{"messages": []}',
        },
        {"file": "b.jsonl", "line": 3, "id": None, "kind": "utf8", "reason": utf8.format(1, "fe"), "raw": "�"},
    ]
    assert rejects.counts == {"utf8": 2, "type": 1, "empty": 1}


def test_nothing_rejected_leaves_an_empty_file(tmp_path):
    with Rejects(tmp_path / "rejects.jsonl") as rejects:
        pass
    assert (tmp_path / "rejects.jsonl").read_bytes() == b""
    assert rejects.counts == {}


def test_a_reject_outside_of_the_file_is_not_lost_in_silence(tmp_path):
    with pytest.raises(ValueError, match="inside `with Rejects"):
        Rejects(tmp_path / "rejects.jsonl")(RecordError("a", "b", kind="json"))


def test_rejects_are_never_written_over_what_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rejects.jsonl").write_text("as it was")
    Path("link.jsonl").symlink_to("rejects.jsonl")
    for inputs in (["rejects.jsonl"], ["re*.jsonl"], ["link.jsonl"], [tmp_path / "rejects.jsonl"]):
        with pytest.raises(UsageError, match=r"^rejects\.jsonl: is read, and rejects would be written over it"):
            Rejects("rejects.jsonl", inputs)
    assert Path("rejects.jsonl").read_text() == "as it was"
