"""What two datasets have in common: conversations matched by what was said, wherever they stand.

Two hashes are taken of each conversation, of its ids and of how they are trained. No more than 34 bytes are kept of
it, and they are compared a sixteenth of all keys at a time. A key that comes several times is matched as often as
both have it, the most alike first:

    A   k:57* k:57. k:8.       equal 1, mask 1, changed 0, removed 1
    B   k:57* k:57*
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.rows import NO_FILE, Index, Part, Rows, offsets
from chatmill.store.layout import ORIGINS, SPLITS
from chatmill.store.metadata import Metadata
from chatmill.store.read import Dataset, Episodes, open_dataset

Words = NDArray[np.uint64]

EXAMPLES = 3
"""Conversations of each kind that are named."""
TOKENS = 1 << 20
"""Tokens that are hashed at a time."""
SHARES = 16
ALIKE = {"equal": "kims", "moved": "kim", "mask": "ki", "changed": "k"}
"""What a pair of each kind shares, the most alike first: key, ids, mask, split."""
CAUSES = ("tokenizer", "format", "fit", "input")
CONFIG = {"add_tokens": "tokenizer", "sources": "input", "dedupe": "input"}
"""What keys of a config belong to that are not `fit`."""
PARENT = "reweighed_from"
"""A key of a config that tells of the past and causes nothing."""


@dataclass(frozen=True)
class ConversationOrigin:
    """Where a conversation came from, and the split it is in."""

    split: str
    file: str | None
    line: int


@dataclass(frozen=True)
class Difference:
    """How many conversations differ in one way, and the first of them."""

    count: int
    examples: tuple[ConversationOrigin, ...]


@dataclass(frozen=True)
class Cause:
    """One thing in which the making of the two differs."""

    part: str
    """tokenizer, format, fit or input."""
    what: str
    one: Any
    other: Any


@dataclass(frozen=True)
class Diff:
    identical: bool
    """They have the same hash: the same bytes."""
    by_key: bool
    """Matched by what was said. Else, because one of them has no keys, by ids, so that none can be `changed`."""
    equal: int
    added: Difference
    removed: Difference
    changed: Difference
    """The same was said, in other ids."""
    mask: Difference
    """The same ids, trained otherwise."""
    moved: Difference
    """The same in everything, in another split."""
    causes: tuple[Cause, ...]

    @property
    def kinds(self) -> dict[str, Difference]:
        return {
            "added": self.added,
            "removed": self.removed,
            "changed": self.changed,
            "mask": self.mask,
            "moved": self.moved,
        }

    @property
    def same(self) -> bool:
        """Whether both hold the same conversations, however they are ordered and packed."""
        return not any(kind.count for kind in self.kinds.values())


def diff_datasets(one: str | Path, other: str | Path) -> Diff:
    """Compare two datasets, conversation by conversation: what became of `one` on the way to `other`."""
    a, b = _Conversations(open_dataset(one)), _Conversations(open_dataset(other))
    by_key = a.has_keys and b.has_keys
    if not by_key:
        a.match_by_ids()
        b.match_by_ids()
    found = {name: _Examples() for name in (*ALIKE, "removed", "added")}
    share_of_a, share_of_b = a.shares(), b.shares()
    for share in range(SHARES):
        in_a, in_b = np.flatnonzero(share_of_a == share), np.flatnonzero(share_of_b == share)
        for name, columns in ALIKE.items():
            of_a, of_b = _pairs(a.columns(columns, in_a), b.columns(columns, in_b))
            found[name].add(in_b[of_b])
            in_a, in_b = np.delete(in_a, of_a), np.delete(in_b, of_b)
        found["removed"].add(in_a)
        found["added"].add(in_b)
    return Diff(
        identical=a.dataset.sha256 is not None and a.dataset.sha256 == b.dataset.sha256,
        by_key=by_key,
        equal=found["equal"].count,
        added=b.kind(found["added"]),
        removed=a.kind(found["removed"]),
        changed=b.kind(found["changed"]),
        mask=b.kind(found["mask"]),
        moved=b.kind(found["moved"]),
        causes=tuple(_causes(a.dataset.metadata, b.dataset.metadata, found["removed"].count, found["added"].count)),
    )


class _Examples:
    """How many, and the lowest numbers among them."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[int] = []

    def add(self, numbers: Index) -> None:
        self.count += len(numbers)
        self.first = sorted(self.first + np.sort(numbers)[:EXAMPLES].tolist())[:EXAMPLES]


def _pairs(a: list[NDArray[Any]], b: list[NDArray[Any]]) -> tuple[Index, Index]:
    """Which of a and of b go together: equal in all columns, each used once, the first of them first.

    a  7 7 8
    b  7 9 7 7    ->  0 1 and 0 2
    """
    columns = [np.concatenate(pair) for pair in zip(a, b, strict=True)]
    # Stable: of equals, those of a stand before those of b, each in their order.
    order = np.lexsort(columns[::-1])
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = np.any([column[order[1:]] != column[order[:-1]] for column in columns], axis=0)
    group, first = np.cumsum(begins) - 1, np.flatnonzero(begins)
    of_b = order >= len(a[0])
    count_a, count_b = (np.bincount(group[chosen], minlength=len(first)) for chosen in (~of_b, of_b))
    rank = np.arange(len(order)) - first[group] - np.where(of_b, count_a[group], 0)
    paired = rank < np.minimum(count_a, count_b)[group]
    return order[paired & ~of_b], order[paired & of_b] - len(a[0])


class _Conversations:
    """All conversations of a dataset, numbered over its splits, as columns of hashes."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        counts = [sum(_segments(dataset[name])) for name in dataset.splits]
        total = sum(counts)
        self._key = np.zeros((total, 2), dtype=np.uint64)
        self._ids = np.zeros(total, dtype=np.uint64)
        self._mask = np.zeros(total, dtype=np.uint64)
        self._split = np.repeat(np.array([SPLITS.index(name) for name in dataset.splits], dtype=np.uint8), counts)
        self._real = np.zeros(total, dtype=np.bool_)
        at = 0
        for name in dataset.splits:
            for rows in dataset[name].sweep(tokens=TOKENS):
                here = slice(at, at := at + len(rows.origins))
                self._key[here] = rows.origins["key"]
                self._ids[here], self._mask[here] = _hashes(rows)
                self._real[here] = ~is_padding(rows)

    @property
    def has_keys(self) -> bool:
        return bool(np.all((self._key[:, 0] != 0) | (self._key[:, 1] != 0) | ~self._real))

    def match_by_ids(self) -> None:
        self._key[:, 0], self._key[:, 1] = self._ids, 0

    def shares(self) -> NDArray[np.uint8]:
        """The sixteenth of all keys that each conversation is compared in; for padding none of them."""
        return np.where(self._real, (self._key[:, 0] >> np.uint64(60)).astype(np.uint8), np.uint8(SHARES))

    def columns(self, names: str, numbers: Index) -> list[NDArray[Any]]:
        found: dict[str, list[NDArray[Any]]] = {
            "k": [self._key[:, 0], self._key[:, 1]],
            "i": [self._ids],
            "m": [self._mask],
            "s": [self._split],
        }
        return [column[numbers] for name in names for column in found[name]]

    def kind(self, found: _Examples) -> Difference:
        return Difference(found.count, tuple(self._place(number) for number in found.first))

    def _place(self, number: int) -> ConversationOrigin:
        for name in self.dataset.splits:
            episodes = self.dataset[name]
            for shard, count in enumerate(_segments(episodes)):
                if number < count:
                    return _origin(name, episodes, shard, number)
                number -= count
        raise AssertionError("a conversation beyond those there are")


def _segments(episodes: Episodes) -> list[int]:
    """How many conversations, and pieces of padding, each shard has; without origins a row is one."""
    return [shard.records.get(ORIGINS, shard.num_episodes) for shard in episodes.shards]


def _origin(split: str, episodes: Episodes, shard: int, number: int) -> ConversationOrigin:
    if ORIGINS not in episodes.shards[shard].records:
        return ConversationOrigin(split, None, 0)
    origin = episodes.array(shard, ORIGINS)[number]
    known = origin["file"] != NO_FILE
    return ConversationOrigin(split, episodes.files[origin["file"]].path if known else None, int(origin["line"]))


# Hashes that do not depend on how a conversation is cut into spans, and work on all of them at once.


def _hashes(rows: Rows) -> tuple[Words, Words]:
    """For each conversation a hash of its ids, and one of the weight and target of each of them.

    Each is a sum over tokens, of what the token is times a random number that its position has. Over a span
    what it is does not change, so that the sum of the random numbers, which is looked up, is enough.
    """
    longest = int(np.diff(rows.segment_start).max(initial=0))
    random = np.random.PCG64(0).random_raw(longest)
    until = _until(random)
    position = rows.positions()
    ids = _mixed(rows.ids.astype(np.uint64) + np.uint64(1)) * random[position]
    spans = rows.spans
    start = rows.span_start[:-1] - np.repeat(rows.segment_start[:-1], np.diff(rows.first_span))
    weight = spans["weight"].astype(np.float32).view(np.uint32).astype(np.uint64) << np.uint64(32)
    target = (spans["target"].astype(np.int64) + 1).astype(np.uint64)
    how = np.where(spans["weight"] > 0, _mixed(weight | target), np.uint64(0))
    mask = how * (until[start + spans["length"]] - until[start])
    return _sums(ids, rows.segment_start), _sums(mask, rows.first_span)


def _mixed(words: Words) -> Words:
    """Spread what differs in a few bits over all of them."""
    words = words * np.uint64(0x9E3779B97F4A7C15)
    return words ^ (words >> np.uint64(32))


def _until(words: Words) -> Words:
    """The sum, modulo 2**64, of all words before each, and of all."""
    until = np.zeros(len(words) + 1, dtype=np.uint64)
    np.cumsum(words, out=until[1:])
    return until


def _sums(words: Words, start: Index) -> Words:
    until = _until(words)
    return until[start[1:]] - until[start[:-1]]


def is_padding(rows: Rows) -> NDArray[np.bool_]:
    """Which segments hold nothing but padding."""
    spans = np.diff(rows.first_span)
    padding: Index = np.diff(offsets(rows.spans["part"] == Part.PAD)[rows.first_span])
    only: NDArray[np.bool_] = (spans > 0) & (padding == spans)
    return only


def _causes(one: Metadata | None, other: Metadata | None, removed: int, added: int) -> Iterator[Cause]:
    """In what the two were made differently, as their metadata say it."""
    if one is None or other is None:
        return
    a, b = _made_of(one), _made_of(other)
    known = False
    for part, what in sorted(a.keys() | b.keys(), key=lambda key: (CAUSES.index(key[0]), key[1])):
        if a.get((part, what)) != b.get((part, what)):
            known = True
            yield Cause(part, what, a.get((part, what)), b.get((part, what)))
    if not known and (removed or added):
        # The same files with as many records, made in the same way: it is their text that changed.
        yield Cause("input", "conversations", removed, added)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _made_of(metadata: Metadata) -> dict[tuple[str, str], Any]:
    """Everything that may be the cause of a difference, by the part it belongs to and its name."""
    format = metadata.format if isinstance(metadata.format, dict) else {"format": metadata.format}
    config = {name: value for name, value in metadata.config.items() if name != PARENT}
    sources = [source for source in _list(config.get("sources")) if isinstance(source, dict) and "train_on" in source]
    if sources:
        # A source says how it is trained, which is no matter of the input, and after reweighing not true any more.
        config["sources"] = [{key: source[key] for key in source if key != "train_on"} for source in sources]
        if PARENT not in metadata.config:
            trained = {str(source.get("file")): source["train_on"] for source in sources}
            config["train_on"] = trained if len(set(map(str, trained.values()))) > 1 else sources[0]["train_on"]
    return {
        ("tokenizer", "sha256"): metadata.tokenizer["sha256"],
        **{("format", name): value for name, value in format.items()},
        **{(CONFIG.get(name, "fit"), name): value for name, value in config.items()},
        ("input", "files"): sorted({file.path for split in metadata.splits.values() for file in split.files}),
        ("input", "records read"): metadata.ledger.total("read").rows,
    }
