"""Remove leftovers at the URL of a dataset: objects of killed builds and replaced datasets.

A leftover is an object with a name that chatmill generates, but that the metadata does not list. Young leftovers are
kept, because a running build or a reader of the replaced dataset may still need them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from chatmill.errors import DataError, UsageError
from chatmill.remote import objects
from chatmill.remote.objects import ObjectInfo
from chatmill.remote.urls import READ_ONLY, Url
from chatmill.store.layout import METADATA
from chatmill.store.metadata import listed_files
from chatmill.store.publish import names_of
from chatmill.store.remote_files import OBJECTS, STAGING, remote_metadata
from chatmill.store.remote_publish import THREADS

DAY = 24 * 3600.0
OWN = re.compile(rf"{OBJECTS}/([0-9a-f]{{64}})|({STAGING}/[0-9a-f]{{64}})/.+")
AT_ONCE = 500
"""Number of objects to remove before the metadata is read again."""


@dataclass(frozen=True)
class ObjectCount:
    objects: int
    bytes: int

    def __add__(self, other: ObjectCount) -> ObjectCount:
        return ObjectCount(self.objects + other.objects, self.bytes + other.bytes)


@dataclass(frozen=True)
class Cleaned:
    """Counts of the objects at a URL. A dry run counts objects without removing them."""

    used: ObjectCount
    """Objects listed in the metadata."""
    removed: ObjectCount
    """Leftovers that were removed or, in a dry run, would be removed."""
    young: ObjectCount
    """Leftovers that are too young to be removed."""
    undated: ObjectCount
    """Leftovers that are kept because the store does not report their age."""
    others: ObjectCount
    """Objects that are kept because chatmill did not write them."""


def clean_dataset(url: Url, *, older_than: float = DAY, dry_run: bool = False) -> Cleaned:
    """Remove build leftovers at a URL that are older than `older_than` seconds."""
    if url.scheme in READ_ONLY:
        raise UsageError(
            f"{url}: objects at {url.scheme}:// cannot be removed; use s3://, gs://, az:// or a local path"
        )
    prefix = url.address.rstrip("/") + "/"
    there = {each.address.removeprefix(prefix): info for each, info in objects.infos_below(url).items()}
    own = {name: match for name in there if (match := OWN.fullmatch(name))}
    others = [name for name in there if name not in own and name != METADATA]
    named = _named(url, there, others)
    used = [name for name, match in own.items() if match[1] in named]
    left = [name for name, match in own.items() if match[1] not in named]
    for name in left:
        if there[name].modified is None:
            # Some stores omit the modification time from listings.
            there[name] = objects.find(url / name) or there[name]
    ages = _ages(left, own, there)
    undated = [name for name in left if ages[name] is None]
    old = [name for name in left if (age := ages[name]) is not None and age >= older_than]
    young = [name for name in left if (age := ages[name]) is not None and age < older_than]
    if not dry_run:
        _remove(url, old)

    def count(names: Sequence[str]) -> ObjectCount:
        return ObjectCount(len(names), sum(there[name].size for name in names))

    return Cleaned(count(used), count(old), count(young), count(undated), count(others))


def _named(url: Url, there: dict[str, ObjectInfo], others: Sequence[str]) -> set[str]:
    """Return the hashes in the metadata; raise `DataError` if there is no dataset and no leftover at the URL."""
    named = _named_now(url)
    if named:
        return named
    if others:
        raise DataError(
            f"{url}: contains {names_of(others)} but no {METADATA}; expected a dataset or leftovers of a build"
        )
    if not there:
        raise DataError(f"{url}: is empty; expected a dataset or leftovers of a build")
    return named


def _ages(left: Sequence[str], own: dict[str, re.Match[str]], there: dict[str, ObjectInfo]) -> dict[str, float | None]:
    """Return the age of each leftover in seconds. All staged parts of a build get the age of the youngest part."""
    now = time.time()
    ages = {name: None if (at := there[name].modified) is None else now - at for name in left}
    builds: dict[str, list[str]] = {}
    for name in left:
        if folder := own[name][2]:
            builds.setdefault(folder, []).append(name)
    for names in builds.values():
        known = [age for name in names if (age := ages[name]) is not None]
        youngest = min(known) if len(known) == len(names) else None
        ages |= dict.fromkeys(names, youngest)
    return ages


def _remove(url: Url, names: Sequence[str]) -> None:
    """Remove leftovers, unless a dataset published in the meantime lists them."""
    removed: list[str] = []
    with ThreadPoolExecutor(THREADS, thread_name_prefix="clean") as pool:
        for at in range(0, len(names), AT_ONCE):
            named = _named_now(url)
            batch = [name for name in names[at : at + AT_ONCE] if _hash(name) not in named]
            removed += batch
            list(pool.map(lambda name: objects.remove([url / name]), batch))
    named = _named_now(url) if removed else set()
    if lost := [name for name in removed if _hash(name) in named]:
        raise DataError(
            f"{url}: a dataset that was published during cleaning contains files that were removed "
            f"({names_of(lost)}); build the dataset again"
        )


def _named_now(url: Url) -> set[str]:
    """Return the hashes in the metadata, or an empty set if the URL has no metadata."""
    # Read the object itself, because listings may lag behind.
    if objects.find(url / METADATA) is None:
        return set()
    return {info.sha256 for _, info in listed_files(remote_metadata(url))}


def _hash(name: str) -> str:
    return name.rpartition("/")[2]
