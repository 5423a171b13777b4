"""`chatmill removed`: list the records that were removed from a dataset, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from chatmill.cli.options import Dataset, echo_json, echo_line
from chatmill.errors import DataError, one_line
from chatmill.store.read import open_dataset
from chatmill.store.removed import RecordPlace, RemovedRecord, removed_records


def removed(
    dataset: Dataset,
    reason: Annotated[
        str | None, typer.Option(metavar="REASON", help="List only records removed for this reason, such as duplicate.")
    ] = None,
    source: Annotated[str | None, typer.Option(metavar="NAME", help="List only records of this source.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per record, each on its own line.")
    ] = False,
) -> None:
    """List the records that filters, deduplication and max_samples removed from a dataset, in input order.

    Prints the file, line and reason of each record and, for a duplicate, the record that was kept instead (its twin).
    Invalid records are not listed; they are in the rejects file. The list also excludes rows that were truncated or
    dropped because of their length; the ledger counts them (see `chatmill stats`).

    \b
    Examples:
      chatmill removed data/v1
      chatmill removed data/v1 --reason near_duplicate --source dolly
      chatmill removed data/v1 --reason "filter min_tokens" --json
    """
    opened = open_dataset(dataset)
    if opened.metadata is None:
        raise DataError(f"{dataset}: was written by another program, so it has no list of removed records")
    count = 0
    for record in _wanted(removed_records(opened), reason, source):
        count += 1
        if as_json:
            echo_json({name: value for name, value in asdict(record).items() if value is not None})
        else:
            twin = f", twin {_place(record.twin)}" if record.twin is not None else ""
            echo_line(f"{_place(record)}: {record.reason}{twin}")
    if count or as_json:
        return
    which = "".join(
        f" {what} {one_line(value)}" for what, value in (("with reason", reason), ("from source", source)) if value
    )
    echo_line(f"{dataset}: no record{which} was removed")


def _wanted(records: Iterator[RemovedRecord], reason: str | None, source: str | None) -> Iterator[RemovedRecord]:
    for record in records:
        if reason in (None, record.reason) and source in (None, record.source):
            yield record


def _place(record: RecordPlace) -> str:
    # Omit the source if the file name starts with it.
    name = "" if record.file.startswith(record.source) else f"{record.source} "
    return f"{name}{record.file}:{record.line}"
