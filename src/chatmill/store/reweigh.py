"""Create a copy of a dataset with a different loss mask. Only spans and masks are written; all other files are shared
with the original.

The tokens are not read. Only the weights of spans with the rule `role` change; the weights of spans with any other
rule, such as `flag` or `range`, are kept. The weights of whole records are applied again (see `record_weights`).
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError, UsageError, one_line
from chatmill.ledger import Bucket, Ledger, LedgerEntry
from chatmill.remote.urls import Place, Url, place
from chatmill.rows import Index, Part, Role, Rule, Table, TrainOn, offsets, weigh
from chatmill.store import files
from chatmill.store.episodes import Episodes
from chatmill.store.folder import StoredFiles
from chatmill.store.hashed import FileInfo, HashedFile
from chatmill.store.layout import MASK, ORIGINS, REMOVED, SPANS, first_spans, shard_name
from chatmill.store.mapped import reading
from chatmill.store.metadata import Metadata, ShardInfo, SplitInfo, write_metadata
from chatmill.store.publish import building
from chatmill.store.read import Dataset, open_dataset
from chatmill.store.record_weights import Chunk, RecordWeights, find_record_weights
from chatmill.store.remote_publish import building_remote

SEGMENTS = 1 << 14
"""Number of conversations whose weights are computed at a time."""
TOKENS = 1 << 22
"""Number of tokens whose mask is computed at a time."""
WITHOUT_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Values of `errno` that mean that the file system cannot create a hard link."""

UNTRAINED: tuple[Bucket, str] = ("noted", "no_trained_tokens")


@dataclass(frozen=True)
class Reweighed:
    metadata: Metadata
    parent: Metadata
    untrained: int
    """Number of conversations that have no trained tokens with the new mask."""
    linked: int
    """Number of files that the two datasets share."""
    copied: int
    """Number of files that were copied because they could not be shared."""


def reweigh_dataset(
    source: str | Place, target: str | Place, *, train_on: TrainOn, overwrite: bool = False
) -> Reweighed:
    """Write a dataset with the rows of `source` and another loss mask, and publish it atomically.

    All files except spans and masks are hard links to the files of `source`, or copies if links are not possible. Rows
    that were truncated or dropped in `source` stay truncated or dropped. Raise `UsageError` if the new mask depends on
    the weight of a record that cannot be read from `source`.
    """
    dataset = open_dataset(source)
    parent = dataset.metadata
    if parent is None:
        raise DataError(
            f"{source}: has no {SPANS} with the roles of messages; prepare the dataset from its conversations instead"
        )
    if parent.config.get("unroll"):
        raise UsageError(
            f"{source}: was prepared with --unroll, so the loss mask of each row includes only one answer; "
            f"prepare the dataset with --train-on {train_on} instead"
        )
    if train_on in ("last", "last-exchange") and (
        parent.config.get("fit") == "blocks" or parent.ledger.total("repeated").rows
    ):
        raise UsageError(
            f"{source}: its rows are parts of conversations, so the last answer is unknown; "
            f"prepare the dataset with --train-on {train_on} instead"
        )
    with _building(place(target), dataset, overwrite=overwrite) as staging:
        work = _Reweigher(dataset, train_on)
        splits = {name: work.split(staging / name, name, info) for name, info in parent.splits.items()}
        if parent.removed is not None:
            work.share(dataset.path / REMOVED, staging / REMOVED, parent.removed)
        changed_metadata = replace(
            parent,
            splits=splits,
            ledger=_ledger(parent.ledger, splits, work.untrained),
            config={**parent.config, "train_on": train_on, "reweighed_from": parent.sha256},
        )
        metadata = write_metadata(staging, changed_metadata, tokenizer_state=dataset.tokenizer_state())
        if metadata.tokenizer_state != parent.tokenizer_state:
            raise DataError(f"{source}: tokenizer_state.json was changed; run chatmill verify --full")
    return Reweighed(metadata, parent, work.untrained.rows, work.linked, work.copied)


def _building(target: Place, dataset: Dataset, *, overwrite: bool) -> AbstractContextManager[Path]:
    if isinstance(target, Url):
        return building_remote(target, "reweighing", overwrite=overwrite)
    return building(target, "reweighing", overwrite=overwrite, source=dataset.path)


class _Reweigher:
    def __init__(self, dataset: Dataset, train_on: TrainOn) -> None:
        self._dataset, self._train_on = dataset, train_on
        self.untrained = LedgerEntry()
        """Number of conversations without trained tokens, and the number of their tokens."""
        self.linked = self.copied = 0
        self._weights: RecordWeights | None = None
        self._changes_prompts = _changes_prompts(dataset.metadata, train_on)

    def split(self, folder: Path, name: str, info: SplitInfo) -> SplitInfo:
        files.make_folder(folder)
        episodes = self._dataset[name]
        self._find_weights(episodes)
        numbered = enumerate(info.shards)
        shards = (self._shard(episodes, number, folder / shard_name(number), shard) for number, shard in numbered)
        return SplitInfo(tuple(shards), info.files)

    def _find_weights(self, episodes: Episodes) -> None:
        """Find the weight of each record if the ledger says that some records have a weight other than 1."""
        metadata = self._dataset.metadata
        if metadata is None or not any(reason == "record_weight" for _, reason, _ in metadata.ledger):
            return

        def chunks() -> Iterator[Chunk]:
            return (chunk for number in range(len(episodes.shards)) for chunk in _span_chunks(episodes, number))

        self._weights = find_record_weights(chunks, self._train_on)
        unknown = self._weights.unknown
        if len(unknown):
            first = unknown[np.lexsort((unknown["line"], unknown["file"]))[0]]
            named = first["file"] < len(episodes.files)
            record = f"{episodes.files[first['file']].path}:{first['line']}" if named else "a conversation"
            more = f" (and of {len(unknown) - 1:,} more)" if len(unknown) > 1 else ""
            raise UsageError(
                f"{self._dataset.path}: the record weight of {one_line(record, None)}{more} is unknown, because no "
                "trained token of the conversation has this weight; prepare the dataset with "
                f"--train-on {self._train_on} instead"
            )

    def _shard(self, episodes: Episodes, number: int, folder: Path, info: ShardInfo) -> ShardInfo:
        files.make_folder(folder)
        source = episodes.shards[number].folder
        # Write spans first: a folder with spans but without metadata is an unfinished build.
        trained, read = 0, hashlib.sha256()
        with HashedFile(folder / SPANS) as spans, HashedFile(folder / MASK) as mask:
            for stored, first_span, origins in _span_chunks(episodes, number):
                table = stored.copy()
                read.update(table.view(np.uint8).data)
                if self._changes_prompts and _has_joined_prompt(table):
                    raise UsageError(
                        f"{self._dataset.path}: prompts and completions are encoded as one text, so their masks cannot "
                        f"be changed; prepare the dataset with --train-on {self._train_on} instead"
                    )
                weights = None if self._weights is None else self._weights.of(table, first_span, origins)
                weigh(table, first_span, self._train_on, weights)
                spans.write(table.view(np.uint8).data)
                for piece in _mask(table):
                    mask.write(piece.data)
                    trained += int(np.count_nonzero(piece))
                self._count(table, first_span)
        made = {SPANS: spans.info(), MASK: mask.info()}
        if read.hexdigest() != info.files[SPANS].sha256 or made[MASK].size != info.num_tokens:
            # Never copy damaged data under a new hash, because the damage could not be detected later.
            raise changed(source / SPANS)
        for file, shared in info.files.items():
            if file not in made:
                self.share(source / file, folder / file, shared)
        return replace(info, num_trained_tokens=trained, files={**info.files, **made})

    def _count(self, table: Table, first_span: Index) -> None:
        length = table["length"].astype(np.int64)
        trained, tokens, padding = (
            np.diff(offsets(of_span)[first_span])
            for of_span in (length * (table["weight"] > 0), length, table["part"] == Part.PAD)
        )
        without = (trained == 0) & (padding == 0)
        self.untrained.rows += int(np.count_nonzero(without))
        self.untrained.tokens += int(tokens[without].sum())

    def share(self, source: Place, to: Path, info: FileInfo) -> None:
        stored = self._dataset.stored
        if not isinstance(stored, StoredFiles) or not isinstance(source, Path):
            with HashedFile(to) as new, reading():
                new.write(np.asarray(stored.map(source)).data)
            if new.info() != info:
                raise changed(source)
            self.copied += 1
            return
        try:
            files.disk.link(source.resolve(), to)
            if not stored.is_same(source, to):
                raise changed(source)
            self.linked += 1
        except OSError as error:
            if error.errno not in WITHOUT_LINKS:
                raise
            with source.open("rb") as old, HashedFile(to) as new:
                shutil.copyfileobj(old, new)
            if new.info() != info:
                raise changed(source) from None
            self.copied += 1


def _span_chunks(episodes: Episodes, number: int) -> Iterator[Chunk]:
    """Yield the spans of a shard in chunks of whole conversations, with the index of the first span and the origin of
    each conversation.
    """
    spans, origins = episodes.array(number, SPANS), episodes.array(number, ORIGINS)
    seen = 0
    for at in range(0, len(origins), SEGMENTS):
        stop = min(at + SEGMENTS, len(origins))
        first = first_spans(origins, np.arange(at, stop + 1), len(spans))
        if first[0] != seen or first[-1] > len(spans) or np.any(np.diff(first) < 0):
            raise changed(episodes.shards[number].folder / ORIGINS)
        seen = int(first[-1])
        yield spans[first[0] : seen], first - first[0], origins[at:stop]


def _changes_prompts(metadata: Metadata | None, train_on: TrainOn) -> bool:
    """For a dataset in the format `text`, whether exactly one of the old and new loss masks includes prompts. Only the
    mask for `train_on="all"` includes prompts.
    """
    if metadata is None or metadata.format.get("name") != "text":
        return False
    config = metadata.config
    sources = [entry for entry in config.get("sources") or () if isinstance(entry, dict)]
    before = {config.get("train_on")}
    if "reweighed_from" not in config:
        before |= {entry.get("train_on") for entry in sources if entry.get("shape") != "text"}
    return any((each == "all") != (train_on == "all") for each in before)


def _has_joined_prompt(table: Table) -> bool:
    """Whether each prompt and its completion were encoded as one text, so that the spans of the prompt have the role of
    the completion and the rule `range`.
    """
    is_range = (table["rule"] == Rule.RANGE) & (table["message"] == 1)
    return bool(np.any(is_range) and not np.any(table["role"] == Role.USER))


def _mask(table: Table) -> Iterator[NDArray[np.uint8]]:
    """Yield the loss mask of the given spans in chunks of about `TOKENS` tokens."""
    start = offsets(table["length"])
    at = 0
    while at < len(table):
        stop = max(at + 1, int(np.searchsorted(start, start[at] + TOKENS, side="right")) - 1)
        yield np.repeat((table["weight"][at:stop] > 0).view(np.uint8), table["length"][at:stop])
        at = stop


def changed(path: Place) -> DataError:
    return DataError(f"{path}: does not match the metadata, so the file was changed; run chatmill verify --full")


def _ledger(parent: Ledger, splits: dict[str, SplitInfo], untrained: LedgerEntry) -> Ledger:
    """Return the ledger of the original dataset, with new counts of trained tokens."""
    ledger = Ledger()
    for bucket, reason, entry in parent:
        if bucket != "stored" and (bucket, reason) != UNTRAINED:
            ledger.add(bucket, reason, rows=entry.rows, tokens=entry.tokens, trained=entry.trained)
    stored = parent.total("stored")
    if parent.entries:
        trained = sum(split.num_trained_tokens for split in splits.values())
        ledger.add("stored", rows=stored.rows, tokens=stored.tokens, trained=trained)
        if untrained.rows:
            ledger.add(*UNTRAINED, rows=untrained.rows, tokens=untrained.tokens)
    return ledger
