"""Sources: the datasets and caches a run reads, opened and held against what its config asks of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chatmill.errors import DataError, UsageError, one_line
from chatmill.load.config import LoadConfig
from chatmill.load.mix import MIX_SFT
from chatmill.rows import NO_FILE, Index, Rows
from chatmill.store.layout import INDEX, MASK, TOKENIZER_STATE
from chatmill.store.primer_cache import PrimerCache, cache_folder, is_cache, open_cache
from chatmill.store.read import Dataset, Episodes, is_dataset, open_dataset, stored_metadata

BUILDERS = ("primer", "oasst1", "dolly15k")
"""Sources that have a build command of their own."""
SCAN = 1 << 20
"""Index entries that are looked at together."""
SAMPLE = 1 << 16
"""Bytes that a fingerprint takes of the beginning, the middle and the end of a file."""
EOT_NAMES = ("eot_token_id", "eot_id", "eot", "eos_token_id", "eos_id", "eos")


@dataclass(frozen=True)
class DataSource:
    """One dataset or cache, under the name it is mixed by ("" if it is alone)."""

    name: str
    dataset: Dataset

    @property
    def path(self) -> Path:
        return self.dataset.path

    def __contains__(self, split: str) -> bool:
        return split in self.dataset and len(self.dataset[split]) > 0

    def episodes(self, split: str) -> Episodes:
        """The rows of a split; `DataError` if there are none."""
        found = self.dataset[split]
        if not len(found):
            raise DataError(f"{self.path}: the split {split} holds no episode; build it with some, or use another")
        return found

    @cached_property
    def sha256(self) -> str:
        """The hash of the dataset; of one that another program wrote, a fingerprint of sizes and samples."""
        return self.dataset.sha256 or _fingerprint(self.dataset)

    @property
    def tokenizer_sha256(self) -> str | None:
        if isinstance(self.dataset, PrimerCache):
            return self.dataset.meta.tokenizer_sha256
        return None if self.dataset.metadata is None else self.dataset.metadata.tokenizer["sha256"]

    @property
    def vocab_size(self) -> int | None:
        """One more than the largest id there may be; None if the dataset does not say."""
        if isinstance(self.dataset, PrimerCache):
            return self.dataset.meta.vocab_size
        return None if self.dataset.metadata is None else self.dataset.metadata.vocab_size

    @property
    def id_limit(self) -> int:
        """One more than the largest id that its files can hold."""
        return 1 << 8 * max(s.dtype.itemsize for name in self.dataset.splits for s in self.dataset[name].shards)

    @cached_property
    def eot(self) -> int | None:
        """The token that ends a turn, as far as the dataset says."""
        if isinstance(self.dataset, PrimerCache):
            return self.dataset.meta.special_token_ids.get("eot")
        if self.dataset.metadata is not None:
            metadata = self.dataset.metadata
            return metadata.special_token_ids.get("eot") if metadata.pad_token_id is None else metadata.pad_token_id
        if not (self.path / TOKENIZER_STATE).is_file():
            return None
        return _named_eot(self.dataset.tokenizer_state())

    @property
    def has_mask(self) -> bool:
        return all(MASK in shard.records for name in self.dataset.splits for shard in self.dataset[name].shards)

    def short(self, split: str, least: int) -> Index:
        """The episodes with fewer tokens, rising. Shards of which the metadata says that none is are not looked at."""
        episodes = self.dataset[split]
        found = [np.empty(0, dtype=np.int64)]
        first = 0
        for number, shard in enumerate(episodes.shards):
            if least > 0 and self._shortest(split, number) < least:
                index = episodes.array(number, INDEX)
                for start in range(0, len(index), SCAN):
                    wrong = np.flatnonzero(index["length"][start : start + SCAN] < least)
                    found.append(wrong + (first + start))
            first += shard.num_episodes
        return np.concatenate(found)

    def _shortest(self, split: str, shard: int) -> int:
        metadata = self.dataset.metadata
        return 0 if metadata is None else metadata.splits[split].shards[shard].shortest

    def longest(self, split: str) -> int | None:
        """Tokens of the longest episode, if the metadata says."""
        metadata = self.dataset.metadata
        return None if metadata is None else max((shard.longest for shard in metadata.splits[split].shards), default=0)


class EpisodeSegment(NamedTuple):
    """One segment of an episode."""

    source: DataSource
    episode: int
    """Its number in its source."""
    row: Rows
    """The segment as a row of its own."""

    @property
    def place(self) -> str | None:
        """file:line, if it is known."""
        if not len(self.row.origins) or self.row.origins["file"][0] == NO_FILE:
            return None
        return f"{self.row.files[self.row.origins['file'][0]].path}:{self.row.origins['line'][0]}"


def conversation(sources: Sequence[DataSource], split: str, episode: int, segment: int) -> EpisodeSegment | None:
    """A segment of an episode, counted back from -1, the last; None if there is no such episode.

    Episodes are numbered over all sources. An episode that stands twice in a row is counted back over both.
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


def open_sources(dataset_dir: str | Path, config: LoadConfig) -> tuple[tuple[DataSource, ...], LoadConfig]:
    """The sources of a run in a fixed order, and the config with what they decide: the mix, and the padding.

    A folder is a dataset, the cache of one source, or a root whose folders `mix_sft` names.
    """
    folder = Path(dataset_dir)
    if is_dataset(folder) or _claims_dataset(folder):
        sources: tuple[DataSource, ...] = (DataSource("", open_dataset(folder)),)
    elif is_cache(folder):
        sources = (DataSource("", open_cache(folder)),)
    else:
        # By name, so that it does not matter in which order a config names them.
        mix = dict(sorted((config.mix_sft or MIX_SFT).items()))
        config = replace(config, mix_sft=mix)
        sources = _mixed(folder, mix)
    if config.mix_sft is not None and sources[0].name == "":
        raise UsageError(
            f"{folder}: is one dataset, and mix_sft names {', '.join(map(one_line, config.mix_sft))}; "
            "expected the folder that holds them"
        )
    faults = list(_faults(sources, config))
    if faults:
        raise DataError("; ".join(faults))
    if config.pad_token_id is None:
        config = replace(config, pad_token_id=sources[0].eot)
    return sources, config


def _claims_dataset(folder: Path) -> bool:
    """Whether a folder without episodes says that it is a dataset: opening it tells what is wrong."""
    return folder.is_dir() and stored_metadata(folder) is not None


def _mixed(root: Path, mix: Mapping[str, float]) -> tuple[DataSource, ...]:
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; expected a dataset, a cache, or a folder of caches")
    missing = [name for name in mix if not _is_source(cache_folder(root, name))]
    if missing and len(missing) == len(mix) and not any(_is_source(path) for path in root.iterdir()):
        raise DataError(
            f"{root}: neither a dataset (train/{INDEX} or train/shard_00000/{INDEX}) nor a folder of caches; "
            "expected a folder that chatmill prepare or chatmill build-sft-… wrote"
        )
    if missing:
        raise DataError(
            "; ".join(f"{root}: mix_sft names {one_line(n)}, which is not built" for n in missing)
            + "; "
            + _build(missing[0], root)
        )
    return tuple(DataSource(name, _open(cache_folder(root, name))) for name in mix)


def _is_source(folder: Path) -> bool:
    return folder.is_dir() and (is_cache(folder) or is_dataset(folder))


def _open(folder: Path) -> Dataset:
    return open_cache(folder) if is_cache(folder) else open_dataset(folder)


def _build(name: str, root: Path) -> str:
    if name in BUILDERS:
        return f"build it with chatmill build-sft-{name} --out-dir {root}"
    return f"build it with chatmill prepare … -o {root / name}"


def _faults(sources: tuple[DataSource, ...], config: LoadConfig) -> Iterator[str]:
    """What the config asks for that the sources do not have."""
    for source in sources:
        if config.use_loss_mask and not source.has_mask:
            yield f"{source.path}: has no mask.bin, and use_loss_mask is true; prepare it with one, or set it to false"
        if config.pad_token_id is None and source.eot is None:
            yield f"{source.path}: does not say which token ends a turn; set pad_token_id"
        limit = source.vocab_size or source.id_limit
        if config.pad_token_id is not None and config.pad_token_id >= limit:
            yield f"pad_token_id is {config.pad_token_id}; {source.path} has ids below {limit}"
        elif config.pad_token_id is None and source.eot is not None and source.eot >= limit:
            yield f"{source.path}: ends turns with {source.eot}, and has ids below {limit}; set pad_token_id"
    first = sources[0]
    for other in sources[1:]:
        if other.tokenizer_sha256 != first.tokenizer_sha256 or other.vocab_size != first.vocab_size:
            yield f"{other.path}: was built with another tokenizer than {first.path}; build both with one"
        elif config.pad_token_id is None and other.eot != first.eot:
            yield f"{other.path}: ends turns with {other.eot}, {first.path} with {first.eot}; set pad_token_id"


def _named_eot(state: Any) -> int | None:
    """The end of turn in what another program wrote about its tokenizer, under one of its usual names."""
    if not isinstance(state, dict):
        return None
    special = state.get("special_token_ids")
    for table in (state, special if isinstance(special, dict) else {}):
        for name in EOT_NAMES:
            if type(table.get(name)) is int and table[name] >= 0:
                found: int = table[name]
                return found
    return None


def _fingerprint(dataset: Dataset) -> str:
    digest = hashlib.sha256()
    for split in dataset.splits:
        for shard in dataset[split].shards:
            for name in sorted(shard.records):
                path = shard.folder / name
                size = path.stat().st_size
                digest.update(json.dumps([str(path.relative_to(dataset.path)), size]).encode())
                with path.open("rb") as file:
                    for start in dict.fromkeys((0, max(0, size // 2 - SAMPLE // 2), max(0, size - SAMPLE))):
                        file.seek(start)
                        digest.update(file.read(SAMPLE))
    return digest.hexdigest()
