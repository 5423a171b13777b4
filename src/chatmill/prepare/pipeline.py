"""The pipeline: from a job to a published dataset, in one call."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.errors import DataError, RecordError
from chatmill.ledger import Ledger
from chatmill.prepare.assemble import assemble
from chatmill.prepare.engine import Engine, Local
from chatmill.prepare.job import Job
from chatmill.prepare.staging import Staged
from chatmill.prepare.unit import Done, Tools, Unit, make_tools
from chatmill.records import plan
from chatmill.store import files
from chatmill.store.metadata import Metadata, write_metadata
from chatmill.store.publish import check_target, publish, recover, staging_for

UNIT_BYTES = 4 * 2**20
"""Input that makes a unit, if the file can be cut. It changes the work, never the bytes that come out."""
UNITS = "units"
JOB = "job.json"


@dataclass(frozen=True)
class Progress:
    """Where a build is: `step` is render or write; sizes are bytes of input, then tokens."""

    step: str
    done: int
    total: int
    rows: int
    tokens: int


def prepare(
    job: Job,
    target: Path,
    *,
    engine: Engine | None = None,
    overwrite: bool = False,
    resume: bool = False,
    unit_bytes: int = UNIT_BYTES,
    on_fault: Callable[[RecordError], None] = lambda fault: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    tools: Tools | None = None,
) -> Metadata:
    """Build the dataset that `job` describes at `target`: it appears whole, or not at all."""
    job.check()
    recover(target)
    check_target(target, overwrite=overwrite)
    units = units_of(job, unit_bytes)
    _refuse_output_in_input(units, target)
    tools = tools or make_tools(job)
    staging = staging_for(target)
    with _staging(staging, _fingerprint(job, tools, units), resume=resume) as found:
        folder = staging / UNITS
        ledger = Ledger()
        for done in _render(units, job, tools, folder, engine or Local(), found, on_progress):
            ledger.merge(done.ledger)
            for fault in done.faults:
                on_fault(fault)
        rendered = ledger.total("rendered")
        written = 0

        def on_tokens(count: int) -> None:
            nonlocal written
            written += count
            on_progress(Progress("write", written, rendered.tokens, rendered.rows, written))

        vocab_size = tools.tokenizer.vocab_size
        splits = assemble(
            units, folder, job, vocab_size=vocab_size, staging=staging, ledger=ledger, on_tokens=on_tokens
        )
        ledger.check()
        special = tools.tokenizer.special_token_ids()
        metadata = write_metadata(
            staging,
            vocab_size=vocab_size,
            format=_format_json(tools),
            tokenizer={"name": tools.tokenizer.name, "sha256": tools.tokenizer.sha256},
            tokenizer_state=_tokenizer_state(job, tools),
            special_token_ids=special,
            pad_token_id=special[tools.format.eot],
            splits=splits,
            ledger=ledger,
            config=_config(job, units),
        )
        files.remove_tree(folder)
        files.disk.remove(staging / JOB)
        publish(staging, target, overwrite=overwrite)
    return metadata


def units_of(job: Job, unit_bytes: int) -> list[Unit]:
    """The pieces of the input, in its order."""
    parts = [
        (part, source) for source in job.sources for part in plan(source.inputs, shape=source.shape, source=source.name)
    ]
    names = relative_names([part.path for part, _ in parts])
    units: list[Unit] = []
    for (part, source), name in zip(parts, names, strict=True):
        for piece in part.cut(unit_bytes):
            units.append(Unit(len(units), piece, name, source.train_on or job.train_on, source.only_val))
    if not units:
        raise DataError("the input is empty; there is nothing to prepare")
    return units


def relative_names(paths: Sequence[Path]) -> list[str]:
    """Names for files that are the same wherever the files lie: as given, or from the folder all have in common."""
    absolute = [path for path in paths if path.is_absolute()]
    common = os.path.commonpath([path.parent for path in absolute]) if absolute else ""
    return [str(path.relative_to(common)) if path.is_absolute() else str(path) for path in paths]


def _render(
    units: Sequence[Unit],
    job: Job,
    tools: Tools,
    folder: Path,
    engine: Engine,
    found: bool,
    on_progress: Callable[[Progress], None],
) -> Iterator[Done]:
    """What each unit leaves, in order; of an interrupted build, those that are whole are not run again."""
    finished = {unit.number: done for unit in units if found and (done := _finished(unit, folder)) is not None}
    left = [unit for unit in units if unit.number not in finished]
    running = engine.run(left, job, tools, folder) if left else iter(())
    total, seen, rows, tokens = sum(unit.size for unit in units), 0, 0, 0
    for unit in units:
        done = finished.get(unit.number) or next(running)
        seen += unit.size
        rows += done.ledger.total("rendered").rows
        tokens += done.ledger.total("rendered").tokens
        on_progress(Progress("render", seen, total, rows, tokens))
        yield done


def _finished(unit: Unit, folder: Path) -> Done | None:
    path = unit.path(folder)
    if not path.exists():
        return None
    try:
        staged = Staged(path, check=True)
    except (DataError, ValueError, KeyError, OSError):
        path.unlink()
        return None
    ledger = Ledger.from_json(staged.extra["ledger"])
    if ledger.total("rejected").rows:
        # Its faults were to be reported, and are not kept: the unit is run again.
        path.unlink()
        return None
    return Done(unit.number, ledger, (), unit.size)


@contextmanager
def _staging(staging: Path, fingerprint: dict[str, Any], *, resume: bool) -> Iterator[bool]:
    """A folder to build in, ours alone; yields whether an interrupted build of the same job was found there."""
    files.make_folder(staging.parent)
    lock = os.open(staging.with_name(f"{staging.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{staging}: another process is building this dataset; wait for it") from None
        text = json.dumps(fingerprint, sort_keys=True).encode()
        found = resume and (staging / JOB).is_file() and (staging / JOB).read_bytes() == text
        if resume and staging.is_dir() and not found:
            raise DataError(
                f"{staging}: the interrupted build was of another job or other input; build without --resume"
            )
        if staging.is_dir():
            # Shards are written anew from the units, which is quick and gives the same bytes.
            for path in sorted(staging.iterdir()):
                if path.is_dir() and not (found and path.name == UNITS):
                    files.remove_tree(path)
                elif path.is_file() and not found:
                    files.disk.remove(path)
        files.make_folder(staging / UNITS)
        if not found:
            files.write_file(staging / JOB, text, overwrite=True)
        yield found
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, OSError) and staging.is_dir():
            # Bad input leaves nothing behind; a kill or a full disk leaves what --resume needs.
            files.remove_tree(staging)
        raise
    finally:
        os.close(lock)
        staging.with_name(f"{staging.name}.lock").unlink(missing_ok=True)


def _fingerprint(job: Job, tools: Tools, units: Sequence[Unit]) -> dict[str, Any]:
    """What an interrupted build must agree in to be gone on with."""
    inputs = [
        (str(unit.part.path), unit.part.start, unit.part.stop, unit.part.shape, *_identity(unit.part.path))
        for unit in units
    ]
    return {"job": job.to_json(), "tokenizer": tools.tokenizer.sha256, "inputs": inputs}


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _refuse_output_in_input(units: Sequence[Unit], target: Path) -> None:
    place = target.absolute()
    for unit in units:
        if place in unit.part.path.absolute().parents:
            raise DataError(f"{target}: holds the input {unit.part.path}; write the dataset somewhere else")


def _format_json(tools: Tools) -> dict[str, Any]:
    format = tools.format
    return {
        "name": format.name,
        "tokens": dict(format.tokens),
        "turns": {role: [turn.open, turn.close] for role, turn in format.turns.items()},
        "trained": list(format.trained),
        "default_system": format.default_system,
        "begin": format.begin,
        "end": format.end,
        "body": dict(format.body),
    }


def _tokenizer_state(job: Job, tools: Tools) -> dict[str, Any]:
    return {
        "name": tools.tokenizer.name,
        "sha256": tools.tokenizer.sha256,
        "vocab_size": tools.tokenizer.vocab_size,
        "special_token_ids": tools.tokenizer.special_token_ids(),
        "control": dict(tools.format.tokens),
        "added_tokens": job.add_tokens,
    }


def _config(job: Job, units: Sequence[Unit]) -> dict[str, Any]:
    """The job as the dataset remembers it: what changed its bytes, and not where the files lay."""
    config = job.to_json()
    del config["tokenizer"], config["on_error"], config["format"]
    read = dict.fromkeys((unit.name, unit.part.shape, unit.part.source, unit.train_on, unit.only_val) for unit in units)
    config["sources"] = [list(source) for source in read]
    return config
