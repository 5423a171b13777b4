"""`prepare_dataset`: build the dataset described by a job, and publish it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from chatmill.config import keys_of
from chatmill.errors import DataError, RecordError
from chatmill.format import Renderer, resolve_format
from chatmill.ledger import Ledger
from chatmill.prepare.assemble import assemble, assemble_by_shard, split_names
from chatmill.prepare.build_dir import BuildDir, build_dir
from chatmill.prepare.cluster_build import ClusterBuild
from chatmill.prepare.dedupe_columns import dedupe_identity
from chatmill.prepare.engine import Engine, LocalEngine
from chatmill.prepare.exclude import NOTHING, Excluded, read_excluded
from chatmill.prepare.filters import Predicate, allowed_predicates, check_languages, filters_of
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.progress import BuildProgress, SourceProgress
from chatmill.prepare.ray_engine import RayEngine
from chatmill.prepare.removed import write_removed
from chatmill.prepare.select import StagedFile, choose
from chatmill.prepare.unit import Done, Unit, finished, job_renderer, renderer_identity
from chatmill.records import BytesRead, InputFiles
from chatmill.records.files import identity, label, shown
from chatmill.records.read import plan_files
from chatmill.records.standard_input import is_standard_input
from chatmill.remote import urls
from chatmill.remote.objects import RemoteError
from chatmill.remote.urls import Place, Url
from chatmill.rows import File
from chatmill.store.files import make_folder
from chatmill.store.layout import REMOVED, WIDE
from chatmill.store.metadata import Metadata, ShardInfo, SplitInfo, write_metadata
from chatmill.store.publish import check_target, names_of, publish, refuse_inside
from chatmill.store.remote_publish import Uploads, check_remote_target, publish_remote, scratch_folder

UNIT_BYTES = 4 * 2**20
"""Bytes of input per unit, if the file can be split. The unit size does not affect the bytes of the dataset."""
MOST_UNITS = 2**16
"""Maximum number of units, limited because one process collects the results. Larger inputs get larger units."""

FORKED_TOKENS = 2**23
"""Below this many tokens, one process can write all shards before other processes have started."""


def prepare_dataset(
    job: Job,
    target: str | Place,
    *,
    renderer: Renderer | None = None,
    engine: Engine | None = None,
    overwrite: bool = False,
    resume: bool = False,
    unit_bytes: int = UNIT_BYTES,
    allow_code: Sequence[str] = (),
    on_fault: Callable[[RecordError], None] = lambda fault: None,
    on_progress: Callable[[BuildProgress], None] = lambda progress: None,
) -> Metadata:
    """Build the dataset described by `job`; it appears at `target` only when it is complete.

    >>> job = chatmill.Job((chatmill.InputSource(("data/conversations.jsonl",)),), val_split=0.1)
    >>> metadata = chatmill.prepare_dataset(job, "v1")
    >>> {name: split.num_episodes for name, split in metadata.splits.items()}
    {'train': 356, 'val': 44}

    Pass `renderer` to reuse a renderer that was already opened for this job. `resume` continues an interrupted build of
    the same job. Rejected records are passed to `on_fault`. `allow_code` lists the filter predicates (module:function)
    that may run.
    """
    job.check()
    check_languages(job)
    predicates = allowed_predicates(job, allow_code)
    where = urls.place(target)
    remote = check_remote_target(where, overwrite=overwrite) if isinstance(where, Url) else None
    # A dataset at a URL is built locally and uploaded shard by shard.
    local = scratch_folder(where) if isinstance(where, Url) else where
    check_target(local, overwrite=overwrite)
    inputs = InputFiles([source.inputs for source in job.sources])
    excluded = read_excluded(job.exclude)
    units = units_of(job, inputs, unit_bytes, predicates, excluded)
    read_here = dict.fromkeys(unit.part.path for unit in units if isinstance(unit.part.path, Path))
    refuse_inside(local, [*read_here, *job.named_files()])
    if renderer is None:
        # The bytes of the dataset depend on the format, so the format is part of the job.
        job = replace(job, format=resolve_format(job.format, job.tokenizer, chat_template=job.chat_template))
        renderer = job_renderer(job)
    if renderer.uses_date and job.template_date is None:
        # The rows depend on the date, so the date is part of the job.
        job = replace(job, template_date=datetime.now().date().isoformat())
    if (size := renderer.tokenizer.vocab_size) > WIDE:
        raise DataError(f"{renderer.tokenizer.name}: has a vocabulary of {size} ids; at most {WIDE} can be stored")
    fingerprint = _fingerprint(job, renderer, units, inputs, excluded)
    cluster = None
    if remote is not None and isinstance(engine, RayEngine):
        cluster = ClusterBuild(engine, remote, fingerprint, resume)
    with (
        build_dir(local, fingerprint, resume=resume, overwrite=overwrite, name=where) as place,
        cluster.opened() if cluster is not None else nullcontext(),
    ):
        build = _Build(job, renderer, inputs, units, place, on_progress, cluster, excluded)
        ledger, staged, read = Ledger(), list[StagedFile](), list[tuple[Place, BytesRead]]()
        engine = engine or LocalEngine()
        with closing(_render(build, engine)) as rendered:
            for unit, (done, before) in zip(units, rendered, strict=True):
                ledger.merge(done.ledger)
                read.append((unit.part.path, done.read))
                staged += _staged(build, unit, done, before)
                for fault in done.faults:
                    on_fault(fault)
        inputs.check(read, is_planned=lambda: units_of(job, inputs, unit_bytes, predicates, excluded) == units)
        inputs.check_names()
        if remote is None:
            metadata = _write(build, staged, ledger, engine=engine)
            publish(place.staging, local, overwrite=overwrite)
        else:
            with Uploads(remote) as uploads:
                metadata = _write(build, staged, ledger, on_shard=uploads.add_shard)
                if cluster is not None:
                    uploads.skip(
                        info
                        for split in metadata.splits.values()
                        for shard in split.shards
                        for info in shard.files.values()
                    )
                publish_remote(place.staging, remote, uploads)
    return metadata


def units_of(
    job: Job,
    inputs: InputFiles,
    unit_bytes: int,
    predicates: Sequence[Predicate] = (),
    excluded: Excluded = NOTHING,
) -> list[Unit]:
    """Split the input files into units, in input order; raise `DataError` if `excluded` names a file that is not part
    of the input.
    """
    parts = [
        (part, number)
        for number, (source, files) in enumerate(zip(job.sources, inputs.groups, strict=True))
        for part in plan_files(
            files, shape=source.shape, source=source.name, options=source.options(), on_error=job.on_error
        )
    ]
    seen = {identity(part.path) for part, number in parts if not job.sources[number].only_val}
    for part, number in parts:
        if job.sources[number].only_val and identity(part.path) in seen:
            raise DataError(f"{shown(part.path)}: is used for both training and validation; use it for only one")
    tests = [
        tuple(each for each in predicates if each.name in [one.predicate for one in filters_of(job, number)])
        for number in range(len(job.sources))
    ]
    names = relative_names([part.path for part, _ in parts])
    excluded.check_files(names, str(job.exclude))
    units: list[Unit] = []
    sizes = inputs.sizes
    unit_bytes = max(unit_bytes, sum(sizes.values()) // MOST_UNITS)
    for (part, number), name in zip(parts, names, strict=True):
        source, end = job.sources[number], sizes[part.path]
        for piece in part.cut(unit_bytes, end=end):
            size = (end if piece.stop is None else piece.stop) - piece.start
            about = (name, source.train_on or job.train_on, source.only_val, size, number, tests[number], excluded.ids)
            units.append(Unit(len(units), piece, *about))
    if not units:
        raise DataError(f"{_names(inputs)}: the input is empty; expected at least one record")
    return units


def _names(inputs: InputFiles) -> str:
    return names_of([label(path) for files in inputs.groups for path in files])


def relative_names(paths: Sequence[Place]) -> list[str]:
    """Return a name for each input file that does not depend on the location of the input folder.

    If all local paths are relative, they are kept; otherwise they become relative to their common parent folder. URLs
    become relative to their common parent if there are no local files. The name of standard input is `-`.
    """
    here = [path for path in paths if isinstance(path, Path) and not is_standard_input(path)]
    urls = [path for path in paths if isinstance(path, Url)]
    names: dict[Place, str] = {path: label(path) for path in paths}
    if urls and not here:
        # s3://bucket/chat/a.jsonl -> /s3:/bucket/chat/a.jsonl
        names |= dict(zip(urls, _below_common([Path("/", *str(url).split("/")) for url in urls]), strict=True))
    if any(path.is_absolute() for path in here):
        # Remove a second leading slash: in POSIX, `//a` is not below `/`.
        names |= dict(zip(here, _below_common([Path("/", *path.absolute().parts[1:]) for path in here]), strict=True))
    return [names[path] for path in paths]


def _below_common(absolute: Sequence[Path]) -> list[str]:
    common = os.path.commonpath([path.parent for path in absolute])
    return [os.path.relpath(path, common) for path in absolute]


@dataclass(frozen=True)
class _Build:
    job: Job
    renderer: Renderer
    inputs: InputFiles
    units: Sequence[Unit]
    place: BuildDir
    on_progress: Callable[[BuildProgress], None]
    cluster: ClusterBuild | None
    """None unless a Ray cluster builds the dataset and writes it to a URL."""
    excluded: Excluded


def _staged(build: _Build, unit: Unit, done: Done, lines_before: int) -> list[StagedFile]:
    folder = build.place.units
    if build.cluster is not None:
        return list(build.cluster.staged(unit, done, lines_before, folder))
    about: dict[str, Any] = {"source": unit.source, "unit": unit.number, "file": File(unit.part.source, unit.name)}
    return [StagedFile(folder / unit.staged_name(n), unit.only_val, lines_before, **about) for n in range(done.files)]


def _render(build: _Build, engine: Engine) -> Generator[tuple[Done, int], None, None]:
    """Yield the result of each unit, in order, together with the number of lines that precede the unit in its input
    file.

    Units completed by an interrupted build are not run again.
    """
    units, place = build.units, build.place
    # On a cluster, the workers check which units are complete.
    completed = _completed(build) if place.resumed and build.cluster is None else {}
    left = [unit for unit in units if unit.number not in completed]
    progress, before = SourceProgress(build.job, units), 0
    job, renderer, cluster = build.job, build.renderer, build.cluster
    run = partial(engine.run, folder=place.units) if cluster is None else cluster.run
    with closing(run(left, job, renderer)) as running:
        for unit in units:
            if not unit.part.start:
                before = 0
            try:
                done = completed[unit.number] if unit.number in completed else next(running)
            except (RecordError, RemoteError) as fault:
                # If a file changed while it was being read, report the change, because it may have caused the error.
                build.inputs.check_times()
                if isinstance(fault, RecordError):
                    fault.line += before
                raise
            build.inputs.check_size(unit.part.path)
            for passed in done.faults:
                passed.line += before
            build.on_progress(progress.after(unit, done))
            yield done, before
            before += done.lines


def _completed(build: _Build) -> dict[int, Done]:
    """Return the results of units that an interrupted build completed; raise `ChatmillError` if their input changed."""
    completed, checked, total = {}, 0, sum(unit.size for unit in build.units)
    for unit in build.units:
        if (done := finished(unit, build.place.units)) is not None:
            completed[unit.number] = done
        checked += unit.size
        build.on_progress(BuildProgress("check", checked, total, 0, 0))
    return completed


def _write(
    build: _Build,
    staged: Sequence[StagedFile],
    ledger: Ledger,
    *,
    engine: Engine | None = None,
    on_shard: Callable[[Path, ShardInfo], None] = lambda folder, info: None,
) -> Metadata:
    """Write all files of the dataset from the staged rows; the metadata is written last."""
    if not ledger.total("read").rows:
        raise DataError(f"{_names(build.inputs)}: the input has no records; expected at least one")
    rendered, written = ledger.total("rendered", "repeated"), 0

    def on_tokens(count: int) -> None:
        nonlocal written
        written += count
        build.on_progress(BuildProgress("write", written, rendered.tokens, rendered.rows, written))

    job, renderer, staging = build.job, build.renderer, build.place.staging
    tokenizer = renderer.tokenizer
    vocab_size = tokenizer.vocab_size
    write: Callable[..., dict[str, SplitInfo]]
    if build.cluster is not None and job.fit != "blocks":
        write = partial(build.cluster.assemble, vocab_size=vocab_size)
    elif isinstance(engine, LocalEngine) and engine.writes_shards and _is_large(job, rendered.tokens):
        for name in split_names(job):
            make_folder(staging / name)
        write_shards = partial(engine.write_shards, staging=staging, staged=staged, vocab_size=vocab_size)
        write = partial(assemble_by_shard, write=write_shards)
    else:
        write = partial(assemble, vocab_size=vocab_size, staging=staging, on_shard=on_shard)
    selection = choose(staged, job, ledger, build.excluded)
    splits = write(staged, selection.chosen, job, ledger=ledger, on_tokens=on_tokens)
    ledger.check()
    special = tokenizer.special_token_ids()
    make_folder(staging)
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
            config=_config(job, build.units, build.excluded),
            removed=write_removed(staging / REMOVED, staged, selection, filtered=ledger.total("filtered").rows > 0),
        ),
        tokenizer_state=tokenizer.state(added_tokens=job.add_tokens),
    )


def _is_large(job: Job, tokens: int) -> bool:
    """Whether the dataset is large enough for several processes to write its shards. With `fit="blocks"`, one process
    writes all shards in order.
    """
    return job.fit != "blocks" and tokens >= max(FORKED_TOKENS, 2 * job.shard_tokens)


def _fingerprint(job: Job, renderer: Renderer, units: Sequence[Unit], inputs: InputFiles, excluded: Excluded) -> bytes:
    """Return the fingerprint of a build; only a build with the same fingerprint can be resumed.

    The fingerprint includes only the sizes of the input files; each unit stores a hash of the bytes that it read.
    """
    parts = [(label(unit.part.path), unit.part.start, unit.part.stop, unit.part.shape) for unit in units]
    files = {label(path): size for path, size in inputs.sizes.items()}
    identity = {"job": job.to_json(), "renderer": renderer_identity(renderer), "parts": parts, "files": files}
    identity |= dedupe_identity(job) | {"excluded": excluded.sha256}
    identity["predicates"] = sorted({(each.name, each.sha256) for unit in units for each in unit.predicates})
    return json.dumps(identity, sort_keys=True).encode()


def _config(job: Job, units: Sequence[Unit], excluded: Excluded) -> dict[str, Any]:
    """Return the job as it is stored in the dataset metadata: all settings that affect the bytes of the dataset,
    without absolute paths.
    """
    config = job.to_json()
    of_template = ("chat_template", "template_args", "template_date", "mask", "text_tokens")
    of_answers = ("allow_no_end_token", "strip_prompt_space")
    for key in ("tokenizer", "on_error", "format", *of_template, *of_answers):
        # Remove keys that are stored with the tokenizer or the format, or that do not affect the bytes.
        del config[key]
    config["exclude"] = excluded.sha256
    for name in ("unroll", "near_dedupe", "precedence", "filters", "exclude"):
        if getattr(job, name) == keys_of(Job)[name].default:
            # Omit a key that has its default value, so that the dataset has the same bytes as before the key was
            # introduced.
            del config[name]
    read = dict.fromkeys(
        (
            unit.name,
            unit.part.shape,
            unit.part.source,
            unit.train_on,
            unit.only_val,
            unit.part.options,
            unit.source,
        )
        for unit in units
    )
    names = ("file", "shape", "source", "train_on", "only_val")
    config["sources"] = [
        dict(zip(names, values, strict=True))
        | {name: value for name, value in asdict(options).items() if value is not None}
        | _selection_keys(job.sources[number])
        for *values, options, number in read
    ]
    return config | job.default_mix()


def _selection_keys(source: InputSource) -> dict[str, Any]:
    """Return the settings `val_split`, `max_samples` and `filters` of a source, without those that are not set."""
    filters = {name: value for name, value in asdict(source.filters).items() if value not in (None, ())}
    keys = {"val_split": source.val_split, "max_samples": source.max_samples, "filters": filters or None}
    return {name: value for name, value in keys.items() if value is not None}
