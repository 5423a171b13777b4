"""Build a dataset at a URL on a Ray cluster: workers upload rendered units, and Ray tasks then write the shards.

    URL/staging/BUILD/unit_000000_0000.rows     written whole by a worker; BUILD is the hash of the job and its input
    URL/objects/SHA256                          the files of shards, written by the tasks

The nodes need no shared disk, because they exchange data through the object store. Workers send all arrays of the
staged objects except tokens and spans to the main process, which plans the shards and writes the metadata.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.format import Renderer
from chatmill.ledger import Ledger
from chatmill.prepare.assemble import assemble_by_shard
from chatmill.prepare.job import Job
from chatmill.prepare.ray_engine import RayEngine
from chatmill.prepare.select import Chosen, StagedFile
from chatmill.prepare.unit import Done, Unit
from chatmill.remote import objects
from chatmill.remote.objects import RemoteError
from chatmill.remote.urls import Url
from chatmill.rows import File
from chatmill.store.metadata import SplitInfo
from chatmill.store.remote_files import STAGING
from chatmill.store.remote_publish import RemoteTarget

TASKS_PER_CPU = 2
"""Minimum number of shard-writing tasks per CPU, so that few CPUs are idle at the end."""


@dataclass(frozen=True)
class ClusterBuild:
    """A build of a dataset at a URL, on a Ray cluster; `fingerprint` identifies its job and input."""

    engine: RayEngine
    target: RemoteTarget
    fingerprint: bytes
    resume: bool

    @property
    def units(self) -> Url:
        """URL of the folder with the staged objects; a resumed build uses the same URL."""
        return self.target.url / STAGING / hashlib.sha256(self.fingerprint).hexdigest()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Connect to the cluster. Staged units are removed after success or if the input is invalid; after other
        errors, they are kept for --resume.
        """
        with self.engine.connected():
            try:
                yield
            except (DataError, UsageError) as error:
                if not isinstance(error, RemoteError):
                    self.remove_units()
                raise
            self.remove_units()

    def run(self, units: Sequence[Unit], job: Job, renderer: Renderer) -> Generator[Done, None, None]:
        """Like `Engine.run`, but rendered units are uploaded as objects; a resumed build reuses existing objects."""
        return self.engine.run(units, job, renderer, self.units, resume=self.resume)

    def staged(self, unit: Unit, done: Done, lines_before: int, folder: Path) -> Iterator[StagedFile]:
        """Write all arrays of a unit's staged objects except tokens and spans to `folder`, and yield the objects."""
        for number, head in enumerate(done.heads):
            name = unit.staged_name(number)
            (folder / name).write_bytes(head)
            copy = StagedFile(self.units / name, unit.only_val, lines_before, folder / name, len(head))
            yield replace(copy, source=unit.source, unit=unit.number, file=File(unit.part.source, unit.name))

    def assemble(
        self,
        staged: Sequence[StagedFile],
        chosen: Mapping[str, Sequence[Chosen]],
        job: Job,
        *,
        vocab_size: int,
        ledger: Ledger,
        on_tokens: Callable[[int], None],
    ) -> dict[str, SplitInfo]:
        """Like `assemble.assemble`, but Ray tasks write and upload the shards."""
        per_task = self._shards_per_task(job, ledger)
        write = partial(self.engine.write_shards, target=self.target, vocab_size=vocab_size, per_task=per_task)
        return assemble_by_shard(staged, chosen, job, write=write, ledger=ledger, on_tokens=on_tokens)

    def _shards_per_task(self, job: Job, ledger: Ledger) -> int:
        """Return the number of shards per task: one, unless rows are packed and there are far more shards than CPUs.

        A packed shard takes its rows from a window of 2^20 rows, so its task reads nearly the whole window. A task that
        writes several shards reads the window only once.
        """
        shards = ledger.total("rendered", "repeated").tokens // job.shard_tokens
        return 1 if job.pack is None else max(1, shards // (TASKS_PER_CPU * self.engine.num_cpus()))

    def remove_units(self) -> None:
        """Remove the staged objects. Objects that remain after an error are harmless; `chatmill clean` removes them."""
        try:
            self.engine.remove(objects.names_below(self.units))
        except ChatmillError as error:
            warnings.warn(f"{error}; run `chatmill clean` to remove the staged objects", stacklevel=2)
