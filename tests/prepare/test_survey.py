from __future__ import annotations

import json
import multiprocessing
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from chatmill.errors import DataError, RecordError
from chatmill.ledger import Ledger
from chatmill.prepare.rejects import note_keys
from chatmill.prepare.survey import PART_BYTES, Survey, survey
from chatmill.records import read_records
from chatmill.records.shapes import ShapeOptions

WORKERS = (1, 2, 5)


def message(rng: random.Random, role: str) -> dict:
    fields = {"role": role, "content": "x" * rng.randrange(80)}
    return fields | rng.choice([{}, {}, {"mood": 1}, {"weight": 0}, {"train": None}])


def write(path: Path, seed: int, *, bad: float) -> Path:
    rng = random.Random(seed)
    plain = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    lines = []
    for number in range(400):
        roles = rng.choice([["user", "assistant"], ["system", "user", "assistant"], ["user"], ["user", "tool"]])
        record = {"messages": [message(rng, role) for role in roles], "id": number}
        kind = rng.random()
        if kind < bad:
            lines.append(rng.choice(['{"messages": [{"role": "bot", "content": "x"}]}', "{broken", '{"a": 1}']))
        elif kind < 0.1:
            lines.append("")
        else:
            lines.append(json.dumps(plain if kind < 0.6 else record | rng.choice([{}, {"extra": 1}, {"weight": 2}])))
    path.write_text("\n".join([json.dumps(plain), *lines]) + rng.choice(["", "\n"]))
    return path


def surveyed(inputs: list[Path], workers: int, on_error: str = "skip") -> tuple[Survey, list[tuple]]:
    faults: list[RecordError] = []
    given = {"inputs": list(map(str, inputs)), "shape": None, "options": ShapeOptions(), "on_error": on_error}
    found, files = survey(**given, on_reject=faults.append, workers=workers, part_bytes=900)
    assert [Path(str(part.path)) for part in files] == inputs
    return found, [(fault.file, fault.line, fault.kind, fault.what, fault.raw) for fault in faults]


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_those_of_reading_one_record_after_the_other(tmp_path, seed):
    inputs = [write(tmp_path / f"{name}.jsonl", seed + at, bad=0.04) for at, name in enumerate("ab")]
    faults: list[RecordError] = []
    records = list(read_records(inputs, on_error="skip", on_reject=faults.append))
    ledger = Ledger()
    ledger.add("read", rows=len(records))
    note_keys(ledger, records)
    right = Survey(
        records=len(records),
        with_assistant=sum(any(each.role == "assistant" for each in record.messages) for record in records),
        roles=Counter(each.role for record in records for each in record.messages),
        sources=Counter(record.source for record in records),
        first=records[0],
        ledger=ledger,
    )
    assert len(faults) > 5
    rejected = [(fault.file, fault.line, fault.kind, fault.what, fault.raw) for fault in faults]
    for workers in WORKERS:
        assert surveyed(inputs, workers) == (right, rejected)


def test_empty_files_have_no_records_with_any_number_of_workers(tmp_path):
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in inputs:
        path.write_bytes(b"")
    for workers in WORKERS:
        assert surveyed(inputs, workers) == (Survey(), [])


def test_the_first_error_is_raised_with_any_number_of_workers(tmp_path):
    path = write(tmp_path / "a.jsonl", 9, bad=0.02)
    with pytest.raises(RecordError) as right:
        list(read_records([path]))
    assert right.value.line > 20
    for workers in WORKERS:
        with pytest.raises(RecordError) as error:
            surveyed([path], workers, "stop")
        assert str(error.value) == str(right.value)


@pytest.mark.parametrize("workers", WORKERS)
def test_an_interrupt_ends_the_workers(tmp_path, workers):
    path = write(tmp_path / "a.jsonl", 3, bad=0)
    counts: list[int] = []

    def interrupt(count: int) -> None:
        counts.append(count)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        survey(
            [str(path)],
            shape=None,
            options=ShapeOptions(),
            on_error="stop",
            on_reject=counts.append,
            workers=workers,
            on_records=interrupt,
            part_bytes=900,
        )
    assert len(counts) == 1 and multiprocessing.active_children() == []


def test_a_file_that_changes_is_an_error(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", 1, bad=0)
    from chatmill.prepare import survey as module

    read = module._read

    def changing(part, *args, **named):
        done = read(part, *args, **named)
        if not part.start:
            path.write_text(path.read_text().replace("q", "r"))
        return done

    monkeypatch.setattr(module, "_read", changing)
    with pytest.raises(DataError, match="was changed while it was being read"):
        surveyed([path], 1)


def test_the_command_prints_the_same_for_any_number_of_workers(tmp_path):
    path = write(tmp_path / "a.jsonl", 5, bad=0.03)
    long = {"messages": [{"role": "user", "content": "q" * 2**21}, {"role": "assistant", "content": "a"}]}
    path.write_text(f"{path.read_text()}\n{json.dumps(long)}\n" * 12)
    assert path.stat().st_size > PART_BYTES
    printed = set()
    for workers in WORKERS:
        command = [sys.executable, "-m", "chatmill", "check", str(path), "--on-error", "skip", "--overwrite"]
        options = ["--rejects", str(tmp_path / "rejects.jsonl"), "--workers", str(workers)]
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=True)
        printed.add((done.stdout, done.stderr, (tmp_path / "rejects.jsonl").read_text()))
    assert len(printed) == 1
