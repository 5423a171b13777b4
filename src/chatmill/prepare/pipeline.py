"""`prepare_dataset`: build the dataset that a job describes, and publish it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from chatmill.errors import DataError, RecordError
from chatmill.format import Renderer, resolve_format
from chatmill.ledger import Ledger
from chatmill.plain_file import local_path
from chatmill.prepare.assemble import StagedFile, assemble
from chatmill.prepare.build_dir import BuildDir, build_dir
from chatmill.prepare.engine import Engine, LocalEngine
from chatmill.prepare.job import Job
from chatmill.prepare.unit import Done, Unit, finished, job_renderer, renderer_identity
from chatmill.records import BytesRead, InputFiles, plan
from chatmill.store.layout import WIDE
from chatmill.store.metadata import Metadata, write_metadata
from chatmill.store.publish import check_target, publish, refuse_inside

UNIT_BYTES = 4 * 2**20
"""Bytes of input in a unit, if the file can be cut. It has no influence on the bytes of the dataset."""


@dataclass(frozen=True)
class BuildProgress:
    """Progress of a build: `step` is check (of units to resume), render (in bytes of input) or write (in tokens)."""

    step: str
    done: int
    total: int
    rows: int
    tokens: int


def prepare_dataset(
    job: Job,
    target: str | Path,
    *,
    renderer: Renderer | None = None,
    engine: Engine | None = None,
    overwrite: bool = False,
    resume: bool = False,
    unit_bytes: int = UNIT_BYTES,
    on_fault: Callable[[RecordError], None] = lambda fault: None,
    on_progress: Callable[[BuildProgress], None] = lambda progress: None,
) -> Metadata:
    """Build the dataset that `job` describes at `target`: it appears whole, or not at all.

    >>> job = chatmill.Job((chatmill.InputSource(("data/conversations.jsonl",)),), val_split=0.1)
    >>> metadata = chatmill.prepare_dataset(job, "v1")
    >>> {name: split.num_episodes for name, split in metadata.splits.items()}
    {'train': 356, 'val': 44}

    `renderer` is the one that `job` names, if it is open already. With `resume` the units that an interrupted build
    of the same job completed are used. Each rejected record goes to `on_fault`.
    """
    job.check()
    target = local_path(target)
    check_target(target, overwrite=overwrite)
    inputs = InputFiles([source.inputs for source in job.sources])
    units = units_of(job, inputs, unit_bytes)
    refuse_inside(target, [*(unit.part.path for unit in units), *job.named_files()])
    if renderer is None:
        # The bytes depend on the chosen format, so the job records it.
        job = replace(job, format=resolve_format(job.format, job.tokenizer, chat_template=job.chat_template))
        renderer = job_renderer(job)
    if renderer.uses_date and job.template_date is None:
        # The rows depend on it, so it is part of the job.
        job = replace(job, template_date=datetime.now().date().isoformat())
    if (size := renderer.tokenizer.vocab_size) > WIDE:
        raise DataError(f"{renderer.tokenizer.name}: a vocabulary of {size} ids; at most {WIDE} can be stored")
    fingerprint = _fingerprint(job, renderer, units, inputs)
    with build_dir(target, fingerprint, resume=resume, overwrite=overwrite) as place:
        build = _Build(job, renderer, inputs, units, place, on_progress)
        ledger, staged, read = Ledger(), list[StagedFile](), list[tuple[Path, BytesRead]]()
        with closing(_render(build, engine or LocalEngine())) as rendered:
            for unit, (done, before) in zip(units, rendered, strict=True):
                ledger.merge(done.ledger)
                read.append((unit.part.path, done.read))
                staged += [StagedFile(unit.path(place.units, n), unit.only_val, before) for n in range(done.files)]
                for fault in done.faults:
                    on_fault(fault)
        inputs.check(read, is_planned=lambda: units_of(job, inputs, unit_bytes) == units)
        inputs.check_names()
        metadata = _write(build, staged, ledger)
        publish(place.staging, target, overwrite=overwrite)
    return metadata


def units_of(job: Job, inputs: InputFiles, unit_bytes: int) -> list[Unit]:
    """The units of the input, in its order."""
    parts = [
        (part, source)
        for source, files in zip(job.sources, inputs.groups, strict=True)
        for part in plan(files, shape=source.shape, source=source.name, options=source.options())
    ]
    seen = {part.path.resolve() for part, source in parts if not source.only_val}
    for part, source in parts:
        if source.only_val and part.path.resolve() in seen:
            raise DataError(f"{part.path}: is given for training and for validation; leave it out of one")
    names = relative_names([part.path for part, _ in parts])
    units: list[Unit] = []
    sizes = inputs.sizes
    for (part, source), name in zip(parts, names, strict=True):
        end = sizes[part.path]
        for piece in part.cut(unit_bytes, end=end):
            size = (end if piece.stop is None else piece.stop) - piece.start
            units.append(Unit(len(units), piece, name, source.train_on or job.train_on, source.only_val, size))
    if not units:
        raise DataError("the input is empty; there is nothing to prepare")
    return units


def relative_names(paths: Sequence[Path]) -> list[str]:
    """Names that do not depend on where the files are: as given, or relative to the folder all have in common."""
    if not any(path.is_absolute() for path in paths):
        return [str(path) for path in paths]
    # A path may begin with two slashes, and is then not below one that begins with one.
    absolute = [Path("/", *path.absolute().parts[1:]) for path in paths]
    common = os.path.commonpath([path.parent for path in absolute])
    return [os.path.relpath(path, common) for path in absolute]


@dataclass(frozen=True)
class _Build:
    """What every step of a build needs."""

    job: Job
    renderer: Renderer
    inputs: InputFiles
    units: Sequence[Unit]
    place: BuildDir
    on_progress: Callable[[BuildProgress], None]


def _render(build: _Build, engine: Engine) -> Generator[tuple[Done, int], None, None]:
    """The result of each unit, in order, and the number of lines before it in its file.

    Units that an interrupted build completed are not run again.
    """
    units, place = build.units, build.place
    completed = _completed(build) if place.resumed else {}
    left = [unit for unit in units if unit.number not in completed]
    total, seen, rows, tokens, before = sum(unit.size for unit in units), 0, 0, 0, 0
    with closing(engine.run(left, build.job, build.renderer, place.units)) as running:
        for unit in units:
            if not unit.part.start:
                before = 0
            try:
                done = completed[unit.number] if unit.number in completed else next(running)
            except RecordError as fault:
                # A file that changes under its reader breaks records, too.
                build.inputs.check_times()
                fault.line += before
                raise
            build.inputs.check_size(unit.part.path)
            for passed in done.faults:
                passed.line += before
            seen += unit.size
            rows += done.ledger.total("rendered").rows
            tokens += done.ledger.total("rendered").tokens
            build.on_progress(BuildProgress("render", seen, total, rows, tokens))
            yield done, before
            before += done.lines


def _completed(build: _Build) -> dict[int, Done]:
    """The results of the units that an interrupted build completed; the bytes that they read are read again."""
    completed, checked, total = {}, 0, sum(unit.size for unit in build.units)
    for unit in build.units:
        if (done := finished(unit, build.place.units)) is not None:
            completed[unit.number] = done
        checked += unit.size
        build.on_progress(BuildProgress("check", checked, total, 0, 0))
    return completed


def _write(build: _Build, staged: Sequence[StagedFile], ledger: Ledger) -> Metadata:
    """Write all files of the dataset from staged rows, the metadata last."""
    if not ledger.total("read").rows:
        raise DataError("the input holds no record; there is nothing to prepare")
    rendered, written = ledger.total("rendered", "repeated"), 0

    def on_tokens(count: int) -> None:
        nonlocal written
        written += count
        build.on_progress(BuildProgress("write", written, rendered.tokens, rendered.rows, written))

    job, renderer, staging = build.job, build.renderer, build.place.staging
    tokenizer = renderer.tokenizer
    vocab_size = tokenizer.vocab_size
    splits = assemble(staged, job, vocab_size=vocab_size, staging=staging, ledger=ledger, on_tokens=on_tokens)
    ledger.check()
    special = tokenizer.special_token_ids()
    return write_metadata(
        staging,
        Metadata(
            vocab_size=vocab_size,
            format=renderer.to_json(),
            tokenizer={"name": tokenizer.name, "sha256": tokenizer.sha256},
            special_token_ids=special,
            pad_token_id=special[renderer.eot],
            splits=splits,
            ledger=ledger,
            config=_config(job, build.units),
        ),
        tokenizer_state=tokenizer.state(added_tokens=job.add_tokens),
    )


def _fingerprint(job: Job, renderer: Renderer, units: Sequence[Unit], inputs: InputFiles) -> bytes:
    """What an interrupted build must have in common with this one for its units to be used.

    Of the input it has the sizes: each unit has the hash of the bytes that it read.
    """
    parts = [(str(unit.part.path), unit.part.start, unit.part.stop, unit.part.shape) for unit in units]
    files = {str(path): size for path, size in inputs.sizes.items()}
    identity = {"job": job.to_json(), "renderer": renderer_identity(renderer), "parts": parts, "files": files}
    return json.dumps(identity, sort_keys=True).encode()


def _config(job: Job, units: Sequence[Unit]) -> dict[str, Any]:
    """The job as the dataset stores it: what has an influence on its bytes, and no absolute paths."""
    config = job.to_json()
    of_template = ("chat_template", "template_args", "template_date", "mask", "text_tokens")
    of_answers = ("allow_no_end_token", "strip_prompt_space")
    for key in ("tokenizer", "on_error", "format", *of_template, *of_answers):
        # Stored with the tokenizer or the format, or without influence on the bytes.
        del config[key]
    if not job.unroll:
        # As in datasets from before there was this key, so that their bytes stay the same.
        del config["unroll"]
    read = dict.fromkeys(
        (unit.name, unit.part.shape, unit.part.source, unit.train_on, unit.only_val, unit.part.options)
        for unit in units
    )
    names = ("file", "shape", "source", "train_on", "only_val")
    config["sources"] = [
        dict(zip(names, values, strict=True))
        | {name: value for name, value in asdict(options).items() if value is not None}
        for *values, options in read
    ]
    return config
