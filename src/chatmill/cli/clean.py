"""`chatmill clean`: remove files left by interrupted or replaced builds."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

import typer

from chatmill.cli.options import AsJson, Dataset, echo_json, echo_line
from chatmill.errors import UsageError, one_line
from chatmill.prepare.build_dir import clean_builds
from chatmill.remote.urls import Url
from chatmill.store.clean import Cleaned, ObjectCount, clean_dataset
from chatmill.store.remote_publish import scratch_folder

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


def clean(
    dataset: Dataset,
    older_than: Annotated[
        str,
        typer.Option(
            metavar="AGE", help="Remove only files older than this: a number followed by s, m, h or d, such as 24h."
        ),
    ] = "24h",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the files that would be removed, without removing them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove files of interrupted builds, and objects of a dataset that has been replaced.

    At a URL, removes objects that the dataset's metadata does not reference. A training run may still be reading a
    replaced dataset, and a running build may have uploaded objects that are not referenced yet. Set --older-than to
    more than the duration of your longest build or training run. Objects that chatmill did not write are never removed.

    \b
    Examples:
      chatmill clean s3://bucket/v1 --dry-run
      chatmill clean s3://bucket/v1 --older-than 7d
      chatmill clean data/v1
    """
    seconds = _seconds(older_than)
    url = dataset if isinstance(dataset, Url) else None
    target = scratch_folder(dataset) if isinstance(dataset, Url) else dataset
    builds = clean_builds(target, older_than=seconds, dry_run=dry_run)
    cleaned = None if url is None else clean_dataset(url, older_than=seconds, dry_run=dry_run)
    if as_json:
        counts = asdict(cleaned) if cleaned else {}
        echo_json({"path": str(dataset), "dry_run": dry_run, **counts, "local": asdict(builds)})
        return
    would = "would be removed" if dry_run else "removed"
    if cleaned is not None:
        _print_objects(str(dataset), cleaned, older_than, would)
    if builds.removed.objects or cleaned is None:
        _print_count(f"files of unfinished builds on this machine {would}", builds.removed)
    if builds.young.objects:
        _print_count(f"files of unfinished builds kept: newer than {older_than}", builds.young)


def _print_objects(url: str, cleaned: Cleaned, older_than: str, would: str) -> None:
    _print_count(f"objects in use at {url}", cleaned.used)
    _print_count(f"unused objects {would}", cleaned.removed)
    for count, why in (
        (cleaned.young, f"unused objects kept: newer than {older_than}"),
        (cleaned.undated, "unused objects kept: the store does not report their age"),
        (cleaned.others, "other objects kept: not written by chatmill"),
    ):
        if count.objects:
            _print_count(why, count)


def _print_count(what: str, count: ObjectCount) -> None:
    echo_line(f"{count.objects:,} {what} ({count.bytes:,} bytes)")


def _seconds(age: str) -> float:
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?) *([smhd]?)", age.strip())) or (not match[2] and float(match[1])):
        raise UsageError(f'--older-than is "{one_line(age)}"; expected a number followed by s, m, h or d, such as 24h')
    return float(match[1]) * UNITS[match[2] or "s"]
