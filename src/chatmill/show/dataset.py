"""An open dataset together with the tokenizer that decodes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.ledger import Ledger
from chatmill.records import ShapeOptions
from chatmill.remote.urls import Place, Url, place
from chatmill.rows import Rows, TrainOn
from chatmill.show.mixed import MixedDataset, open_mixed, source_folders, tokenizer_metadata
from chatmill.show.text import TokenText
from chatmill.store.episodes import Episodes
from chatmill.store.primer_cache import PrimerCache, is_cache, open_cache
from chatmill.store.read import Dataset, open_dataset
from chatmill.tokenizer import Tokenizer, open_tokenizer


@dataclass(frozen=True)
class RecordPreview:
    """A description of records that are shown without preparing a dataset."""

    path: Place
    """The file or folder of records, or the recipe."""
    note: str
    """A sentence about which records were read and how they were rendered."""
    faults: tuple[str, ...]
    """Errors for the first few records that cannot be read."""


@dataclass(frozen=True)
class DatasetView:
    """An open dataset or cache, and a decoder for its tokens; `without_text` says why no tokenizer is available."""

    dataset: Dataset
    text: TokenText
    without_text: str | None
    preview: RecordPreview | None = None
    """Set if the input is a file of records or a recipe instead of a dataset."""

    @property
    def path(self) -> Place:
        return self.dataset.path

    @property
    def title(self) -> Place:
        """The path to show; for a preview, the path of the records or the recipe."""
        return self.path if self.preview is None else self.preview.path

    @property
    def sources(self) -> tuple[str, ...] | None:
        """The names of the sources in a folder of datasets and caches, or None for a single dataset."""
        return tuple(each.name for each in self.dataset.mixed) if isinstance(self.dataset, MixedDataset) else None

    @property
    def ledger(self) -> Ledger | None:
        """The dataset's ledger, or None if another program wrote the dataset or one of its sources."""
        if isinstance(self.dataset, PrimerCache):
            return self.dataset.meta.ledger
        if isinstance(self.dataset, MixedDataset):
            return self.dataset.ledger
        return None if self.dataset.metadata is None else self.dataset.metadata.ledger

    @property
    def format_name(self) -> str | None:
        """The name of the chat format: a preset or `template`, or None if the dataset does not record a format."""
        stored = self.dataset.meta.format if isinstance(self.dataset, PrimerCache) else None
        if stored is None and self.dataset.metadata is not None:
            stored = self.dataset.metadata.format.get("name")
        return one_line(stored) if isinstance(stored, str) and stored else None

    @property
    def config(self) -> Mapping[str, Any]:
        """The options that the dataset was built with, as recorded in its metadata."""
        return {} if self.dataset.metadata is None else self.dataset.metadata.config

    @property
    def unrolled(self) -> bool:
        """Whether conversations were unrolled into one row per answer; if so, one record can have several rows."""
        return bool(self.config.get("unroll"))

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.text.tokenizer

    def row(self, split: str, episode: int) -> Rows:
        """Return one episode of a split."""
        episodes = self.dataset[split]
        if not 0 <= episode < len(episodes):
            right = f"expected 0 to {len(episodes) - 1:,}" if len(episodes) else "the split is empty"
            raise UsageError(f"{self.title}: no episode {episode} in {split}; {right}")
        return episodes.rows([episode])

    def shape_of(self, file: str, source: str | None = None) -> tuple[str | None, ShapeOptions]:
        """Return the record shape of an input file, and the options of the shape.

        In a folder of datasets, `source` is the name of the dataset that contains the file.
        """
        for entry in _entries(self._config_of(source), file):
            if "shape" in entry:
                names = ("columns", "response_template", "instruction_template")
                options = {name: str(entry[name]) for name in names if isinstance(entry.get(name), str)}
                return str(entry["shape"]), ShapeOptions(**options)
        return None, ShapeOptions()

    def train_on(self, file: str | None, source: str | None = None) -> TrainOn | None:
        """Return the `train_on` of an input file, or None if the dataset does not record it.

        In a folder of datasets, `source` is the name of the dataset that contains the file.
        """
        config = self._config_of(source)
        value = config.get("train_on")
        if "reweighed_from" not in config:
            value = next((entry.get("train_on") for entry in _entries(config, file)), value)
        return value if value in get_args(TrainOn) else None

    def _config_of(self, source: str | None) -> Mapping[str, Any]:
        """Return the options of a dataset; in a folder of datasets, `source` is the name of the dataset."""
        if not isinstance(self.dataset, MixedDataset):
            return self.config
        metadata = next((each.dataset.metadata for each in self.dataset.mixed if each.name == source), None)
        return {} if metadata is None else metadata.config

    def split_named(self, split: str | None) -> tuple[str, Episodes]:
        """Return the name and the episodes of a split, by default of the first split that is not empty."""
        if split is None:
            split = next((name for name in self.dataset.splits if len(self.dataset[name])), "train")
        return split, self.dataset[split]


def open_view(
    path: str | Place,
    tokenizer: str | None = None,
    *,
    token_dtype: str | None = None,
    sources: Sequence[str] | None = None,
) -> DatasetView:
    """Open a dataset, a cache, or a folder of datasets and caches, with the tokenizer that it was built with.

    `tokenizer` must have the hash that the dataset records. By default, the tokenizer is searched for in the dataset
    folder, next to the folder, and in the current folder. `token_dtype` is passed to `open_dataset`. `sources` are the
    names of the sources to open in a folder of datasets; by default, all sources are opened.
    """
    folder = place(path)
    if isinstance(folder, Path) and source_folders(folder):
        dataset: Dataset = open_mixed(folder, sources, token_dtype=token_dtype)
    else:
        dataset = open_cache(folder) if is_cache(folder) else open_dataset(folder, token_dtype=token_dtype)
    built_with, control, besides, name = tokenizer_metadata(dataset)

    def opened(spec: str | Path) -> Tokenizer:
        # Add the same tokens as the dataset, because the tokenizer's hash depends on the added tokens.
        return open_tokenizer(spec, control=control, besides=besides, add_tokens=True)

    if tokenizer is not None:
        given = opened(tokenizer)
        if built_with is not None and given.sha256 != built_with:
            raise DataError(
                f"{folder}: was built with the tokenizer {built_with[:12]}…, but {one_line(tokenizer, 300)} is "
                f"{given.sha256[:12]}…; pass the tokenizer that it was built with"
            )
        return DatasetView(dataset, TokenText(given), None)
    if built_with is None:
        return DatasetView(
            dataset, TokenText(None), "the dataset does not record its tokenizer; pass it with --tokenizer"
        )
    for spec in _candidates(folder, name):
        with suppress(ChatmillError):
            candidate = opened(spec)
            if candidate.sha256 == built_with:
                return DatasetView(dataset, TokenText(candidate), None)
    called = f"{one_line(name, 200)} ({built_with[:12]}…)" if name else f"{built_with[:12]}…"
    return DatasetView(dataset, TokenText(None), f"the tokenizer {called} was not found; pass it with --tokenizer")


def _entries(config: Mapping[str, Any], file: str | None) -> Iterator[Mapping[str, Any]]:
    """Yield the options that a dataset records for an input file, such as its shape and `train_on`."""
    listed = config.get("sources")
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and entry.get("file") == file:
            yield entry


def dataset_text(dataset: Place) -> TokenText:
    """Return a decoder for a dataset's tokens; it shows token ids if the tokenizer is not found."""
    with suppress(ChatmillError):
        return open_view(dataset).text
    return TokenText(None)


def _candidates(folder: Place, name: str | None) -> Iterator[str | Path]:
    """Yield existing paths of a tokenizer: in the dataset folder, next to the folder, and in the current folder."""
    if name is None or name == "bytes":
        yield "bytes"
    elif Path(name).name == name:
        beside = () if isinstance(folder, Url) else (folder / name, folder.resolve().parent / name)
        places = (*beside, Path(name))
        yield from dict.fromkeys(place for place in places if place.exists())
