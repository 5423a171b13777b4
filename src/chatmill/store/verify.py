"""Verify a dataset and report every fault as one line.

Without `full`, only the metadata, sizes, index and spans are read; with `full`, every byte is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ChatmillError, DataError
from chatmill.ledger import Ledger
from chatmill.remote.urls import Place, Url, place
from chatmill.rows import NO_FILE, Index, offsets
from chatmill.store import foreign, layout
from chatmill.store.episodes import Episodes
from chatmill.store.folder import OpenFolder
from chatmill.store.hashed import Manifest
from chatmill.store.layout import INDEX, MASK, ORIGINS, SPANS, TARGETS, TOKENIZER_STATE, TOKENS, Shard
from chatmill.store.mapped import reading
from chatmill.store.metadata import Metadata, ShardInfo, manifest
from chatmill.store.read import Dataset, dataset_in, in_dataset_folder, remote_dataset, stored_metadata
from chatmill.store.remote_files import RemoteFiles
from chatmill.store.remote_verify import Downloads, size_faults

EPISODES, TOKENS_AT_ONCE = 1 << 16, 1 << 22


@dataclass(frozen=True)
class SplitCounts:
    episodes: int
    tokens: int
    trained: int
    shards: int
    uncovered: int = 0
    """Number of tokens that belong to no episode (only in datasets from other programs)."""
    shared: int = 0
    """Number of tokens in more than one episode (only in datasets from other programs)."""


@dataclass(frozen=True)
class Verified:
    """The result of verifying a dataset or cache: its faults, and the counts of each split."""

    faults: tuple[str, ...]
    splits: dict[str, SplitCounts]
    sha256: str | None
    """The hash of the dataset; None if another program wrote it, or if it cannot be read."""
    unread: tuple[str, ...] = ()
    """Files that chatmill does not read, in shards written by another program."""


def verify_dataset(path: str | Place, *, full: bool, token_dtype: str | None = None) -> Verified:
    """Check a dataset and return all faults, one line each; faults on disk do not raise exceptions.

    verify_dataset("data/v1", full=True).faults    # () if every byte is intact

    `token_dtype` is passed to `open_dataset`.
    """
    where = place(path)
    try:
        if isinstance(where, Url):
            return _verified_remote(where, full=full, token_dtype=token_dtype)
        return in_dataset_folder(where, lambda folder: _verified(folder, full=full, token_dtype=token_dtype))
    except DataError as error:
        return Verified((str(error),), {}, None)


def _verified(folder: OpenFolder, *, full: bool, token_dtype: str | None) -> Verified:
    metadata = stored_metadata(folder)
    # Datasets from other programs do not list their files.
    listed = Manifest((), "", "") if metadata is None else manifest(folder.path, metadata)
    unlisted = list(listed.unlisted_faults(folder, metadata.splits if metadata else ()))
    if faults := list(listed.size_faults(folder)):
        # Tables in files with the wrong size cannot be read.
        return Verified((*faults, *unlisted), {}, None if metadata is None else metadata.sha256)
    dataset = dataset_in(folder, token_dtype)
    splits = _split_counts(dataset, faults, full=full)
    faults += unlisted
    if metadata is not None:
        faults += _ledger_faults(folder.path, metadata)
    if full:
        faults += listed.hash_faults(folder)
    unread = foreign.unread_files(folder) if metadata is None else ()
    return Verified(tuple(faults), splits, dataset.sha256, tuple(unread))


def _verified_remote(url: Url, *, full: bool, token_dtype: str | None) -> Verified:
    """Verify a dataset at a URL; with `full`, every object is downloaded and hashed without using the cache."""
    dataset = remote_dataset(url, token_dtype)
    metadata, stored = dataset.metadata, dataset.stored
    assert metadata is not None
    assert isinstance(stored, RemoteFiles)
    if faults := list(size_faults(stored)):
        return Verified(tuple(faults), {}, metadata.sha256)
    if not full:
        splits = _split_counts(dataset, faults, full=False)
    else:
        with TemporaryDirectory(prefix="chatmill-verify-") as folder:
            downloads = Downloads(stored, Path(folder))
            faults += downloads.replace([url / TOKENIZER_STATE])
            stored.fetch = downloads.fetch
            splits = _split_counts(
                dataset,
                faults,
                full=True,
                before=lambda shard: downloads.replace(shard.folder / name for name in shard.records),
            )
    faults += _ledger_faults(url, metadata)
    return Verified(tuple(faults), splits, metadata.sha256)


def _split_counts(
    dataset: Dataset, faults: list[str], *, full: bool, before: Callable[[Shard], Iterable[str]] = lambda shard: ()
) -> dict[str, SplitCounts]:
    """Check all shards except those in which `before` finds faults; extend `faults` and return the counts per split."""
    splits, metadata = {}, dataset.metadata
    for name in dataset.splits:
        episodes, trained, cover = dataset[name], 0, np.zeros(2, dtype=np.int64)
        for number, shard in enumerate(episodes.shards):
            if damaged := list(before(shard)):
                faults += damaged
                continue
            try:
                with reading():
                    if metadata is None:
                        more, *counts = _check_foreign(episodes, number)
                        cover += counts
                    else:
                        info = metadata.splits[name].shards[number]
                        more = _ShardCheck(episodes, number, info, metadata, full=full).run()
                    episodes.check([number])
                trained += more
            except DataError as error:
                faults.append(str(error))
            episodes.unmap()
        splits[name] = SplitCounts(len(episodes), episodes.num_tokens, trained, len(episodes.shards), *cover.tolist())
    return splits


def _ledger_faults(place: Place, metadata: Metadata) -> Iterator[str]:
    if metadata.ledger.entries:
        stored = {
            "tokens": sum(split.num_tokens for split in metadata.splits.values()),
            "trained tokens": sum(split.num_trained_tokens for split in metadata.splits.values()),
        }
        yield from ledger_faults(place, metadata.ledger, stored)


def ledger_faults(folder: Place, ledger: Ledger, stored: dict[str, int]) -> Iterator[str]:
    """Yield a fault if the ledger does not balance, and one for each total in `stored` that differs from the ledger."""
    try:
        ledger.check()
    except ChatmillError as error:
        yield f"{folder}: {error}"
    total = ledger.total("stored")
    counted = {"examples": total.rows, "tokens": total.tokens}
    counted |= {"trained tokens": total.trained, "label tokens": total.trained}
    for what, count in stored.items():
        if counted[what] != count:
            yield f"{folder}: the ledger counts {counted[what]} stored {what}, but the shards contain {count}"


def _check_foreign(episodes: Episodes, number: int) -> tuple[int, int, int]:
    """Check another program's shard; count trained tokens, and tokens that belong to no episode or to several episodes.

    Episodes can overlap, leave gaps and be in any order, because the index stores the start and length of each episode.
    """
    shard, index = episodes.shards[number], episodes.array(number, INDEX)
    size, room = shard.num_tokens, np.uint64(shard.num_tokens)
    wrong = (index["start"] > room) | (index["length"] > room - np.minimum(index["start"], room))
    for where in np.flatnonzero(wrong)[:1]:
        raise DataError(f"{shard.folder / INDEX}: episode {where} ends after the last of the {size} tokens")
    start = index["start"].astype(np.int64)
    stop = start + index["length"].astype(np.int64)
    in_order = len(index) and start[0] == 0 and stop[-1] == size and np.array_equal(start[1:], stop[:-1])
    whole = ((slice(at, min(at + TOKENS_AT_ONCE, size)), None) for at in range(0, size, TOKENS_AT_ONCE))
    trained = uncovered = shared = 0
    for here, count in whole if in_order else foreign.coverage(start, stop, size):
        if MASK in shard.records:
            mask = episodes.array(number, MASK)[here]
            for where in np.flatnonzero(mask > 1)[:1]:
                raise DataError(
                    f"{shard.folder / MASK}: the mask of token {here.start + where} is {mask[where]}; expected 0 or 1"
                )
            trained += int(np.count_nonzero(mask if count is None else mask[count > 0]))
        else:
            trained += here.stop - here.start if count is None else int(np.count_nonzero(count))
        if count is not None:
            uncovered += int(np.count_nonzero(count == 0))
            shared += int(np.count_nonzero(count > 1))
        for name in shard.records:
            layout.release(episodes.array(number, name))
    return trained, uncovered, shared


class _ShardCheck:
    """Checks one shard, several episodes at a time, and stops at the first fault, because one fault often causes
    others.
    """

    def __init__(self, episodes: Episodes, number: int, info: ShardInfo, metadata: Metadata, *, full: bool) -> None:
        self._shard = episodes.shards[number]
        names = self._shard.records if full else (INDEX, SPANS, ORIGINS)
        self._arrays = {name: episodes.array(number, name) for name in names}
        self._num_files = len(episodes.files)
        self._info, self._metadata, self._full = info, metadata, full
        self.trained = 0
        self._spans_seen = self._segments_seen = self._tokens_seen = 0
        self._shortest, self._longest = 2**62, 0

    def run(self) -> int:
        """Check the shard; return the number of trained tokens."""
        index = self._arrays[INDEX]
        at = 0
        while at < len(index):
            lengths = index["length"][at : at + EPISODES]
            # Clip invalid lengths, because they could overflow the sum that determines how far to read.
            ends = np.cumsum(np.minimum(lengths, TOKENS_AT_ONCE))
            stop = at + max(1, int(np.searchsorted(ends, TOKENS_AT_ONCE, side="right")))
            self._check_episodes(at, stop)
            at = stop
            for array in self._arrays.values():
                layout.release(array)
        self._check_totals()
        if self._full and TARGETS in self._arrays:
            self._targets()
        return self.trained

    def _fault(self, file: str, what: str) -> DataError:
        return DataError(f"{self._shard.folder / file}: {what}")

    def _check_episodes(self, at: int, stop: int) -> None:
        first_token = self._tokens_seen
        length = self._entries(at, stop)
        trained = self._spans(at, stop, length)
        self.trained += int(np.count_nonzero(trained))
        if self._full:
            self._bytes(slice(first_token, self._tokens_seen), trained)

    def _entries(self, at: int, stop: int) -> Index:
        """Check that each episode starts where the previous one ends; return the lengths of the episodes."""
        entries = self._arrays[INDEX][at:stop]
        start, length = entries["start"], entries["length"]
        if int(length.max()) > self._shard.num_tokens - self._tokens_seen:
            where = at + int(length.argmax())
            raise self._fault(INDEX, f"episode {where} has {length.max()} tokens, but the rest of the shard has fewer")
        expected = self._tokens_seen + np.cumsum(length) - length
        for where in np.flatnonzero(start != expected)[:1]:
            raise self._fault(
                INDEX,
                f"episode {at + where} starts at {start[where]}; "
                f"expected {expected[where]}, the end of the previous episode",
            )
        self._tokens_seen += int(length.sum())
        if self._tokens_seen > self._shard.num_tokens:
            raise self._fault(INDEX, f"episode {stop - 1} ends after the last of the {self._shard.num_tokens} tokens")
        self._shortest = min(self._shortest, int(length.min()))
        self._longest = max(self._longest, int(length.max()))
        return length.astype(np.int64)

    def _spans(self, at: int, stop: int, length: Index) -> NDArray[np.bool_]:
        """Check the segments and spans of these episodes; return whether each of their tokens is trained."""
        origins, spans = self._arrays[ORIGINS], self._arrays[SPANS]
        row = origins["row"].view(np.int64)
        begin = self._segments_seen
        end = layout.lower_bound(row, stop, begin)
        here = row[begin:end]
        if np.any(here < at) or np.any(here >= stop) or np.any(np.diff(here) < 0):
            raise self._fault(ORIGINS, f"segments {begin} to {end} are out of order")
        self._segments_seen = end
        file = origins["file"][begin:end]
        if np.any((file != NO_FILE) & (file >= self._num_files)):
            raise self._fault(
                ORIGINS, f"one of segments {begin} to {end} has a file index that is not below {self._num_files}"
            )
        first = layout.first_spans(origins, np.arange(begin, end + 1), len(spans))
        if first[0] != self._spans_seen or first[-1] > len(spans) or np.any(np.diff(first) < 0):
            raise self._fault(ORIGINS, f"the spans of segments {begin} to {end} are out of order")
        table = spans[first[0] : first[-1]]
        self._spans_seen = int(first[-1])
        sizes, weight = table["length"], table["weight"]
        if np.any(sizes == 0):
            raise self._fault(SPANS, f"one of episodes {at} to {stop} has an empty span")
        row_span = (first - first[0])[np.searchsorted(here, np.arange(at, stop + 1))]
        tiled = np.diff(offsets(sizes)[row_span])
        for where in np.flatnonzero(tiled != length)[:1]:
            raise self._fault(
                SPANS, f"the spans of episode {at + where} cover {tiled[where]} of its {length[where]} tokens"
            )
        if not np.all(np.isfinite(weight) & (weight >= 0)):
            raise self._fault(SPANS, f"one of episodes {at} to {stop} has a weight that is negative or not finite")
        for name, unknown in layout.UNKNOWN.items():
            if unknown[table[name]].any():
                raise self._fault(SPANS, f"one of episodes {at} to {stop} has an undefined {name}")
        return np.repeat(weight > 0, sizes)

    def _bytes(self, here: slice, trained: NDArray[np.bool_]) -> None:
        """Compare the mask of these tokens with their spans, and check that their ids are in the vocabulary."""
        mask = self._arrays[MASK][here]
        for where in np.flatnonzero(mask != trained)[:1]:
            what = f"the mask of token {here.start + where} is {mask[where]}"
            raise self._fault(MASK, f"{what}; expected {int(trained[where])}, as in {SPANS}")
        vocab_size, tokens = self._metadata.vocab_size, self._arrays[TOKENS][here]
        for where in np.flatnonzero(tokens >= vocab_size)[:1]:
            raise self._fault(
                TOKENS, f"the id of token {here.start + where} is {tokens[where]}; expected an id below {vocab_size}"
            )

    def _check_totals(self) -> None:
        """Check that the episodes cover the whole shard and match the metadata."""
        records = self._shard.records
        for file, what, seen, there in (
            (INDEX, "tokens", self._tokens_seen, self._shard.num_tokens),
            (ORIGINS, "segments", self._segments_seen, records[ORIGINS]),
            (SPANS, "spans", self._spans_seen, records[SPANS]),
        ):
            if seen != there:
                raise self._fault(file, f"the episodes cover {seen} of {there} {what}")
        for file, what, expected, count in (
            (SPANS, "trained tokens", self._info.num_trained_tokens, self.trained),
            (INDEX, "tokens in the shortest episode", self._info.shortest, self._shortest),
            (INDEX, "tokens in the longest episode", self._info.longest, self._longest),
        ):
            if count != expected:
                raise self._fault(file, f"{count} {what}, but the metadata records {expected}")

    def _targets(self) -> None:
        table = self._arrays[TARGETS]
        vocab_size = self._metadata.vocab_size
        last = -1
        for at in range(0, len(table), EPISODES):
            span, target = table["span"][at : at + EPISODES].astype(np.int64), table["target"][at : at + EPISODES]
            if span[0] <= last or np.any(np.diff(span) <= 0) or span[-1] >= self._shard.records[SPANS]:
                raise self._fault(TARGETS, "the span indexes are not ascending, or one is past the last span")
            if int(target.max()) >= vocab_size:
                raise self._fault(TARGETS, f"target {target.max()}; expected an id below {vocab_size}")
            last = int(span[-1])
