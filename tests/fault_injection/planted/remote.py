"""Deliberate bugs in publishing datasets to object stores and in downloading them."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from chatmill.prepare import pipeline
from chatmill.store import metadata


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
    """Write the metadata even if another build has published its metadata in the meantime."""
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
