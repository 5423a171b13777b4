from __future__ import annotations

import errno
import hashlib
import os
from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chatmill.audit.log import START, AuditError, AuditLog, LogLine, TornLine, parse_line, read_log, write_line
from chatmill.errors import DataError
from chatmill.store import files

TIME = datetime(2026, 1, 3, 16, 44, 19, 628_000, tzinfo=UTC)
HEAD = "2026-01-03T16:44:19.628Z | TRAINING | INFO | "
fields = st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True), st.text()).filter(
    lambda found: not {"action", "previous"} & found.keys()
)


def clock() -> datetime:
    return TIME


def test_lines_are_written_as_documented():
    fields = {"epoch": 0, "seed": 42, "first_episode_ids": [173, 274, 489], "shuffled": True, "none": None}
    line = write_line(TIME, "epoch_start", fields, START).decode()
    assert line == (
        HEAD + 'action=epoch_start | epoch=0 | seed=42 | first_episode_ids="[173, 274, 489]" | shuffled=true | '
        f"none=null | previous={START}"
    )


@given(fields)
@example({"name": "a | action=checkpoint"})
@example({"name": '" | seed=1 | x="'})
@example({"name": "two\nlines\r\x1e\x85\u2028"})
@example({"name": '"quoted"', "empty": "", "backslash": "\\"})
def test_no_value_can_forge_a_field_or_a_line(fields):
    raw = write_line(TIME, "dataset_load", fields, START)
    line = parse_line(raw)
    assert line.fields == fields and line.action == "dataset_load" and line.previous == START
    text = raw.decode("ascii")
    assert len(text.splitlines()) == 1
    assert len(text.split(" | ")) == 3 + 1 + len(fields) + 1


@given(fields, st.data())
def test_a_changed_line_parses_to_other_values_or_is_rejected(fields, data):
    raw = bytearray(write_line(TIME, "steps", fields, START))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    try:
        found = parse_line(bytes(raw))
    except DataError:
        return
    again = write_line(datetime.fromisoformat(found.time), found.action, found.fields, found.previous)
    assert again == bytes(raw)
    assert (found.time, found.action, found.fields, found.previous) != (TIME, "steps", fields, START)


@given(st.integers(0, 200))
def test_a_truncated_line_is_rejected(cut):
    raw = write_line(TIME, "steps", {"first_step": 0, "stop_step": 5, "digest": "ab"}, START)
    with pytest.raises(DataError):
        parse_line(raw[: min(cut, len(raw) - 1)])


def test_each_line_contains_the_hash_of_the_previous_line(tmp_path):
    log = AuditLog.create(tmp_path / "logs" / "audit", clock=clock)
    heads = [log.add("checkpoint", {"step": step}) for step in range(3)]
    log.close()
    raw = log.path.read_bytes().split(b"\n")
    assert log.path.name == "audit_20260103T164419Z.log" and raw.pop() == b""
    assert [hashlib.sha256(line).hexdigest() for line in raw] == heads
    assert [line.previous for line in read_log(log.path)] == [START, *heads[:2]]


def test_two_runs_started_in_the_same_second_have_separate_logs(tmp_path):
    names = [AuditLog.create(tmp_path, clock=clock).path.name for _ in range(3)]
    assert names == ["audit_20260103T164419Z.log", "audit_20260103T164419Z_1.log", "audit_20260103T164419Z_2.log"]


def test_a_log_that_another_run_writes_is_refused(tmp_path):
    log = AuditLog.create(tmp_path, clock=clock)
    head = log.add("checkpoint", {"step": 1})
    with pytest.raises(AuditError, match="another run is writing this log"):
        AuditLog.reopen(log.path, head=head)
    log.close()
    AuditLog.reopen(log.path, head=head)[0].close()


def test_a_continued_log_keeps_abandoned_lines(tmp_path):
    log = AuditLog.create(tmp_path, clock=clock)
    head = log.add("checkpoint", {"step": 1})
    log.add("steps", {"first_step": 1})
    log.add("steps", {"first_step": 2})
    log.close()
    before = log.path.read_bytes()
    again, left = AuditLog.reopen(log.path, head=head, clock=clock)
    assert left == {"head": head, "abandoned": 2}
    again.add("resume", left)
    again.close()
    assert log.path.read_bytes().startswith(before)
    lines = read_log(log.path)
    assert [line.previous for line in lines[1:]] == [line.sha256 for line in lines[:-1]]


@pytest.mark.parametrize("keep", [1, 60, -70, -1])
def test_a_torn_line_stays_and_the_next_line_records_it(tmp_path, keep):
    log = AuditLog.create(tmp_path, clock=clock)
    head = log.add("checkpoint", {"step": 1})
    log.add("steps", {"first_step": 1})
    log.close()
    whole = log.path.read_bytes()
    first = whole.index(b"\n") + 1
    torn = whole[first:-1][:keep]
    log.path.write_bytes(whole[:first] + torn)
    assert isinstance(read_log(log.path)[1], TornLine)
    again, left = AuditLog.reopen(log.path, head=head, clock=clock)
    assert left == {
        "head": head,
        "abandoned": 0,
        "torn_bytes": len(torn),
        "torn_sha256": hashlib.sha256(torn).hexdigest(),
    }
    again.add("resume", left)
    again.close()
    assert log.path.read_bytes().startswith(whole[:first] + torn + b"\n")
    first_line, found, resumed = read_log(log.path)
    assert isinstance(found, TornLine) and found.raw == torn and resumed.previous == first_line.sha256


def test_a_line_that_lacks_only_its_line_break_counts(tmp_path):
    log = AuditLog.create(tmp_path, clock=clock)
    head = log.add("checkpoint", {"step": 1})
    log.add("steps", {"first_step": 1})
    log.close()
    log.path.write_bytes(log.path.read_bytes()[:-1])
    again, left = AuditLog.reopen(log.path, head=head, clock=clock)
    again.add("resume", left)
    assert left == {"head": head, "abandoned": 1}
    assert all(isinstance(line, LogLine) for line in read_log(log.path)) and len(read_log(log.path)) == 3


def test_a_log_without_the_checkpoint_line_is_not_continued(tmp_path):
    log = AuditLog.create(tmp_path, clock=clock)
    log.add("checkpoint", {"step": 1})
    head = log.add("checkpoint", {"step": 2})
    log.close()
    lines = log.path.read_bytes().split(b"\n")
    log.path.write_bytes(lines[0] + b"\n")
    with pytest.raises(
        AuditError, match=f"no line has the hash {head[:12]}… that the checkpoint records; the log was trunc"
    ):
        AuditLog.reopen(log.path, head=head)
    with pytest.raises(AuditError, match="cannot continue the audit log"):
        AuditLog.reopen(tmp_path / "audit_gone.log", head=head)


class FullDisk(files.Disk):
    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, fd, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(fd, data[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("room", [0, 100])
def test_a_line_that_cannot_be_written_raises_an_error(tmp_path, monkeypatch, room):
    log = AuditLog.create(tmp_path, clock=clock)
    head = log.add("checkpoint", {"step": 1})
    monkeypatch.setattr(files, "disk", FullDisk(room))
    for line in ("cannot write the audit log .No space left on device.", "is closed, or an earlier write failed"):
        with pytest.raises(AuditError, match=line):
            log.add("steps", {"first_step": 1})
    monkeypatch.undo()
    again, left = AuditLog.reopen(log.path, head=head, clock=clock)
    assert left.get("torn_bytes", 0) == room
    again.close()


def test_durable_lines_are_synced(tmp_path, monkeypatch):
    synced = []
    log = AuditLog.create(tmp_path, clock=clock)
    monkeypatch.setattr(files.Disk, "sync", lambda self, path: synced.append(path))
    log.add("steps", {"first_step": 1})
    assert synced == []
    log.add("checkpoint", {"step": 1}, durable=True)
    assert synced == [log.path]
