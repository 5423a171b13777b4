"""The config key `verify`: hash the data files at the start of a run, once per epoch, and at the end.

A checkpoint is verified if a later pass over the data finds every file unchanged. If a file has changed, the run stops
at the next step. Once the data is restored, the run can resume from the last verified checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from chatmill.errors import ChatmillError, DataError
from chatmill.load.loader import EpisodeLoader
from chatmill.load.plan import Cursor
from chatmill.load.remote import is_remote
from chatmill.load.source import DataSource
from chatmill.plain_file import open_plain
from chatmill.remote.cache import cached_path
from chatmill.remote.urls import Url
from chatmill.store.metadata import listed_files, manifest
from chatmill.store.primer_cache import PrimerCache, cache_manifest
from chatmill.train.checkpoint import set_aside_later
from chatmill.train.checkpoint_files import step_of
from chatmill.train.distributed import World

CHUNK = 1 << 20
"""Number of bytes to read and hash at a time."""
LOWEST_PRIORITY = 19


class DataCheck:
    """Hashes the data files of a run; the ranks on a node divide the files among themselves. All ranks must call each
    method at the same step.
    """

    def __init__(self, loader: EpisodeLoader) -> None:
        rank, ranks = (
            int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
        )
        self._files = _files(loader.sources)[rank::ranks]
        self._cache = cached_path("x").parent if is_remote(loader.plan(loader.split)) else None
        self._plan = loader.plan(loader.split)
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._at_start: Path | None = None
        """The newest checkpoint at the start of the current pass over the data."""
        self._epoch = 0
        self.fault: str | None = None
        """Error message about the first file that has changed."""
        self.verified: Path | None = None
        """The last verified checkpoint."""

    def check(self) -> None:
        """Hash all files now; raise `DataError` for the first file that has changed."""
        self.close()
        self._stop.clear()
        self._pass()
        if self.fault is not None:
            raise DataError(self.fault)

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def follow(self, saved: Path | None, at: Cursor, *, all_done: bool) -> None:
        """Start a pass over the data files in each epoch; once all ranks have finished the pass, record the verified
        checkpoint.

        `saved` is the newest checkpoint. If the data order has no epochs, a new pass starts each time the run has
        loaded as many rows as there are eligible episodes.
        """
        if self._thread is not None and all_done:
            self._thread.join()
            self._thread, self.verified = None, self._at_start
        epoch = at.epoch
        if self._plan.order.length is None:
            epoch = at.step * self._plan.config.batch_size // max(1, self._plan.num_eligible)
        if epoch > self._epoch and self._thread is None:
            self._epoch, self._at_start = epoch, saved
            self._thread = threading.Thread(target=self._in_background, name="verify", daemon=True)
            self._thread.start()

    def check_at_end(self, folder: Path, step: int, world: World) -> None:
        """Check all files before a run writes its last checkpoint. If a file has changed, call `stop`, which raises
        `DataError`.
        """
        try:
            world.together(self.check)
        except ChatmillError:
            self.stop(folder, step, world)
            raise

    def stop(self, folder: Path, step: int, world: World) -> None:
        """Rename the checkpoints that may have been written after the data changed, and raise `DataError`."""
        good = -1 if self.verified is None else step_of(self.verified)
        resume_point = f"{self.verified}, the last verified checkpoint" if self.verified else "the beginning"

        def end() -> None:
            if world.is_first:
                set_aside_later(folder, good)
            if self.fault is not None:
                raise DataError(
                    f"{self.fault}; the run stops after step {step:,} and renames all checkpoints that were not "
                    f"verified; once the data is restored, --resume auto continues from {resume_point}"
                )

        world.together(end)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def _in_background(self) -> None:
        if sys.platform == "linux":
            # Lower the priority of this thread only, so that hashing does not slow down training.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        self._pass()

    def _pass(self) -> None:
        for number, (path, sha256) in enumerate(self._files):
            try:
                read = self._hash(path)
            except OSError as error:
                if isinstance(error, FileNotFoundError) and path.parent == self._cache:
                    # Skip remote objects that are not cached: they are hashed when they are downloaded.
                    continue
                self.fault = f"{path}: cannot be read ({error.strerror}); it was readable when the run started"
                return
            if read is None:
                return
            if sha256 is None:
                self._files[number] = path, read
            elif read != sha256:
                self.fault = f"{path}: sha256 is {read[:12]}…, expected {sha256[:12]}…; the file has changed"
                self.fault += "; remove the file from the cache" if path.parent == self._cache else ""
                return

    def _hash(self, path: Path) -> str | None:
        digest = hashlib.sha256()
        with open_plain(path) as file:
            while chunk := file.read(CHUNK):
                if self._stop.is_set():
                    return None
                digest.update(chunk)
        return digest.hexdigest()


def _files(sources: Sequence[DataSource]) -> list[tuple[Path, str | None]]:
    """Return all data files with their recorded hashes. Files from other programs have no recorded hash; the first pass
    computes it.
    """
    files: list[tuple[Path, str | None]] = []
    for source in sources:
        dataset = source.dataset.whole or source.dataset
        if isinstance(dataset.path, Url):
            listed = [] if dataset.metadata is None else listed_files(dataset.metadata)
            files += [(cached_path(info.sha256), info.sha256) for _, info in listed]
        elif isinstance(dataset, PrimerCache):
            files += [(path, info.sha256) for path, info in cache_manifest(dataset.path, dataset.meta).files]
        elif dataset.metadata is not None:
            files += [(path, info.sha256) for path, info in manifest(dataset.path, dataset.metadata).files]
        else:
            shards = [shard for split in dataset.splits for shard in dataset[split].shards]
            places = [shard.folder / name for shard in shards for name in shard.records]
            files += [(place, None) for place in places if isinstance(place, Path)]
    # Several sources may be parts of one dataset.
    return list(dict.fromkeys(files))
