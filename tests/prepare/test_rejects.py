from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatmill.errors import DataError, RecordError, UsageError
from chatmill.prepare import Rejects
from chatmill.records import expand, read_records

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
            "reason": '"messages" is a string that is not JSON: invalid JSON at column 1 (invalid character); '
            "expected a list of messages, or a list as JSON text",
            "raw": LONG[:4096].decode(errors="replace"),
        },
        {
            "file": "b.jsonl",
            "line": 1,
            "id": None,
            "kind": "empty",
            "reason": "messages is an empty list; expected at least one message",
            "raw": '{"messages": []}',
        },
        {"file": "b.jsonl", "line": 3, "id": None, "kind": "utf8", "reason": utf8.format(1, "fe"), "raw": "�"},
    ]
    assert rejects.counts == {"utf8": 2, "type": 1, "empty": 1}


def test_without_rejects_the_file_is_empty(tmp_path):
    with Rejects(tmp_path / "rejects.jsonl") as rejects:
        pass
    assert (tmp_path / "rejects.jsonl").read_bytes() == b""
    assert rejects.counts == {}


def test_a_reject_outside_the_with_block_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="inside `with Rejects"):
        Rejects(tmp_path / "rejects.jsonl")(RecordError("a", "b", kind="json"))


def test_rejects_are_never_written_over_what_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rejects.jsonl").write_text("as it was")
    Path("link.jsonl").symlink_to("rejects.jsonl")
    Path("hard.jsonl").hardlink_to("rejects.jsonl")
    for inputs in (["rejects.jsonl"], ["re*.jsonl"], ["link.jsonl"], ["hard.jsonl"], [tmp_path / "rejects.jsonl"]):
        with pytest.raises(UsageError, match=r"^rejects\.jsonl: is an input, which the rejects would overwrite"):
            Rejects("rejects.jsonl", reads=expand(inputs), overwrite=True)
    assert Path("rejects.jsonl").read_text() == "as it was"


def rejected(path: Path, **options) -> None:
    with Rejects(path, **options) as rejects:
        rejects(RecordError("a", "b", kind="json"))


def test_only_a_rejects_file_is_replaced_and_only_with_overwrite(tmp_path):
    path = tmp_path / "rejects.jsonl"
    rejected(path)
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"rejects\.jsonl: already exists; use another name or pass --overwrite"):
        Rejects(path)
    rejected(path, overwrite=True)
    assert path.read_bytes() == before
    for other in (b"my notes\n", b"{}\n", b"[1]", b'{"file": 1}\n', b"\xff"):
        path.write_bytes(other)
        with pytest.raises(DataError, match="is not a rejects file, so it is not replaced"):
            Rejects(path, overwrite=True)
        assert path.read_bytes() == other


def test_rejects_are_written_neither_into_the_output_nor_through_a_link(tmp_path):
    output = tmp_path / "ds"
    output.mkdir()
    (tmp_path / "way").symlink_to(output)
    for path in (output / "r.jsonl", tmp_path / "way" / "r.jsonl", output / ".." / "ds" / "r.jsonl", output):
        with pytest.raises(UsageError, match="is the output, or inside it"):
            Rejects(path, output=output)
    (tmp_path / "r.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="a link or a device"):
        Rejects(tmp_path / "r.jsonl", overwrite=True)
    rejected(Path("/dev/null"), overwrite=True)
    assert Path("/dev/null").is_char_device()


def test_rejects_of_an_interrupted_command_are_discarded_and_new_files_are_kept(tmp_path):
    path = tmp_path / "rejects.jsonl"
    stopped = Rejects(path).__enter__()
    stopped(RecordError("a", "b", kind="json"))
    stopped.__exit__(KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="already exists"), Rejects(path):
        path.write_text("mine")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("rejects.jsonl", "mine")]
