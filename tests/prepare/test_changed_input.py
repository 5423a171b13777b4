from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_fixtures import build, conversations, digests, left_beside, lines

from chatmill.errors import ChatmillError, DataError
from chatmill.prepare import pipeline
from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.prepare.rejects import CountedRecords, Rejects
from chatmill.records import read_records
from chatmill.records.raw_files import LoggedFile, has_bytes
from chatmill.records.read_log import ReadLog
from chatmill.tokenizer import train_bpe

UNIT_BYTES = 1_000


def job_of(inputs: tuple[str, ...], **options: Any) -> Job:
    return Job((InputSource(inputs),), **options)


def file_of(kind: str, word: str, count: int = 40) -> bytes:
    """Return the content of an input file; two words of equal length give files of equal size."""
    records = [
        {"messages": [{"role": "user", "content": f"q{n:05d}"}, {"role": "assistant", "content": word * 9}]}
        for n in range(count)
    ]
    if kind == ".jsonl.gz":
        return gzip.compress(lines(records), 0, mtime=0)
    if kind == ".parquet":
        table = pyarrow.Table.from_pylist(records)
        pyarrow.parquet.write_table(table, stored := pyarrow.BufferOutputStream(), compression="none")
        return bytes(stored.getvalue())
    if kind == ".json":
        return json.dumps(records).encode()
    if kind == ".txt":
        return "".join(f"<|USER|> q{n} <|ASSISTANT|> {word * 9} <|END|>\n<|EOS|>\n" for n in range(count)).encode()
    return lines(records)


def write(path: Path, data: bytes) -> None:
    times = path.stat() if path.exists() else None
    with path.open("r+b" if times else "wb") as file:
        file.write(data)
        file.truncate()
    if times:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def replace(path: Path, data: bytes) -> None:
    times = path.stat()
    (other := path.with_name("other")).write_bytes(data)
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)


def after(units: int, change: Callable[[], Any]) -> Callable[[Any], None]:
    seen = 0

    def on_progress(progress: Any) -> None:
        nonlocal seen
        seen += progress.step == "render"
        if seen == units:
            seen += 1
            change()

    return on_progress


def interrupted(job: Any, target: Path, units: int = 3) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(job, target, engine=LocalEngine(1), unit_bytes=UNIT_BYTES, on_progress=after(units, stop))


KINDS = (".jsonl", ".jsonl.gz", ".json", ".txt", ".parquet")


@pytest.mark.parametrize("changed_by", [write, replace])
@pytest.mark.parametrize("kind", KINDS)
def test_resume_detects_changed_bytes_with_the_same_size_and_time(tmp_path, kind, changed_by):
    first, last = tmp_path / f"a{kind}", tmp_path / "b.jsonl"
    write(first, file_of(kind, "old"))
    write(last, file_of(".jsonl", "old"))
    job, target = job_of((str(first), str(last))), tmp_path / "x"
    interrupted(job, target)
    before = sorted((tmp_path / ".x.building.units").iterdir())
    changed_by(first, file_of(kind, "new"))
    with pytest.raises(ChatmillError, match=rf"a{kind}: changed since the interrupted build read it; build without"):
        prepare_dataset(job, target, engine=LocalEngine(1), unit_bytes=UNIT_BYTES, resume=True)
    # The failed attempt to resume keeps all finished units, so the build can be resumed after the input is restored.
    assert sorted((tmp_path / ".x.building.units").iterdir()) == before
    changed_by(first, file_of(kind, "old"))
    build(job, target, unit_bytes=UNIT_BYTES, resume=True)
    build(job, tmp_path / "whole")
    assert digests(target) == digests(tmp_path / "whole")


def test_resume_ignores_changed_times_and_bytes_that_no_unit_has_read(tmp_path):
    path, target = tmp_path / "a.jsonl", tmp_path / "x"
    write(path, file_of(".jsonl", "old"))
    job = job_of((str(path),))
    interrupted(job, target)
    changed = file_of(".jsonl", "old")
    changed = changed[:-800] + changed[-800:].replace(b"old", b"new")
    replace(path, changed)
    os.utime(path, ns=(1, 1))
    build(job, target, unit_bytes=UNIT_BYTES, resume=True)
    build(job, tmp_path / "whole")
    assert digests(target) == digests(tmp_path / "whole")


def test_resume_detects_new_files_of_a_glob_and_an_empty_file_that_was_filled(tmp_path):
    write(tmp_path / "a.jsonl", file_of(".jsonl", "old"))
    write(tmp_path / "b.jsonl", b"")
    job, target = job_of((str(tmp_path / "*.jsonl"),)), tmp_path / "x"
    interrupted(job, target)
    for name in ("b.jsonl", "c.jsonl"):
        write(tmp_path / name, lines(conversations(1)))
        with pytest.raises(DataError, match="had a different job or input"):
            prepare_dataset(job, target, engine=LocalEngine(1), unit_bytes=UNIT_BYTES, resume=True)
        write(tmp_path / "b.jsonl", b"")


@pytest.mark.parametrize("change", ["a declared token", "the template"])
def test_resume_detects_changed_files_of_the_tokenizer_folder(tmp_path, change):
    folder, path, target = tmp_path / "folder", tmp_path / "a.jsonl", tmp_path / "x"
    write(path, file_of(".jsonl", "old"))
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(
        train_bpe(["a b c"], vocab_size=300, control=["<|im_start|>", "<|im_end|>"])
    )
    turn = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}"
    config = {"chat_template": "{% for m in messages %}" + turn + "{% endfor %}", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    job = job_of((str(path),), tokenizer=str(folder), format="template")
    interrupted(job, target)
    if change == "a declared token":
        config["added_tokens_decoder"] = {"302": {"content": "<new>", "special": True}}
    else:
        config["chat_template"] += "{# other #}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="had a different job or input"):
        prepare_dataset(job, target, engine=LocalEngine(1), unit_bytes=UNIT_BYTES, resume=True)


def test_rejects_next_to_the_input_are_not_read_as_input(tmp_path):
    write(tmp_path / "a.jsonl", b"{}\n" + file_of(".jsonl", "old", 2))
    records = CountedRecords([str(tmp_path / "*.jsonl")], on_error="skip", rejects=tmp_path / "rejects.jsonl")
    with records:
        assert len(list(records)) == 2
    assert records.ledger.total("read").rows == 3


CHANGES: dict[str, tuple[Callable[[Path, bytes], Any], str]] = {
    "other bytes": (lambda path, data: write(path, data.replace(b"old", b"new")), "was changed"),
    "another file": (lambda path, data: replace(path, data.replace(b"old", b"new")), "was changed"),
    "longer": (lambda path, data: write(path, data * 2), "grew from .* to .* bytes"),
    "one more line": (lambda path, data: write(path, data + lines(conversations(1))), "grew from .* to .* bytes"),
    "shorter": (lambda path, data: write(path, data[:-100]), "shrank from .* to .* bytes"),
    "empty": (lambda path, data: write(path, b""), "shrank from .* to 0 bytes"),
    "gone": (lambda path, data: path.unlink(), "(cannot|could no longer) be opened"),
    "moved line ends": (lambda path, data: write(path, data[1000:] + data[:1000]), "was changed|[0-9]+: invalid"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("moment", ["before the first unit", "after a unit"])
def test_a_file_that_changes_while_the_build_runs_stops_it(tmp_path, monkeypatch, change, moment):
    path, target, data = tmp_path / "a.jsonl", tmp_path / "x", file_of(".jsonl", "old")
    write(path, data)
    changed_by, expected = CHANGES[change]
    job, options = job_of((str(path),)), {}
    if moment == "after a unit":
        options["on_progress"] = after(2, lambda: changed_by(path, data))
    else:
        # The renderer is opened after planning and before the first unit.
        renderer = pipeline.job_renderer(job)
        monkeypatch.setattr(pipeline, "job_renderer", lambda job: [changed_by(path, data), renderer][1])
    if (change, moment) in (("other bytes", "before the first unit"), ("another file", "before the first unit")):
        # The lines of the new file have the same lengths, and all units read the new file, so the build succeeds.
        prepare_dataset(job, target, engine=LocalEngine(1), unit_bytes=UNIT_BYTES, **options)
        monkeypatch.undo()
        build(job, tmp_path / "whole")
        assert digests(target) == digests(tmp_path / "whole")
        return
    with pytest.raises(DataError, match=rf"a.jsonl:( ?)({expected})"):
        prepare_dataset(job, target, engine=LocalEngine(1), unit_bytes=UNIT_BYTES, **options)
    assert left_beside(target) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_that_is_undone_before_the_end_is_detected(tmp_path, kind):
    paths = [tmp_path / f"{name}{kind}" for name in "abc"]
    for path in paths:
        write(path, file_of(kind, "old", 10))
    undo = after(2, lambda: write(paths[1], file_of(kind, "old", 10)))
    change = after(1, lambda: write(paths[1], file_of(kind, "new", 10)))
    with pytest.raises(DataError, match=rf"b{kind}: was changed while it was being read; build again"):
        prepare_dataset(
            job_of(tuple(map(str, paths))),
            tmp_path / "x",
            engine=LocalEngine(1),
            on_progress=lambda progress: [undo(progress), change(progress)],
        )


def test_touching_or_copying_a_file_is_not_a_change(tmp_path):
    path, data = tmp_path / "a.jsonl", file_of(".jsonl", "old")
    write(path, data)
    job = job_of((str(path),))
    for number, change in enumerate([lambda: os.utime(path), lambda: path.chmod(0o600), lambda: replace(path, data)]):
        prepare_dataset(
            job, tmp_path / str(number), engine=LocalEngine(1), unit_bytes=UNIT_BYTES, on_progress=after(2, change)
        )
    assert digests(tmp_path / "0") == digests(tmp_path / "1") == digests(tmp_path / "2")


def test_a_new_file_of_a_glob_stops_the_build_unless_it_is_the_rejects_file(tmp_path):
    write(tmp_path / "a.jsonl", b"{}\n" + file_of(".jsonl", "old"))
    job = job_of((str(tmp_path / "*.jsonl"),), on_error="skip")
    with pytest.raises(DataError, match=r"b.jsonl: appeared while the input was being read, and matches .*/\*\.jsonl"):
        prepare_dataset(
            job,
            tmp_path / "x",
            engine=LocalEngine(1),
            on_progress=after(1, lambda: write(tmp_path / "b.jsonl", b"{}\n")),
        )
    (tmp_path / "b.jsonl").unlink()
    rejects = Rejects(tmp_path / "rejects.jsonl")
    prepare_dataset(
        job, tmp_path / "x", engine=LocalEngine(1), on_fault=rejects, on_progress=after(1, rejects.__enter__)
    )
    rejects.__exit__()
    assert rejects.counts.total() == 1


def test_a_named_pipe_is_refused_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a.jsonl: is a pipe or a device; write its output to a file"):
        build(job_of((str(tmp_path / "a.jsonl"),)), tmp_path / "x")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["other bytes", "another file", "longer", "shorter", "gone"])
def test_reading_records_of_a_changing_file_ends_with_an_error(tmp_path, kind, change):
    path = tmp_path / f"a{kind}"
    data = file_of(kind, "old")
    write(path, data)
    records = read_records([path])
    next(records)
    CHANGES[change][0](path, data)
    with pytest.raises(DataError, match=rf"a{kind}: {CHANGES[change][1]}.* while it was being read; build again"):
        list(records)


@given(
    data=st.binary(min_size=1, max_size=40),
    reads=st.lists(st.tuples(st.integers(0, 45), st.integers(0, 45)), max_size=6),
    at=st.integers(0, 39),
)
def test_a_read_log_covers_exactly_the_bytes_that_were_read(tmp_path_factory, data, reads, at):
    path = tmp_path_factory.getbasetemp() / "logged"
    path.write_bytes(data)
    log = ReadLog()
    with LoggedFile(path, log) as file:
        # No read starts past the end of the file.
        reads = [(start % (len(data) + 1), count) for start, count in reads]
        for start, count in reads:
            file.seek(start)
            file.read(count)
    read, at = log.bytes_read(), at % len(data)
    assert has_bytes(path, read)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert has_bytes(path, read) == all(not start <= at < start + count for start, count in reads)
    path.write_bytes(data + b"x")
    assert has_bytes(path, read) == (not read.ends)
