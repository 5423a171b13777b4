"""Show a folder of datasets and caches as one dataset, mixed as in training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from chatmill.errors import ChatmillError, DataError, one_line
from chatmill.format import load_format
from chatmill.ledger import Ledger
from chatmill.load.plan import datasets_hash
from chatmill.load.source import DataSource
from chatmill.remote.urls import Place
from chatmill.rows import NO_FILE, File, Index, Rows, concat, offsets
from chatmill.store.episodes import Episodes
from chatmill.store.primer_cache import PrimerCache, is_cache, open_cache
from chatmill.store.read import Dataset, is_dataset, open_dataset


class MixedEpisodes(Episodes):
    """The rows of all sources in one split, numbered consecutively as in training."""

    def __init__(self, sources: Sequence[DataSource], split: str) -> None:
        self._parts = [source.dataset[split] for source in sources if split in source]
        names = [source.name for source in sources if split in source]
        files = [[File(name, file.path) for file in part.files] for name, part in zip(names, self._parts, strict=True)]
        # Caches do not record files, so use a file with the source's name and an empty path.
        files = [own or [File(name, "")] for name, own in zip(names, files, strict=True)]
        shards = [shard for part in self._parts for shard in part.shards]
        super().__init__(self._parts[0].stored, shards, tuple(dict.fromkeys(file for own in files for file in own)))
        numbers = {file: number for number, file in enumerate(self.files)}
        self._file_numbers = [np.array([numbers[file] for file in own], dtype=np.uint32) for own in files]
        self._part_start = offsets(np.array([len(part) for part in self._parts], dtype=np.int64))

    def lengths_of(self, numbers: ArrayLike) -> Index:
        chosen = np.asarray(numbers, dtype=np.int64)
        lengths = np.empty(len(chosen), dtype=np.int64)
        of_part = np.searchsorted(self._part_start, chosen, side="right") - 1
        for part in np.unique(of_part).tolist():
            here = of_part == part
            lengths[here] = self._parts[part].lengths_of(chosen[here] - self._part_start[part])
        return lengths

    def rows(self, numbers: ArrayLike) -> Rows:
        chosen = np.asarray(numbers, dtype=np.int64)
        of_part = np.searchsorted(self._part_start, chosen, side="right") - 1
        runs = np.split(np.arange(len(chosen)), np.flatnonzero(np.diff(of_part)) + 1)
        return concat([self._rows(int(of_part[run[0]]), chosen[run]) for run in runs if len(run)])

    def _rows(self, part: int, numbers: Index) -> Rows:
        rows, known = self._parts[part].rows(numbers - self._part_start[part]), self._file_numbers[part]
        origins = rows.origins.copy()
        has_file = origins["file"] != NO_FILE
        # If the source records its files, a conversation without a file is padding.
        only = known[0] if not self._parts[part].files else NO_FILE
        origins["file"] = np.where(has_file, known[np.where(has_file, origins["file"], 0)], only)
        return replace(rows, origins=origins, files=self.files)


@dataclass(frozen=True)
class MixedDataset(Dataset):
    """The sources in a folder, combined into one dataset."""

    mixed: tuple[DataSource, ...]
    folder: Path

    @property
    def path(self) -> Place:
        return self.folder

    @property
    def sha256(self) -> str:
        return datasets_hash(self.mixed)

    @property
    def ledger(self) -> Ledger | None:
        """The sum of the ledgers of all sources, or None if one of the sources does not have a ledger."""
        total = Ledger()
        for source in self.mixed:
            metadata = source.dataset.meta if isinstance(source.dataset, PrimerCache) else source.dataset.metadata
            if metadata is None:
                return None
            total.merge(metadata.ledger)
        return total

    def tokenizer_state(self) -> Any:
        return self.mixed[0].dataset.tokenizer_state()


def source_folders(folder: Place) -> list[Path]:
    """Return the datasets and caches directly inside a folder; none if the folder is itself a dataset or a cache."""
    if not isinstance(folder, Path) or not folder.is_dir() or is_cache(folder) or is_dataset(folder):
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and (is_cache(path) or is_dataset(path)))


def open_mixed(folder: Path, names: Sequence[str] | None = None, *, token_dtype: str | None = None) -> MixedDataset:
    """Open the named sources in a folder, or all sources by default; raise `DataError` if their tokenizers differ."""
    folders = {path.name: path for path in source_folders(folder)}
    if missing := [one_line(name) for name in names or () if name not in folders]:
        known = ", ".join(map(one_line, folders))
        raise DataError(f"{folder}: has no source {', '.join(missing)}; the folder has {known}")
    sources = tuple(
        DataSource(name, open_cache(path) if is_cache(path) else open_dataset(path, token_dtype=token_dtype))
        for name, path in folders.items()
        if names is None or name in names
    )
    first = sources[0]
    for other in sources[1:]:
        # Sources with the same tokenizer may have added control tokens with different ids.
        if tokenizer_metadata(other.dataset)[:3] != tokenizer_metadata(first.dataset)[:3]:
            raise DataError(
                f"{folder}: {one_line(other.name)} and {one_line(first.name)} have different tokens; "
                "view one source at a time"
            )
    splits = dict.fromkeys(split for source in sources for split in source.dataset.splits if split in source)
    episodes = {split: MixedEpisodes(sources, split) for split in splits}
    return MixedDataset(first.dataset.stored, None, episodes, mixed=sources, folder=folder)


def tokenizer_metadata(dataset: Dataset) -> tuple[str | None, dict[str, str], tuple[str, ...], str | None]:
    """Return the tokenizer's hash, control tokens, other added tokens and name, as recorded in a dataset."""
    if isinstance(dataset, MixedDataset):
        return tokenizer_metadata(dataset.mixed[0].dataset)
    if isinstance(dataset, PrimerCache):
        control: dict[str, str] = {}
        with suppress(ChatmillError):
            control = dict(load_format(dataset.meta.format).tokens)
        return dataset.meta.tokenizer_sha256, control, (), None
    if dataset.metadata is None:
        return None, {}, (), None
    stored = dataset.tokenizer_state()
    state: dict[str, Any] = stored if isinstance(stored, dict) else {}
    tokenizer = dataset.metadata.tokenizer
    return tokenizer["sha256"], state.get("control", {}), tuple(state.get("besides", ())), tokenizer["name"]
