"""Bugs in how datasets are built, verified and memory-mapped."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.prepare import pipeline, staging, unit
from chatmill.store import folder, foreign, hashed, layout, mapped, write


def span_dropped() -> None:
    """Set the weight of the last trained span of a resumed unit to 0."""
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


def units_of_lost_workers_not_run_again() -> None:
    from chatmill.prepare import ray_engine

    ray_engine.RETRIES = 0
