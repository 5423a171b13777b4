"""The input of `chatmill show`, `report` and `view`: datasets, caches, folders of caches, and unprepared records."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from chatmill.cli.options import GivenPlace, argument, dataset_place
from chatmill.cli.record_options import AllowCode
from chatmill.errors import DataError, RecordError, UsageError, one_line
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.preview import RECORDS, prepare_preview
from chatmill.prepare.recipe import SUFFIXES as RECIPE_SUFFIXES
from chatmill.prepare.recipe import load_recipe
from chatmill.records.files import SUFFIXES as RECORD_SUFFIXES
from chatmill.records.files import local_files
from chatmill.remote.urls import Place
from chatmill.show.dataset import DatasetView, RecordPreview, open_view
from chatmill.show.mixed import source_folders
from chatmill.store.layout import METADATA
from chatmill.store.primer_cache import is_cache
from chatmill.store.read import is_dataset
from chatmill.tokenizer.factory import MissingTokensError

FAULTS = 20
"""Maximum number of invalid records to list."""

Viewed = Annotated[
    GivenPlace,
    argument(
        "DATA",
        "A dataset, a cache, a folder of datasets or caches, or input to preview: a file or folder of records, or a "
        "recipe.",
        dataset_place,
    ),
]


@dataclass(frozen=True)
class PreviewOptions:
    """Command-line options for input that has not been prepared as a dataset; see `cli/expand.py`."""

    format: Annotated[
        str | None,
        typer.Option(
            help="For records: the chat format, as in `chatmill prepare`.", show_default="the chat template, or chatml"
        ),
    ] = None
    first: Annotated[
        int | None,
        typer.Option(
            min=1, help="For records: number of records to render from each source.", show_default=f"{RECORDS:,}"
        ),
    ] = None
    allow_code: AllowCode = None


@dataclass(frozen=True)
class OpenData:
    view: DatasetView
    record_folders: tuple[Path, ...] = ()
    """Folders that contain the record files of a preview."""
    folder: Path | None = None
    """Temporary folder for the index of a preview; None for a dataset."""


@contextmanager
def open_data(
    data: Place,
    tokenizer: str | None,
    preview: PreviewOptions,
    *,
    token_dtype: str | None = None,
    sources: list[str] | None = None,
) -> Iterator[OpenData]:
    """Open a dataset, or render the first records of other input to a temporary folder, which is removed on exit."""
    is_recipe = data.name.lower().endswith(RECIPE_SUFFIXES)
    if not is_recipe and not _holds_records(data):
        if preview != PreviewOptions():
            raise UsageError(f"--format, --first and --allow-code apply to records, but {data} is already prepared")
        yield OpenData(open_view(data, tokenizer, token_dtype=token_dtype, sources=sources))
        return
    if is_recipe:
        if tokenizer is not None or preview.format is not None:
            raise UsageError(f"--tokenizer and --format cannot be used with a recipe; set them in {data}")
        job = load_recipe(str(data))
    else:
        job = Job((InputSource((str(data),)),), tokenizer=tokenizer or "bytes", format=preview.format)
    faults: list[str] = []

    def on_fault(fault: RecordError) -> None:
        if len(faults) < FAULTS:
            faults.append(str(fault))

    records = preview.first or RECORDS
    with TemporaryDirectory(prefix="chatmill-view-") as name:
        folder = Path(name)
        prepare = partial(prepare_preview, target=folder / "dataset", records=records, on_fault=on_fault)
        try:
            try:
                made = prepare(job, allow_code=preview.allow_code or ())
            except MissingTokensError:
                # A preview adds missing control tokens to the tokenizer instead of failing.
                if is_recipe:
                    raise
                made = prepare(replace(job, add_tokens=True))
        except DataError as error:
            if not faults:
                raise
            raise DataError(f"{error}; first error: {faults[0]}") from None
        opened = open_view(folder / "dataset", job.tokenizer)
        ledger = made.metadata.ledger
        read, rejected = ledger.total("read").rows, ledger.total("rejected").rows
        note = (
            f"Not prepared yet: {'all' if made.read_whole else 'the first'} {read:,} record{'' if read == 1 else 's'}"
            f"{f', of which {rejected:,} cannot be read' if rejected else ''}, rendered with the format "
            f"{opened.format_name} and the tokenizer {one_line(job.tokenizer, 100)}"
            f"{'' if is_recipe else '; choose others with --tokenizer and --format'}."
        )
        shown = replace(opened, preview=RecordPreview(data, note, tuple(faults)))
        yield OpenData(shown, _record_folders(job), folder)


def _holds_records(data: Place) -> bool:
    """Return whether `data` is a file of records, or a folder of record files that is not a dataset or a cache."""
    if not isinstance(data, Path) or data.is_file():
        return data.name.lower().endswith(RECORD_SUFFIXES)
    if not data.is_dir() or is_cache(data) or is_dataset(data) or (data / METADATA).exists() or source_folders(data):
        return False
    return any(path.name.lower().endswith(RECORD_SUFFIXES) for path in data.iterdir() if path.is_file())


def _record_folders(job: Job) -> tuple[Path, ...]:
    files = local_files([name for source in job.sources for name in source.inputs])
    absolute = [path.parent for path in files if path.is_absolute()]
    return (Path(), Path(os.path.commonpath(absolute))) if absolute else (Path(),)
