"""A dataset to look at: opened, with the tokenizer that its tokens are read with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.format import load_format
from chatmill.ledger import Ledger
from chatmill.rows import Rows, TrainOn
from chatmill.show.text import TokenText
from chatmill.store.primer_cache import PrimerCache, is_cache, open_cache
from chatmill.store.read import Dataset, Episodes, open_dataset
from chatmill.tokenizer import Tokenizer, open_tokenizer


@dataclass(frozen=True)
class DatasetView:
    """An open dataset or cache; `without_text` says why its tokens are shown as ids, if they are."""

    dataset: Dataset
    text: TokenText
    without_text: str | None

    @property
    def path(self) -> Path:
        return self.dataset.path

    @property
    def ledger(self) -> Ledger | None:
        """None if another program wrote the dataset."""
        if isinstance(self.dataset, PrimerCache):
            return self.dataset.meta.ledger
        return None if self.dataset.metadata is None else self.dataset.metadata.ledger

    @property
    def config(self) -> Mapping[str, Any]:
        """The options that determined the dataset, as far as it remembers them."""
        return {} if self.dataset.metadata is None else self.dataset.metadata.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.text.tokenizer

    def row(self, split: str, episode: int) -> Rows:
        """One episode."""
        episodes = self.dataset[split]
        if not 0 <= episode < len(episodes):
            right = f"it has 0 to {len(episodes) - 1:,}" if len(episodes) else "it has none"
            raise UsageError(f"{self.path}: no episode {episode} in {split}; {right}")
        return episodes.rows([episode])

    def shape_of(self, file: str) -> str | None:
        """The shape that the records of a file were read as."""
        return next((str(entry["shape"]) for entry in self._sources(file) if "shape" in entry), None)

    def train_on(self, file: str | None) -> TrainOn | None:
        """Whose turns were trained of the records of a file, as far as the dataset says."""
        if "reweighed_from" not in self.config:
            for entry in self._sources(file):
                return _choice(entry.get("train_on"))
        return _choice(self.config.get("train_on"))

    def _sources(self, file: str | None) -> Iterator[Mapping[str, Any]]:
        """What the metadata says of a file: its shape, its source, whose turns are trained."""
        listed = self.config.get("sources")
        for entry in listed if isinstance(listed, list) else ():
            if isinstance(entry, dict) and entry.get("file") == file:
                yield entry


def _choice(value: Any) -> TrainOn | None:
    return value if value in ("assistant", "last", "all") else None


def open_view(path: str | Path, tokenizer: str | None = None) -> DatasetView:
    """A dataset or cache with its tokenizer: the one named, which must be the right one, or the one found beside it."""
    folder = Path(path)
    dataset = open_cache(folder) if is_cache(folder) else open_dataset(folder)
    built_with, control, besides, name = _remembered(dataset)

    def opened(spec: str | Path) -> Tokenizer:
        # What the dataset's tokenizer had added is added; the hash then says whether that is the same one.
        return open_tokenizer(spec, control=control, besides=besides, add_tokens=True)

    if tokenizer is not None:
        given = opened(tokenizer)
        if built_with is not None and given.sha256 != built_with:
            raise DataError(
                f"{folder}: built with tokenizer {built_with[:12]}…, {one_line(tokenizer, 300)} is "
                f"{given.sha256[:12]}…; name the one it was built with"
            )
        return DatasetView(dataset, TokenText(given), None)
    if built_with is None:
        return DatasetView(dataset, TokenText(None), "the dataset does not say its tokenizer; name it with --tokenizer")
    for spec in _candidates(folder, name):
        try:
            found = opened(spec)
        except ChatmillError:
            continue
        if found.sha256 == built_with:
            return DatasetView(dataset, TokenText(found), None)
    called = f"{one_line(name, 200)} ({built_with[:12]}…)" if name else f"{built_with[:12]}…"
    return DatasetView(dataset, TokenText(None), f"its tokenizer {called} is not here; name it with --tokenizer")


def _candidates(folder: Path, name: str | None) -> Iterator[str | Path]:
    """Where a tokenizer of this name may lie: beside the dataset, or here."""
    if name is None or name == "bytes":
        yield "bytes"
        return
    places = [folder / name, folder.resolve().parent / name, Path(name)]
    yield from dict.fromkeys(place for place in places if Path(name).name == name and place.exists())


def _remembered(dataset: Dataset) -> tuple[str | None, dict[str, str], tuple[str, ...], str | None]:
    """What a dataset says of its tokenizer: hash, control tokens by key, further ones, name."""
    if isinstance(dataset, PrimerCache):
        try:
            control = dict(load_format(dataset.meta.format).tokens)
        except ChatmillError:
            control = {}
        return dataset.meta.tokenizer_sha256, control, (), None
    if dataset.metadata is None:
        return None, {}, (), None
    found = dataset.tokenizer_state()
    state: dict[str, Any] = found if isinstance(found, dict) else {}
    tokenizer = dataset.metadata.tokenizer
    return tokenizer["sha256"], state.get("control", {}), tuple(state.get("besides", ())), tokenizer["name"]


def split_of(shown: DatasetView, split: str | None) -> tuple[str, Episodes]:
    """The split that is meant: the one named, or the first that holds an episode."""
    if split is None:
        split = next((name for name in shown.dataset.splits if len(shown.dataset[name])), "train")
    return split, shown.dataset[split]
