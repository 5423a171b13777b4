"""Bugs planted in chatmill on purpose, each with the trial that must detect it.

Each bug is planted by patching the library in a separate process. The trial must then report a result as lost or
silently wrong.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from chatmill import errors
from chatmill.cli import streams
from chatmill.errors import RecordError
from chatmill.format.template.process import channel
from chatmill.prepare import build_dir, engine, pipeline, staging, unit
from chatmill.records import input_files
from chatmill.records.shapes import ShapeParser
from chatmill.records.shapes.decode import decode_object
from chatmill.store import files, folder, foreign, hashed, layout, mapped, metadata, publish, write
from chatmill.tokenizer import reference, tokenizer_json
from fault_injection.trial import Trial
from fault_injection.trials import (
    audit_kills,
    cache_kills,
    changed_data,
    changed_input,
    checkpoint_crashes,
    clock,
    crashes,
    damage,
    damage_of_runs,
    failing_calls,
    full_disk,
    hostile_checkpoints,
    hostile_metadata,
    hostile_models,
    identity,
    large_store,
    object_store,
    outputs,
    overwrite,
    ranks,
    ray_workers,
    readers,
    templates,
    tokenizer_differences,
    tokenizer_files,
    two_builders,
    viewer,
    write_points,
)


@dataclass(frozen=True)
class Planted:
    name: str
    plant: Callable[[], None]
    trial: Trial
    size: int


# The disk.


def files_are_not_synced() -> None:
    def folders_alone(folder: Path) -> None:
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                folders_alone(path)
        files.disk.sync(folder)

    files.sync_tree = folders_alone


def folders_are_not_synced() -> None:
    def files_alone(folder: Path) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                files.disk.sync(path)

    files.sync_tree = files_alone


def the_name_is_not_synced() -> None:
    publish._sync_parents = lambda *paths: None


def nothing_is_synced() -> None:
    files.sync_tree = lambda folder: None


def renamed_early() -> None:
    last = pipeline.write_metadata

    def early(folder: Path, described: Any, **options: Any) -> Any:
        target = folder.with_name(folder.name.removeprefix(".").removesuffix(".building"))
        if target.exists():
            remove_tree(target)
        files.disk.rename_new(folder, target)
        return last(target, described, **options)

    pipeline.write_metadata = early
    pipeline.publish = lambda *args, **options: None


def metadata_first() -> None:
    create = metadata.create
    held: list[tuple[Path, bytes]] = []

    class Held:
        def __init__(self, path: Path) -> None:
            self._path = path

        def write(self, data: bytes) -> None:
            held.append((self._path, data))

    @contextmanager
    def swapped(path: Path) -> Iterator[Any]:
        if path.name != metadata.METADATA:
            yield Held(path)
            return
        with create(path) as file:
            yield file
        for late, data in held:
            with create(late) as file:
                file.write(data)
        held.clear()

    metadata.create = swapped


def old_dataset_removed_first() -> None:
    move = publish._move
    files.Disk.exchange = lambda self, one, other: False
    publish._check_replaceable = lambda *args: None
    publish._remove_replaced = lambda *args: None

    def removing(source: Path, target: Path) -> None:
        if target.name.endswith(".replaced"):
            remove_tree(source)
        else:
            move(source, target)

    publish._move = removing


def remove_tree(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            files.disk.remove(path)
    files.disk.remove(folder)


def everything_is_replaced() -> None:
    """Remove all files of a replaced folder, even unlisted ones, if the folder contains a metadata file."""

    def marker_alone(folder: Path, target: Path, kind: Any) -> None:
        assert (folder / kind.marker).is_file()

    def all_of_it(folder: Path, kind: Any) -> str:
        try:
            remove_tree(folder)
        except OSError as error:
            return str(error)
        return ""

    publish._check_replaceable = marker_alone
    publish.remove_folder = all_of_it


def full_disk_swallowed() -> None:
    def write_some(self: Any, data: Any) -> int:
        try:
            return files.disk.write(self._fd, data)
        except OSError:
            return len(data)

    files._Raw.write = write_some


def units_of_lost_workers_not_run_again() -> None:
    from chatmill.prepare import ray_engine

    ray_engine.RETRIES = 0


def files_not_named() -> None:
    import chatmill.errors

    chatmill.errors.name_file = lambda error: error
    engine.name_file = lambda error: error


def nobody_locks() -> None:
    import os
    from contextlib import nullcontext

    build_dir.locked = lambda path, busy, *, opened, patience: nullcontext(os.close(opened()))


# Writing and reading.


def span_dropped() -> None:
    """Mark the last trained span of a resumed unit as context."""
    original = staging.Staged.__init__

    def losing(self: Any, path: Path, **options: Any) -> None:
        original(self, path, **options)
        if options.get("check"):
            seen.add(str(path))
        elif str(path) in seen:
            self.spans = self.spans.copy()
            self.spans["weight"][np.flatnonzero(self.spans["weight"])[-1:]] = 0

    seen: set[str] = set()
    staging.Staged.__init__ = losing


def span_dropped_on_the_way() -> None:
    append = write.SplitWriter.append

    def losing(self: Any, rows: Any) -> None:
        spans = rows.spans.copy()
        spans["weight"][-1] = 0
        append(self, replace(rows, spans=spans))

    write.SplitWriter.append = losing


def ids_not_checked() -> None:
    write.SplitWriter._check_ids = lambda self, rows: None
    unit._check_ids = lambda rows, vocab_size: None


def crc_not_checked() -> None:
    original = staging.Staged.__init__
    staging.Staged.__init__ = lambda self, path, lines_before=0, check=False: original(
        self, path, lines_before=lines_before
    )


def hashes_not_checked() -> None:
    hashed.Manifest.hash_faults = lambda self, folder: iter(())


def sizes_not_checked() -> None:
    hashed.Manifest.size_faults = lambda self, folder: iter([folder.status(path) for path, _ in self.files][:0])


def metadata_believed() -> None:
    hashed.JsonObject.equal = lambda self, name, expected: None


def whole_files_read() -> None:
    as_records = layout.as_records
    layout.as_records = lambda *args: as_records(*args).copy()


def folders_are_not_compared() -> None:
    folder.StoredFiles._opened_again = lambda self, path, work: work(folder.OpenFolder(self.path))


def bus_errors_are_not_handled() -> None:
    mapped._install_handler = lambda: None


def cut_files_are_not_noticed() -> None:
    mapped.MappedFile.check = lambda self: None


def traces_are_overlooked() -> None:
    foreign.trace_of_chatmill = lambda folder: None


def maps_hold_descriptors() -> None:
    import os

    original = mapped.MappedFile.__init__

    def holding(self: Any, fd: int, *paths: Path) -> None:
        original(self, fd, *paths)
        self.held = os.fdopen(os.dup(fd), "rb")

    mapped.MappedFile.__init__ = holding


def bytes_depend_on_the_clock() -> None:
    config = pipeline._config
    pipeline._config = lambda *args: {**config(*args), "built": time.time()}


# Readers.


def bad_bytes_accepted() -> None:
    import msgspec

    decode = sys.modules[decode_object.__module__]
    strict = decode._DECODER

    class Lenient:
        def decode(self, data: bytes) -> Any:
            try:
                return strict.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return strict.decode(data.decode(errors="ignore").replace("\0", "").encode())

    decode._DECODER = Lenient()


def faults_forgotten() -> None:
    original = ShapeParser.__call__
    ShapeParser.__call__ = lambda self, line, data: [
        result for result in original(self, line, data) if not isinstance(result, RecordError)
    ]


def input_known_by_size() -> None:
    input_files.has_bytes = unit.has_bytes = lambda path, read: path.exists()


def sandbox_open() -> None:
    """Disable the sandbox inside the template process."""
    channel._START = channel._START.replace(
        "import_module(sys.argv[1])",
        """from chatmill.format.template.tracing import formatting, program, sandbox
sandbox.check_plain = formatting.check_plain = program.check_plain = lambda value, depth=0: None
sandbox.Sandbox.attribute = lambda self, obj, name: getattr(obj, name, None)
sandbox.Sandbox.is_safe_callable = lambda self, obj: True
import_module(sys.argv[1])""",
    )


def template_process_not_locked() -> None:
    channel._START = channel._START.replace(
        "import_module(sys.argv[1])",
        """from chatmill.format.template.process import lockdown
lockdown.lock_down = lambda memory, parent: []
import_module(sys.argv[1])""",
    )


def environment_kept() -> None:
    import os
    import subprocess

    class Keeping(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "env": dict(os.environ)})

    subprocess.Popen = Keeping


def panics_not_caught() -> None:
    @contextmanager
    def nothing(place: str, what: str, right: str) -> Iterator[None]:
        yield

    tokenizer_json.faults_of = reference.faults_of = nothing


def fastokens_believed() -> None:
    """Use fastokens for every text, without comparing its ids on the probe texts."""
    tokenizer_json.LEFT_BY_FASTOKENS = ""
    tokenizer_json.TokenizerJson._agrees = lambda self, engine: True


# Runs.


def checkpoint_hash_not_checked() -> None:
    from chatmill.train import checkpoint

    def size_alone(path: Path, info: Any) -> None:
        assert path.stat().st_size == info.size

    checkpoint._check = size_alone


def chain_not_checked() -> None:
    """Accept any value as the hash of the previous line."""
    from chatmill.audit import verify as audit_check
    from chatmill.audit.log import START, LogLine, TornLine

    read_log = audit_check.read_log

    def believing(path: Path) -> list[LogLine | TornLine]:
        previous, lines = START, []
        for line in read_log(path):
            if isinstance(line, LogLine):
                line = replace(line, previous=previous)
                previous = line.sha256
            lines.append(line)
        return lines

    audit_check.read_log = believing


def state_saved_before_the_log() -> None:
    """Return a hash for a checkpoint without writing its line to the audit log."""
    from chatmill.audit import AuditLog

    add = AuditLog.add

    def later(self: Any, action: str, fields: Any, *, durable: bool = False) -> str:
        if action != "checkpoint":
            return add(self, action, fields, durable=durable)
        return "0" * 64

    AuditLog.add = later


def losses_of_ranks_not_reported() -> None:
    ranks.FIRST.append(_no_report)


def _no_report() -> None:
    from contextlib import nullcontext

    from chatmill.train import process_group

    process_group.lost_rank_errors = lambda *_: nullcontext()
    process_group.RankWatch = lambda *_: None


# Object stores.


def remote_metadata_first() -> None:
    from chatmill.store import remote_publish

    def swapped(folder: Path, target: Any, uploads: Any) -> None:
        text = (folder / metadata.METADATA).read_bytes()
        remote_publish.publish_metadata(target, text)
        for name, info in metadata.listed_files(metadata.parse_metadata(text, place="")):
            uploads.add(folder / name, info)
        uploads.wait()

    pipeline.publish_remote = swapped


def uploads_not_awaited() -> None:
    from chatmill.store import remote_publish

    upload = remote_publish.upload_object

    def slow(*args: Any) -> None:
        time.sleep(0.05)
        upload(*args)

    remote_publish.upload_object = slow
    remote_publish.Uploads.wait = lambda self: None
    remote_publish.Uploads.__exit__ = lambda self, *error: self._pool.shutdown()


def condition_dropped() -> None:
    """Write the metadata even if another build has published in the meantime."""
    from chatmill.remote import objects

    write = objects.write
    objects.write = lambda url, data, **condition: write(url, data)


def clean_without_metadata() -> None:
    from chatmill.store import clean

    clean._named = lambda url, there, others: set()
    clean._named_now = lambda url: set()


def cache_not_locked() -> None:
    from chatmill.remote import cache

    cache._locked = lambda folder, name: nullcontext()


def fetched_hashes_believed() -> None:
    from chatmill.remote import cache

    write = cache._write

    def believed(url: Any, size: int, partial: Path, is_stopped: Any) -> str:
        write(url, size, partial, is_stopped)
        return partial.name

    cache._write = believed


def objects_not_hashed() -> None:
    from chatmill.store import remote_verify

    download = remote_verify.Downloads._download

    def believed(self: Any, url: Any, size: int, to: Path) -> str:
        download(self, url, size, to)
        return to.name

    remote_verify.Downloads._download = believed


# Output and the viewer.


def names_printed_as_they_are() -> None:
    errors._escaped = lambda run, keep: run


def closed_pipe_is_an_error() -> None:
    streams.Styled._failures = lambda self: nullcontext()


def full_output_swallowed() -> None:
    streams.Styled._failures = streams.ErrorOutput._failures


def half_open_connections_kept() -> None:
    from chatmill.show.connections import LimitedConnection

    LimitedConnection._wait_for_client = lambda self: None


def any_number_of_connections() -> None:
    from chatmill.show.connections import LimitedConnection

    LimitedConnection.is_open = False


def any_number_of_digits() -> None:
    from starlette.convertors import CONVERTOR_TYPES

    from chatmill.show import server

    CONVERTOR_TYPES["index"].regex = "[0-9]+"
    server.NUMBER = re.compile(".*", re.DOTALL)


def unlisted_state_read() -> None:
    from chatmill.train import checkpoint

    checkpoint.unlisted = lambda folder, files: iter(())
    checkpoint.Checkpoint.state_files = lambda self: sorted(self.path.glob("state-*.safetensors"))


def cursor_believed() -> None:
    from chatmill.audit import recorder

    recorder._check_with_log = lambda state, path, plan: None


def pickles_loaded() -> None:
    import pickle

    from chatmill.train import model_files

    read_headers = model_files.read_headers

    def unpickled(folder: Path, weights: str, index: str | None = None) -> Any:
        for path in folder.iterdir():
            if path.suffix in model_files.PICKLES:
                pickle.loads(path.read_bytes())  # noqa: S301
        return read_headers(folder, weights, index)

    model_files.read_headers = unpickled


def data_not_hashed_again() -> None:
    from chatmill.train.data_check import DataCheck

    DataCheck._pass = lambda self: None


def ids_of_batches_believed() -> None:
    from chatmill.train import loop

    loop.unknown_id = lambda batch, vocab_size: None


PLANTED = (
    Planted("files not synced", files_are_not_synced, crashes.TRIAL, 6),
    Planted("folders not synced", folders_are_not_synced, crashes.TRIAL, 6),
    Planted("parent folder not synced after the rename", the_name_is_not_synced, crashes.TRIAL, 6),
    Planted("metadata not written last", metadata_first, crashes.TRIAL, 6),
    Planted("old dataset removed before the new one is published", old_dataset_removed_first, crashes.TRIAL, 6),
    Planted("checkpoints not synced", nothing_is_synced, checkpoint_crashes.TRIAL, 1),
    Planted("build folder renamed too early", renamed_early, write_points.BUILDS, 30),
    Planted("trained span dropped when a build is resumed", span_dropped, write_points.BUILDS, 4),
    Planted("trained span dropped before it is stored", span_dropped_on_the_way, large_store.TRIAL, 24),
    Planted("ENOSPC ignored", full_disk_swallowed, full_disk.BUILDS, 4),
    Planted("failed write ignored, prepare", full_disk_swallowed, failing_calls.WRITES_OF_BUILDS, 4),
    Planted("failed write ignored, training", full_disk_swallowed, failing_calls.WRITES_OF_RUNS, 3),
    Planted("file name missing from operating system errors", files_not_named, failing_calls.READS_OF_BUILDS, 4),
    Planted("unlisted files of a replaced folder removed", everything_is_replaced, overwrite.TRIAL, 2),
    Planted("metadata not written last, object store", remote_metadata_first, object_store.TRIAL, 12),
    Planted("metadata published before all uploads end", uploads_not_awaited, object_store.TRIAL, 12),
    Planted("metadata written without its condition", condition_dropped, object_store.TRIAL, 12),
    Planted("objects in use deleted by clean", clean_without_metadata, object_store.TRIAL, 12),
    Planted("cache downloads not locked", cache_not_locked, cache_kills.TRIAL, 6),
    Planted("hashes of downloaded objects not checked", fetched_hashes_believed, object_store.DAMAGED, 20),
    Planted("hashes of objects not checked by verify", objects_not_hashed, object_store.DAMAGED, 20),
    Planted("build not locked", nobody_locks, two_builders.TRIAL, 2),
    Planted("ids not checked against the vocabulary", ids_not_checked, tokenizer_files.LIARS, 4),
    Planted("staged units not checked", crc_not_checked, damage_of_runs.STAGED, 12),
    Planted("hashes not checked", hashes_not_checked, damage.FLIPS, 60),
    Planted("hashes not checked, swapped files", hashes_not_checked, damage.SWAPS, 24),
    Planted("sizes not checked", sizes_not_checked, damage.CUTS, 1),
    Planted("sizes not checked, missing files", sizes_not_checked, damage.MISSING, 1),
    Planted("metadata not validated", metadata_believed, hostile_metadata.TRIAL, 20),
    Planted("invalid bytes accepted by a reader", bad_bytes_accepted, readers.TRIAL, 300),
    Planted("record errors not reported", faults_forgotten, readers.TRIAL, 300),
    Planted("changed input not detected", input_known_by_size, changed_input.TRIAL, 45),
    Planted("template sandbox disabled", sandbox_open, templates.TRIAL, 16),
    Planted("template process not locked down", template_process_not_locked, templates.ESCAPED, 3),
    Planted("environment passed to the template process", environment_kept, templates.ESCAPED, 1),
    Planted("panics of the tokenizers library not caught", panics_not_caught, tokenizer_files.MUTANTS, 50),
    Planted("replaced folders not detected", folders_are_not_compared, identity.EXCHANGED, 40),
    Planted("bus errors not handled", bus_errors_are_not_handled, identity.CUT, 12),
    Planted("truncated files not detected", cut_files_are_not_noticed, identity.CUT, 24),
    Planted("chatmill's own files overlooked in a partial copy", traces_are_overlooked, identity.PARTIAL, 60),
    Planted("file descriptors kept open by memory maps", maps_hold_descriptors, identity.DESCRIPTORS, 24),
    Planted("fastokens used without a comparison", fastokens_believed, tokenizer_differences.TRIAL, 1_200),
    Planted("whole files read into memory", whole_files_read, large_store.TRIAL, 24),
    Planted("current time written to the dataset", bytes_depend_on_the_clock, clock.BUILDS, 2),
    Planted("checkpoint hashes not checked", checkpoint_hash_not_checked, damage_of_runs.CHECKPOINTS, 12),
    Planted("hash chain of the audit log not checked", chain_not_checked, damage_of_runs.AUDIT_LOGS, 40),
    Planted("units of lost workers not run again", units_of_lost_workers_not_run_again, ray_workers.TRIAL, 1),
    Planted("loss of a rank not reported", losses_of_ranks_not_reported, ranks.TRIAL, 1),
    Planted("state saved before its line is in the audit log", state_saved_before_the_log, audit_kills.TRIAL, 3),
    Planted("control characters in names not escaped", names_printed_as_they_are, outputs.TRIAL, 12),
    Planted("closed pipe reported as an error", closed_pipe_is_an_error, outputs.TRIAL, 24),
    Planted("write error on standard output ignored", full_output_swallowed, outputs.TRIAL, 40),
    Planted("half-open connections not closed", half_open_connections_kept, viewer.TRIAL, 10),
    Planted("number of connections not limited", any_number_of_connections, viewer.TRIAL, 10),
    Planted("digits of a number in a path not limited", any_number_of_digits, viewer.TRIAL, 250),
    Planted("unlisted state files read from a checkpoint", unlisted_state_read, hostile_checkpoints.TRIAL, 1),
    Planted("checkpoint cursor not compared with the audit log", cursor_believed, hostile_checkpoints.TRIAL, 2),
    Planted("pickled weights loaded", pickles_loaded, hostile_models.TRIAL, 1),
    Planted("dataset not hashed during a run", data_not_hashed_again, changed_data.TRIAL, 2),
    Planted("batch ids not checked against the vocabulary", ids_of_batches_believed, changed_data.TRIAL, 3),
)
