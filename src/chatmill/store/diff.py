"""Compare two datasets: match their conversations by content, regardless of order, shards and packing.

Each conversation has a key (a hash of its text), a hash of its token ids, and a hash of its loss weights and targets.
To save memory, keys are compared in 16 passes, one for each value of their first 4 bits. If a key occurs n times in
dataset A and m times in dataset B, min(n, m) pairs of conversations are matched, starting with the most similar pairs:

    A   k:57* k:57. k:8.       equal 1, mask 1, changed 0, removed 1
    B   k:57* k:57*
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.remote.urls import Place
from chatmill.rows import NO_FILE, Index, Part, Rows, offsets
from chatmill.store.episodes import Episodes
from chatmill.store.layout import ORIGINS, SPLITS
from chatmill.store.metadata import Metadata
from chatmill.store.read import Dataset, open_dataset

Words = NDArray[np.uint64]

EXAMPLES = 3
"""Number of example conversations for each kind of difference."""
TOKENS = 1 << 20
"""Number of tokens that are hashed at a time."""
SHARES = 16
EQUAL_COLUMNS = {"equal": "kims", "moved": "kim", "mask": "ki", "changed": "k"}
"""For each kind of pair, the columns that must be equal: key, ids, mask, split. Kinds are ordered by similarity, most
similar first.
"""
CAUSES = ("tokenizer", "format", "fit", "input")
CONFIG = {
    "add_tokens": "tokenizer",
    "sources": "input",
    "dedupe": "input",
    "near_dedupe": "input",
    "precedence": "input",
    "filters": "input",
}
"""Maps config keys to the parts of the build that they belong to. All other keys belong to `fit`."""
PARENT = "reweighed_from"
"""Config key of a reweighed dataset: the hash of the original dataset."""
WITHOUT_EFFECT = (PARENT, "mix_sft", "mix_epochs")
"""Config keys that do not affect the conversations of a dataset."""


@dataclass(frozen=True)
class ConversationOrigin:
    """The file and line of a conversation, and its split."""

    split: str
    file: str | None
    line: int


@dataclass(frozen=True)
class Difference:
    """The number of conversations with one kind of difference, and a few examples."""

    count: int
    examples: tuple[ConversationOrigin, ...]


@dataclass(frozen=True)
class Cause:
    """A setting or input that differs between the two builds."""

    part: str
    """The part of the build that differs: tokenizer, format, fit or input."""
    what: str
    one: Any
    other: Any


@dataclass(frozen=True)
class Diff:
    """The differences between two datasets."""

    identical: bool
    """Whether both datasets have the same hash and therefore the same bytes."""
    by_key: bool
    """Whether conversations are matched by text. Otherwise, conversations are matched by ids, and `changed` is empty.
    """
    equal: int
    added: Difference
    removed: Difference
    changed: Difference
    """Conversations with the same text but different ids."""
    mask: Difference
    """Conversations with the same ids but a different mask."""
    moved: Difference
    """Equal conversations in different splits."""
    causes: tuple[Cause, ...]

    @property
    def kinds(self) -> dict[str, Difference]:
        return {name: getattr(self, name) for name in ("added", "removed", "changed", "mask", "moved")}

    @property
    def same(self) -> bool:
        """Whether both datasets have the same conversations, regardless of order and packing."""
        return not any(kind.count for kind in self.kinds.values())


def diff_datasets(one: str | Place, other: str | Place, *, token_dtype: str | None = None) -> Diff:
    """Match the conversations of two datasets and return the differences; `token_dtype` applies to both datasets."""
    a, b = (_Conversations(open_dataset(path, token_dtype=token_dtype)) for path in (one, other))
    by_key = a.has_keys and b.has_keys
    if not by_key:
        a.match_by_ids()
        b.match_by_ids()
    kinds = {name: _Examples() for name in (*EQUAL_COLUMNS, "removed", "added")}
    share_of_a, share_of_b = a.shares(), b.shares()
    for share in range(SHARES):
        in_a, in_b = np.flatnonzero(share_of_a == share), np.flatnonzero(share_of_b == share)
        for name, columns in EQUAL_COLUMNS.items():
            of_a, of_b = _pairs(a.columns(columns, in_a), b.columns(columns, in_b))
            kinds[name].add(in_b[of_b])
            in_a, in_b = np.delete(in_a, of_a), np.delete(in_b, of_b)
        kinds["removed"].add(in_a)
        kinds["added"].add(in_b)
    equal = kinds.pop("equal").count
    differences = {name: (a if name == "removed" else b).difference(kind) for name, kind in kinds.items()}
    return Diff(
        identical=a.dataset.sha256 is not None and a.dataset.sha256 == b.dataset.sha256,
        by_key=by_key,
        equal=equal,
        **differences,
        causes=tuple(_causes(a.dataset.metadata, b.dataset.metadata, kinds["removed"].count, kinds["added"].count)),
    )


class _Examples:
    """Counts conversations, and stores the indices of the first few as examples."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[int] = []

    def add(self, numbers: Index) -> None:
        self.count += len(numbers)
        self.first = sorted(self.first + np.sort(numbers)[:EXAMPLES].tolist())[:EXAMPLES]


def _pairs(a: list[NDArray[Any]], b: list[NDArray[Any]]) -> tuple[Index, Index]:
    """Return the indices of equal rows of `a` and `b`, paired in order; each row occurs in at most one pair.

    a  7 7 8
    b  7 9 7 7    ->  0 1 and 0 2
    """
    columns = [np.concatenate(pair) for pair in zip(a, b, strict=True)]
    # The sort is stable: equal rows keep their original order, with the rows of `a` before the rows of `b`.
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
    """The hashes of all conversations of a dataset. Conversations are numbered across splits."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        counts = [sum(_segments(dataset[name])) for name in dataset.splits]
        total = sum(counts)
        self._key = np.zeros((total, 2), dtype=np.uint64)
        self._ids, self._mask = np.zeros((2, total), dtype=np.uint64)
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
        """Return the pass (0 to 15) in which each conversation is compared, or `SHARES` for padding, which is not
        compared.
        """
        return np.where(self._real, (self._key[:, 0] >> np.uint64(60)).astype(np.uint8), np.uint8(SHARES))

    def columns(self, names: str, numbers: Index) -> list[NDArray[Any]]:
        columns: dict[str, list[NDArray[Any]]]
        columns = {"k": list(self._key.T), "i": [self._ids], "m": [self._mask], "s": [self._split]}
        return [column[numbers] for name in names for column in columns[name]]

    def difference(self, examples: _Examples) -> Difference:
        return Difference(examples.count, tuple(self._origin(number) for number in examples.first))

    def _origin(self, number: int) -> ConversationOrigin:
        for name in self.dataset.splits:
            episodes = self.dataset[name]
            for shard, count in enumerate(_segments(episodes)):
                if number >= count:
                    number -= count
                    continue
                if ORIGINS not in episodes.shards[shard].records:
                    return ConversationOrigin(name, None, 0)
                origin = episodes.array(shard, ORIGINS)[number]
                file = episodes.files[origin["file"]].path if origin["file"] != NO_FILE else None
                return ConversationOrigin(name, file, int(origin["line"]))
        raise AssertionError("conversation number out of range")


def _segments(episodes: Episodes) -> list[int]:
    """Return the number of segments in each shard, including padding segments; without an origins file, every episode
    counts as one segment.
    """
    return [shard.records.get(ORIGINS, shard.num_episodes) for shard in episodes.shards]


# Hashes of conversations that do not depend on how the conversations are divided into spans.


def _hashes(rows: Rows) -> tuple[Words, Words]:
    """Return two hashes of every conversation: one of its token ids, and one of its loss weights and targets.

    A hash is a sum over all tokens: the value of each token times a random number that depends on its position. All
    tokens of a span have the same weight and target, so the hash of weights and targets needs only one multiplication
    per span, with the sum of the random numbers of its positions.
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
    trained = np.where(spans["weight"] > 0, _mixed(weight | target), np.uint64(0))
    mask = trained * (until[start + spans["length"]] - until[start])
    return _sums(ids, rows.segment_start), _sums(mask, rows.first_span)


def _mixed(words: Words) -> Words:
    """Mix the bits of each word, so that similar words get very different hashes."""
    words = words * np.uint64(0x9E3779B97F4A7C15)
    return words ^ (words >> np.uint64(32))


def _until(words: Words) -> Words:
    """Return the cumulative sums of the words modulo 2**64, starting with 0."""
    until = np.zeros(len(words) + 1, dtype=np.uint64)
    np.cumsum(words, out=until[1:])
    return until


def _sums(words: Words, start: Index) -> Words:
    until = _until(words)
    return until[start[1:]] - until[start[:-1]]


def is_padding(rows: Rows) -> NDArray[np.bool_]:
    """Return, for each segment, whether it consists only of padding."""
    spans = np.diff(rows.first_span)
    padding: Index = np.diff(offsets(rows.spans["part"] == Part.PAD)[rows.first_span])
    only: NDArray[np.bool_] = (spans > 0) & (padding == spans)
    return only


def _causes(one: Metadata | None, other: Metadata | None, removed: int, added: int) -> Iterator[Cause]:
    if one is None or other is None:
        return
    a, b = _settings(one), _settings(other)
    keys = sorted(a.keys() | b.keys(), key=lambda key: (CAUSES.index(key[0]), key[1]))
    causes = [Cause(*key, a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)]
    yield from causes
    if not causes and (removed or added):
        # All settings, file names and record counts are equal, so the text in the files must have changed.
        yield Cause("input", "conversations", removed, added)


def _settings(metadata: Metadata) -> dict[tuple[str, str], Any]:
    """Return the settings and inputs of a build that can cause differences, keyed by the part of the build, such as
    `tokenizer`, and the name of the setting.
    """
    format = metadata.format if isinstance(metadata.format, dict) else {"format": metadata.format}
    config = {name: value for name, value in metadata.config.items() if name not in WITHOUT_EFFECT}
    listed = config.get("sources")
    tables = [source for source in listed if isinstance(source, dict)] if isinstance(listed, list) else []
    sources = [source for source in tables if "train_on" in source]
    if sources:
        # A source's `train_on` is not part of the input, and is outdated after reweighing.
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
