"""Open the datasets and caches that a run reads, and check that they match the run's config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError, UsageError, one_line
from chatmill.load.block_check import block_fault
from chatmill.load.config import LoadConfig
from chatmill.load.mix import MIX_SFT
from chatmill.remote.urls import Place, Url, place
from chatmill.rows import NO_FILE, Index, Rows
from chatmill.store.episodes import Episodes
from chatmill.store.layout import INDEX, MASK, SPANS, TOKEN_DTYPES
from chatmill.store.mapped import check_mapped, reading
from chatmill.store.primer_cache import PrimerCache, cache_folder, is_cache, open_cache
from chatmill.store.read import Dataset, in_dataset_folder, is_dataset, open_dataset, stored_metadata

BUILDERS = ("primer", "oasst1", "dolly15k")
"""Names of sources that have their own build command."""
STORED_MIX = ("mix_sft", "mix_epochs")
"""Config keys of a dataset that can contain the mix of its recipe."""
SCAN = 1 << 20
"""Number of index entries that are scanned at a time."""
SAMPLE = 1 << 16
"""Number of bytes that a fingerprint reads at the start, the middle and the end of a file."""


@dataclass(frozen=True)
class DataSource:
    """One dataset or cache, with its name in the mix (an empty string for a single dataset)."""

    name: str
    dataset: Dataset

    @property
    def path(self) -> Place:
        return self.dataset.path

    def __contains__(self, split: str) -> bool:
        return split in self.dataset and len(self.dataset[split]) > 0

    def episodes(self, split: str) -> Episodes:
        """Return the episodes of a split; raise `DataError` if the split is empty."""
        episodes = self.dataset[split]
        if not len(episodes):
            raise DataError(f"{self.path}: the split {split} is empty; add episodes and rebuild, or use another split")
        return episodes

    @cached_property
    def sha256(self) -> str:
        """The hash of the dataset or, if another program wrote it, a hash of the names, sizes and sampled bytes of its
        files.
        """
        return self.dataset.sha256 or _fingerprint(self.dataset)

    @property
    def tokenizer_sha256(self) -> str | None:
        if isinstance(self.dataset, PrimerCache):
            return self.dataset.meta.tokenizer_sha256
        return None if self.dataset.metadata is None else self.dataset.metadata.tokenizer["sha256"]

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary size, or None if the dataset does not record it."""
        meta = self.dataset.meta if isinstance(self.dataset, PrimerCache) else self.dataset.metadata
        return None if meta is None else meta.vocab_size

    @property
    def id_limit(self) -> int:
        """Upper limit (exclusive) of the token ids that the dataset's files can contain."""
        return 1 << 8 * TOKEN_DTYPES[self.dataset.token_dtype].itemsize

    @cached_property
    def eot(self) -> int | None:
        """The id of the end-of-turn token, or None if the dataset does not record it."""
        if isinstance(self.dataset, PrimerCache):
            return self.dataset.meta.special_token_ids.get("eot")
        if self.dataset.metadata is not None:
            metadata = self.dataset.metadata
            return metadata.special_token_ids.get("eot") if metadata.pad_token_id is None else metadata.pad_token_id
        return self.dataset.foreign_end_token()

    @property
    def is_foreign(self) -> bool:
        """Whether another program wrote the dataset."""
        return self.dataset.metadata is None and not isinstance(self.dataset, PrimerCache)

    @property
    def has_mask(self) -> bool:
        return all(MASK in shard.records for name in self.dataset.splits for shard in self.dataset[name].shards)

    def short(self, split: str, least: int) -> Index:
        """Return the indices of the episodes with fewer than `least` tokens, in ascending order."""
        episodes, metadata = self.dataset[split], self.dataset.metadata
        numbers = [np.empty(0, dtype=np.int64)]
        first = 0
        for shard, info in enumerate(episodes.shards):
            shortest = 0 if metadata is None else metadata.splits[split].shards[shard].shortest
            if shortest < least:
                with reading():
                    index = episodes.array(shard, INDEX)
                    for start in range(0, len(index), SCAN):
                        numbers.append(np.flatnonzero(index["length"][start : start + SCAN] < least) + (first + start))
                    check_mapped(index)
            first += info.num_episodes
        return np.concatenate(numbers)

    def weights(self, split: str) -> NDArray[np.float32]:
        """Return the distinct span weights of a split in ascending order; empty if the split has no spans."""
        episodes = self.dataset[split]
        weights = [np.empty(0, dtype=np.float32)]
        for number, shard in enumerate(episodes.shards):
            if SPANS in shard.records:
                with reading():
                    spans = episodes.array(number, SPANS)
                    weights.append(np.unique(spans["weight"]))
                    check_mapped(spans)
        return np.unique(np.concatenate(weights))

    def longest(self, split: str) -> int | None:
        """Return the number of tokens in the longest episode, or None if the dataset has no metadata."""
        metadata = self.dataset.metadata
        return None if metadata is None else max((shard.longest for shard in metadata.splits[split].shards), default=0)


class EpisodeSegment(NamedTuple):
    """One segment of an episode."""

    source: DataSource
    episode: int
    """The index of the episode in its source."""
    row: Rows

    @property
    def place(self) -> str | None:
        """The origin of the segment as file:line, or None if it is unknown."""
        if not len(self.row.origins) or self.row.origins["file"][0] == NO_FILE:
            return None
        return f"{self.row.files[self.row.origins['file'][0]].path}:{self.row.origins['line'][0]}"


def conversation(sources: Sequence[DataSource], split: str, episode: int, segment: int) -> EpisodeSegment | None:
    """Return a segment of an episode, or None if the episode does not exist; segment -1 is the last.

    Episodes are numbered consecutively across all sources. `segment` is taken modulo the number of nonempty segments in
    the episode, because a row of a batch can contain the same episode twice.
    """
    for source in sources:
        episodes = source.episodes(split)
        if 0 <= episode < len(episodes):
            row = episodes.rows([episode])
            split_up = Rows(row.ids, row.spans, row.first_span, row.origins, np.arange(len(row.first_span)), row.files)
            filled = np.flatnonzero(split_up.lengths)
            at = int(filled[segment % len(filled)]) if len(filled) else 0
            return EpisodeSegment(source, episode, split_up[at : at + 1])
        episode -= len(episodes)
    return None


def open_sources(
    dataset_dir: str | Place, config: LoadConfig, *, stored_mix: bool = True
) -> tuple[tuple[DataSource, ...], LoadConfig]:
    """Open the sources of a run; return them, and the config completed with the mix and the padding token.

    `dataset_dir` is a dataset, the cache of one source, or a folder with a dataset or cache for each source in
    `mix_sft` or `mix_epochs`. If a dataset has several sources, `mix_sft` or `mix_epochs` selects the sources to use.
    Without `mix_sft` and `mix_epochs`, the dataset is mixed as its recipe specifies. If the recipe has no mix or
    `stored_mix` is false, the dataset is read as one source. Sources are sorted by name.
    """
    folder = place(dataset_dir)
    if isinstance(folder, Url):
        sources, config = _remote_sources(folder, config, stored_mix)
    # Also open a folder that has metadata but no episodes; this raises an error that describes the fault.
    elif is_dataset(folder) or (folder.is_dir() and in_dataset_folder(folder, stored_metadata) is not None):
        sources, config = _of_dataset(open_dataset(folder, token_dtype=config.token_dtype), config, stored_mix)
    elif is_cache(folder):
        sources, config = _of_dataset(open_cache(folder), config, stored_mix)
    else:
        config = _sorted_mix(config if config.mix is not None else replace(config, mix_sft=MIX_SFT))
        sources = _mixed(folder, config)
    if faults := list(_faults(sources, config)):
        raise DataError("; ".join(faults))
    if config.pad_token_id is None:
        config = replace(config, pad_token_id=sources[0].eot)
    return sources, config


def _remote_sources(url: Url, config: LoadConfig, stored_mix: bool) -> tuple[tuple[DataSource, ...], LoadConfig]:
    """Open the dataset at a URL or, if there is none and the config has a mix, the datasets below the URL."""
    if config.mix is None or is_dataset(url):
        return _of_dataset(open_dataset(url, token_dtype=config.token_dtype), config, stored_mix)
    config = _sorted_mix(config)
    sources = [
        DataSource(name, open_dataset(cache_folder(url, name), token_dtype=config.token_dtype))
        for name in config.mix or ()
    ]
    return tuple(sources), config


def _sorted_mix(config: LoadConfig) -> LoadConfig:
    changes: dict[str, Any] = {config.mix_key: dict(sorted((config.mix or {}).items()))}
    return replace(config, **changes)


def _of_dataset(dataset: Dataset, config: LoadConfig, stored_mix: bool) -> tuple[tuple[DataSource, ...], LoadConfig]:
    """Return the sources of the mix in one dataset or, without a mix, the whole dataset as one source."""
    if config.mix is None and stored_mix and dataset.sources and dataset.metadata is not None:
        stored = {name: dataset.metadata.config[name] for name in STORED_MIX if name in dataset.metadata.config}
        try:
            config = replace(config, **stored)
        except UsageError as error:
            raise DataError(f"{dataset.path}: cannot read its recipe's mix ({error}); rebuild the dataset") from None
    if config.mix is None:
        return (DataSource("", dataset),), config
    config = _sorted_mix(config)
    names = list(config.mix or ())
    if not dataset.sources:
        raise UsageError(
            f"{dataset.path}: is a dataset of one source, but {config.mix_key} has {', '.join(map(one_line, names))}; "
            "expected the folder that contains them, or a dataset made from a recipe with several sources"
        )
    if unknown := [one_line(name) for name in names if name not in dataset.sources]:
        known = ", ".join(map(one_line, dataset.sources))
        raise UsageError(
            f"{dataset.path}: {config.mix_key} has unknown sources: {', '.join(unknown)}; expected {known}"
        )
    sources = tuple(_part(dataset, name) for name in names)
    if empty := [one_line(source.name) for source in sources if "train" not in source]:
        known = ", ".join(one_line(name) for name in dataset.sources if "train" in _part(dataset, name))
        raise UsageError(
            f"{dataset.path}: {config.mix_key} has sources without rows in train: {', '.join(empty)}; expected {known}"
        )
    return sources, config


def _part(dataset: Dataset, name: str) -> DataSource:
    return DataSource(name, dataset.of_source(name))


def val_only_sources(sources: Sequence[DataSource]) -> tuple[DataSource, ...]:
    """Return the sources of a dataset that have only validation rows and are not in `sources`.

    The tuple is empty if each source is a separate dataset.
    """
    whole = sources[0].dataset.whole
    if whole is None:
        return ()
    used = {source.name for source in sources}
    others = (_part(whole, name) for name in sorted(whole.sources) if name not in used)
    return tuple(source for source in others if "train" not in source and "val" in source)


def _mixed(root: Path, config: LoadConfig) -> tuple[DataSource, ...]:
    mix = config.mix or {}
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; expected a dataset, a cache, or a folder of caches")
    missing = [name for name in mix if not _is_source(cache_folder(root, name))]
    if missing and len(missing) == len(mix) and not any(_is_source(path) for path in root.iterdir()):
        raise DataError(
            f"{root}: is neither a dataset (no train/{INDEX} or train/shard_00000/{INDEX}) nor a folder of caches; "
            "expected a folder that chatmill prepare or chatmill build-sft-… wrote"
        )
    if missing:
        faults = [f"{root}: {config.mix_key} has {one_line(name)}, which is not built" for name in missing]
        command = f"prepare … -o {root / missing[0]}"
        if missing[0] in BUILDERS:
            command = f"build-sft-{missing[0]} --out-dir {root}"
        raise DataError("; ".join([*faults, f"build it with chatmill {command}"]))
    folders = {name: cache_folder(root, name) for name in mix}
    return tuple(
        DataSource(
            name, open_cache(folder) if is_cache(folder) else open_dataset(folder, token_dtype=config.token_dtype)
        )
        for name, folder in folders.items()
    )


def _is_source(folder: Path) -> bool:
    return folder.is_dir() and (is_cache(folder) or is_dataset(folder))


def _faults(sources: tuple[DataSource, ...], config: LoadConfig) -> Iterator[str]:
    """Yield an error message for each conflict between the config and a source, or between two sources."""
    for source in sources:
        if config.reads_blocks and (fault := block_fault(source.dataset, config.block_size)):
            yield fault
        if config.use_loss_mask and not source.has_mask:
            yield (
                f"{source.path}: has no mask.bin, but use_loss_mask is true; "
                "build it with a loss mask, or set use_loss_mask to false"
            )
        if config.token_dtype is not None and source.dataset.token_dtype != config.token_dtype:
            yield f"{source.path}: token_dtype is {config.token_dtype}, but its tokens are {source.dataset.token_dtype}"
        if config.pad_token_id is None and source.eot is None:
            yield f"{source.path}: does not record an end-of-turn token; set pad_token_id"
        limit = source.vocab_size or source.id_limit
        if config.pad_token_id is not None and config.pad_token_id >= limit:
            yield f"pad_token_id is {config.pad_token_id}; expected an id below {limit}, as in {source.path}"
        elif config.pad_token_id is None and source.eot is not None and source.eot >= limit:
            yield (
                f"{source.path}: the id of its end-of-turn token is {source.eot}, but its ids must be below {limit}; "
                "set pad_token_id"
            )
    first = sources[0]
    for other in sources[1:]:
        if other.tokenizer_sha256 != first.tokenizer_sha256 or other.vocab_size != first.vocab_size:
            yield f"{other.path}: was built with a different tokenizer than {first.path}; use one tokenizer for both"
        elif config.pad_token_id is None and other.eot != first.eot:
            yield (
                f"{other.path}: its end-of-turn token is {other.eot}, but that of {first.path} is {first.eot}; "
                "set pad_token_id"
            )


def _fingerprint(dataset: Dataset) -> str:
    """Return a hash of the name, the size and sampled bytes of every file in a dataset."""
    digest = hashlib.sha256()
    for split in dataset.splits:
        episodes = dataset[split]
        for number, shard in enumerate(episodes.shards):
            if MASK not in shard.records and shard.dtype.itemsize > 2:
                # Include token_dtype, because it determines which tokens the bytes represent.
                digest.update(shard.dtype.name.encode())
            with reading():
                for name in sorted(shard.records):
                    data = episodes.array(number, name).view(np.uint8)
                    place = PurePath(str(shard.folder / name)).relative_to(str(dataset.path))
                    digest.update(json.dumps([str(place), len(data)]).encode())
                    for start in dict.fromkeys((0, max(0, len(data) // 2 - SAMPLE // 2), max(0, len(data) - SAMPLE))):
                        digest.update(data[start : start + SAMPLE].data)
                episodes.check([number])
    return digest.hexdigest()
