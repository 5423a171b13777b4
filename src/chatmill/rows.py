"""Rows: token ids with a span table that records what every token is and why it is trained.

    ids       u32[N]                 all tokens of all rows, flat
    spans     SPAN[P]                tile the ids: length, role, part, message, weight, target, rule
    segments  first_span i64[G+1]    one conversation each (padding is a segment too), with its origin
    rows      first_segment i64[R+1]

The loss mask, positions and segment ids are not stored but derived from the spans. A rendered conversation, a packed
row, a block and a rollout target are all `Rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from chatmill.errors import DataError

try:
    from chatmill._native import _copy
except ImportError:  # pragma: no cover
    _copy = None  # type: ignore[assignment]

Ids = NDArray[np.uint32]
Index = NDArray[np.int64]
Table = NDArray[np.void]
"""A numpy structured array, addressed by column name."""

TrainOn = Literal["assistant", "last", "last-exchange", "all"]


class Role(IntEnum):
    SYSTEM = 0
    USER = 1
    ASSISTANT = 2
    TOOL = 3
    NONE = 255
    """Padding, and tokens outside turns."""


class Part(IntEnum):
    OPEN = 0
    CONTENT = 1
    REASONING = 2
    TOOL_CALL = 3
    CLOSE = 4
    EOS = 5
    INJECTED = 6
    PAD = 7
    PREFIX = 8
    """The part of a rollout that is kept unchanged."""
    SLOT = 9
    """A coordinate of a rollout, trained toward the object that it was matched to."""
    STRUCTURE = 10
    """Keys and punctuation of an entry that was appended to a rollout."""
    VALUE = 11
    """A text of such an entry: a description, a field."""
    COORD = 12
    """A coordinate of such an entry."""
    BRACE = 13
    """The brace that closes the answer."""


class Rule(IntEnum):
    """Why a span has its weight. `reweigh` changes only what ROLE decided."""

    ROLE = 0
    """By role: assistant turns are trained and others are context, as `train_on` selects."""
    HEADER = 1
    """A part that the format never trains: a turn's header, what follows its end, the end of a conversation."""
    FLAG = 2
    """By the message's own `train` or `weight`."""
    GIVEN = 3
    """By a mask that the caller gave."""
    UNFINISHED = 4
    """The turn is incomplete in its row, or comes after an unclosed answer: not trained."""
    PAD = 5
    INCOMPLETE_USER = 6
    """No complete user turn comes before the answer in its row."""
    INJECTED = 7
    """A copy that opens a cut turn again."""
    EARLIER_WINDOW = 8
    """Trained in an earlier window; here context for what follows."""
    PROMPT = 9
    """The prompt of a rollout, of any role."""
    ROLLOUT = 10
    """Written by the model itself: context, never trained as text."""
    MATCHED = 11
    """A slot of a matched object: its target is the true value."""
    MISSED = 12
    """An object that the rollout missed, or the right end of its answer."""
    VALUES_OFF = 13
    """A text of an appended entry, where these are not trained."""
    EARLIER_ROW = 14
    """With --unroll: trained in an earlier row of its conversation; here context for a later answer."""
    RANGE = 15
    """By `train_ranges` of the message, which select characters of its content."""
    OUTSIDE = 16
    """Text of a transcript outside turns, or an end marker that closes nothing: never trained."""
    WHITESPACE = 17
    """Whitespace between the turns of a transcript: never trained."""
    NOT_ANSWER = 18
    """Not an answer: blocks, and formats that train only answers, ignore `train` and `weight` of such a message."""
    SURPLUS = 19
    """The rollout continues although all true objects were found: its target closes the answer."""


NO_MESSAGE = np.uint32(2**32 - 1)
"""The message index of spans without a message of the record: padding, a default system text."""
NO_FILE = np.uint32(2**32 - 1)
LONG = 64
"""The average tokens of a piece from which on copying slices is faster than an index of tokens."""
OWN_ID = np.int32(-1)
"""The target of a span whose tokens are their own labels."""

SPAN = np.dtype(
    [
        ("length", "<u4"),
        ("message", "<u4"),
        ("weight", "<f4"),
        ("target", "<i4"),
        ("role", "u1"),
        ("part", "u1"),
        ("rule", "u1"),
    ]
)
ORIGIN = np.dtype([("file", "<u4"), ("line", "<u8"), ("key", "<u8", (2,))])
"""The file and line of a conversation, and a hash of its messages that does not depend on rendering."""


class File(NamedTuple):
    """A file of conversations: the source that it is mixed as, and its path as given."""

    source: str
    path: str


@dataclass(frozen=True, eq=False)
class Rows:
    """Many rows of tokens in columns, and a table of spans that says what each token is and why it is trained.

    >>> rows = open_renderer("primer", "bytes").render([Record([Message("user", "hi"), Message("assistant", "yo")])])
    >>> rows.mask().astype(int).tolist()
    [0, 0, 0, 0, 0, 1, 1, 1]
    >>> len(rows), rows.lengths.tolist(), rows.spans["weight"].tolist()
    (1, [8], [0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    """

    ids: Ids
    spans: Table
    first_span: Index
    origins: Table
    first_segment: Index
    files: tuple[File, ...] = ()

    def __len__(self) -> int:
        return len(self.first_segment) - 1

    def __getitem__(self, rows: slice) -> Rows:
        """Consecutive rows, as views without a copy."""
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise ValueError("a slice of Rows has step 1; use take for any other choice")
        segments = slice(self.first_segment[start], self.first_segment[max(start, stop)])
        spans = slice(self.first_span[segments.start], self.first_span[segments.stop])
        tokens = slice(self.span_start[spans.start], self.span_start[spans.stop])
        return Rows(
            self.ids[tokens],
            self.spans[spans],
            self.first_span[segments.start : segments.stop + 1] - spans.start,
            self.origins[segments],
            self.first_segment[start : max(start, stop) + 1] - segments.start,
            self.files,
        )

    # First tokens of spans, segments and rows, each followed by the number of tokens.

    @cached_property
    def span_start(self) -> Index:
        return offsets(self.spans["length"])

    @cached_property
    def segment_start(self) -> Index:
        return self.span_start[self.first_span]

    @cached_property
    def row_start(self) -> Index:
        return self.segment_start[self.first_segment]

    @property
    def lengths(self) -> Index:
        """Tokens in each row."""
        return np.diff(self.row_start)

    # Values for each token.

    def per_token(self, values: NDArray[Any]) -> NDArray[Any]:
        """Repeat the value of each span for all of its tokens."""
        return np.repeat(values, self.spans["length"])

    def weights(self) -> NDArray[np.float32]:
        """The loss weight of each token: 0 is context, over 0 is trained."""
        return self.per_token(self.spans["weight"])

    def mask(self) -> NDArray[np.bool_]:
        return self.per_token(self.spans["weight"] > 0)

    def targets(self) -> NDArray[np.int64]:
        """The label of each token: itself, unless its span has another target."""
        target = self.per_token(self.spans["target"])
        return np.where(target == OWN_ID, self.ids.astype(np.int64), target.astype(np.int64))

    def positions(self) -> Index:
        """0, 1, 2 … from the first token of each segment."""
        return run_positions(np.diff(self.segment_start))

    def segments(self) -> Index:
        """The segment of each token, counted from 0 in each row."""
        return np.repeat(run_positions(np.diff(self.first_segment)), np.diff(self.segment_start))

    # Operations.

    def take(self, rows: ArrayLike) -> Rows:
        """The rows with these numbers, in this order; a number may be repeated."""
        chosen = np.asarray(rows, dtype=np.int64)
        segments = ragged_index(self.first_segment[chosen], np.diff(self.first_segment)[chosen])
        span_counts = np.diff(self.first_span)[segments]
        spans = ragged_index(self.first_span[segments], span_counts)
        return Rows(
            copy_tokens(self.ids, self.row_start[chosen], self.lengths[chosen]),
            self.spans.take(spans),
            offsets(span_counts),
            self.origins.take(segments),
            offsets(np.diff(self.first_segment)[chosen]),
            self.files,
        )

    def reweigh(self, train_on: TrainOn) -> Rows:
        """The same tokens with other roles trained; weights that flags, headers and the like decided stay."""
        spans = joined([self.spans])
        weigh(spans, self.first_span, train_on)
        return Rows(self.ids, spans, self.first_span, self.origins, self.first_segment, self.files)

    def check(self) -> None:
        """Raise `DataError` unless spans tile ids, segments tile spans and rows tile segments."""
        for name, first, count in (
            ("segments", self.first_span, len(self.spans)),
            ("rows", self.first_segment, len(self.origins)),
        ):
            if len(first) == 0 or first[0] != 0 or first[-1] != count or np.any(np.diff(first) < 0):
                raise DataError(f"{name} do not tile what they hold; offsets must rise from 0 to {count}")
        if len(self.first_span) != len(self.origins) + 1:
            raise DataError(f"{len(self.origins)} origins for {len(self.first_span) - 1} segments; one each is right")
        if self.span_start[-1] != len(self.ids):
            raise DataError(f"spans cover {self.span_start[-1]} tokens of {len(self.ids)}; they must tile the ids")
        if np.any(self.spans["length"] == 0):
            raise DataError("a span is empty; every span holds a token")
        weight = self.spans["weight"]
        if not np.all(np.isfinite(weight) & (weight >= 0)):
            raise DataError("a weight is negative or not finite; 0 is context, over 0 is trained")
        if np.any(self.spans["target"] < OWN_ID):
            raise DataError("a target is below -1; -1 means the token itself")
        file = self.origins["file"]
        if np.any((file != NO_FILE) & (file >= len(self.files))):
            raise DataError(f"an origin names a file beyond the {len(self.files)} known")


def concat(parts: Sequence[Rows]) -> Rows:
    """Concatenate rows; a file of several parts is listed once."""
    if not parts:
        return EMPTY
    files = {file: number for number, file in enumerate(dict.fromkeys(f for part in parts for f in part.files))}
    origins = joined([part.origins for part in parts])
    stop = 0
    for part in parts:
        start, stop = stop, stop + len(part.origins)
        renumbered = np.array([files[f] for f in part.files] + [0], dtype=np.uint32)
        file = part.origins["file"]
        known = file != NO_FILE
        origins["file"][start:stop] = np.where(known, renumbered[np.where(known, file, 0)], NO_FILE)
    return Rows(
        np.concatenate([part.ids for part in parts]),
        joined([part.spans for part in parts]),
        offsets(np.concatenate([np.diff(part.first_span) for part in parts])),
        origins,
        offsets(np.concatenate([np.diff(part.first_segment) for part in parts])),
        tuple(files),
    )


def joined(tables: Sequence[Table]) -> Table:
    """Concatenate tables of one type, as a copy.

    As bytes, because numpy copies structured arrays field by field, ten times slower. (For the same reason records of a
    table are selected by `take`, never by an index in brackets.)
    """
    dtype = tables[0].dtype
    return np.concatenate([as_bytes(table) for table in tables]).view(dtype)


def as_bytes(table: Table) -> Table:
    """The same records as opaque bytes."""
    return np.ascontiguousarray(table).view(np.dtype((np.void, table.dtype.itemsize)))


def weigh(spans: Table, first_span: Index, train_on: TrainOn) -> None:
    """Set the weight of every span that the ROLE rule decides. Tool results are never trained.

    `last` is the last assistant message of each conversation, `last-exchange` all that follow its last user message.
    """
    role, decided = spans["role"], spans["rule"] == Rule.ROLE
    trained = (role != Role.TOOL) & (role != Role.NONE) if train_on == "all" else role == Role.ASSISTANT
    if train_on == "last":
        # The last of all assistant messages: one that its own flag keeps out is not replaced by an earlier one.
        trained &= spans["message"] == _last_message(spans, first_span, trained)
    elif train_on == "last-exchange":
        # Without a user message all of them: the number is -1 then.
        of_user = (role == Role.USER) & (spans["message"] != NO_MESSAGE)
        trained &= spans["message"] > _last_message(spans, first_span, of_user)
    spans["weight"] = np.where(decided, trained * _record_weights(spans, first_span, decided), spans["weight"])


def _record_weights(spans: Table, first_span: Index, decided: NDArray[np.bool_]) -> NDArray[np.float32] | float:
    """For each span the weight of its record, which is that of the spans of its segment that are trained by role."""
    weight = np.where(decided, spans["weight"], np.float32(0))
    if not np.any((weight != 0) & (weight != 1)):
        return 1.0
    counts = np.diff(first_span)
    largest = np.zeros(len(counts), dtype=np.float32)
    largest[counts > 0] = np.maximum.reduceat(weight, first_span[:-1][counts > 0])
    return np.repeat(np.where(largest > 0, largest, np.float32(1)), counts)


def _last_message(spans: Table, first_span: Index, chosen: NDArray[np.bool_]) -> Index:
    """For each span the highest message number of the chosen spans of its segment, -1 if none is chosen."""
    counts = np.diff(first_span)
    last = np.full(len(counts), -1, dtype=np.int64)
    if len(spans):
        message = np.where(chosen, spans["message"].astype(np.int64), -1)
        last[counts > 0] = np.maximum.reduceat(message, first_span[:-1][counts > 0])
    return np.repeat(last, counts)


def offsets(lengths: NDArray[Any]) -> Index:
    """The start of each item if items of these lengths follow one another; the last entry is their end.

    [2 3]  ->  [0 2 5]
    """
    start = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=start[1:])
    return start


def run_positions(lengths: NDArray[Any], *, width: int = 0, dtype: DTypeLike = np.int64) -> NDArray[Any]:
    """0, 1, 2 … within each of several runs; with `width`, for runs that fill rows of that many columns.

    lengths [2 3]  ->  [0 1 0 1 2]
    """
    start = offsets(lengths)[:-1]
    columns = start % width if width else start
    positions: NDArray[Any] = np.repeat(columns.astype(dtype), lengths)
    if width:
        positions = positions.reshape(-1, width)
    np.subtract(np.arange(positions.shape[-1], dtype=dtype), positions, out=positions)
    return positions


def mask_runs(mask: NDArray[np.bool_], edges: Index) -> Index:
    """Where runs of equal mask begin, each edge beginning one; the last entry is their end.

    mask [0 1 1 1], edges [0 2 4]  ->  [0 1 2 4]
    """
    begins = np.zeros(len(mask) + 1, dtype=bool)
    np.not_equal(mask[1:], mask[:-1], out=begins[1:-1])
    begins[edges] = True
    return np.flatnonzero(begins)


def rows_from_mask(ids: Ids, mask: NDArray[Any], lengths: ArrayLike) -> Rows:
    """Rows with nothing but a mask: each run of equal mask within a row is one span."""
    trained, row_start = mask > 0, offsets(np.asarray(lengths))
    start = mask_runs(trained, row_start)
    spans = np.zeros(len(start) - 1, dtype=SPAN)
    spans["length"], spans["weight"] = np.diff(start), trained[start[:-1]]
    spans["message"], spans["target"] = NO_MESSAGE, OWN_ID
    spans["role"], spans["part"], spans["rule"] = Role.NONE, Part.CONTENT, Rule.GIVEN
    one_each = np.arange(len(row_start), dtype=np.int64)
    return Rows(ids, spans, np.searchsorted(start, row_start), no_origins(len(row_start) - 1), one_each)


def no_origins(count: int) -> Table:
    """Origins of segments that no file holds."""
    origins = np.zeros(count, dtype=ORIGIN)
    origins["file"] = NO_FILE
    return origins


def ragged_index(start: Index, length: NDArray[Any]) -> Index:
    """The numbers start, start + 1 … of each range, concatenated.

    [5 0], lengths [2 3]  ->  [5 6 0 1 2]
    """
    full = length > 0
    start, length = start[full], length[full]
    if not len(start):
        return np.empty(0, dtype=np.int64)
    # One cumulative sum: steps of 1 inside a range, and a jump where the next one begins.
    stop = np.cumsum(length, dtype=np.int64)
    index = np.ones(stop[-1], dtype=np.int64)
    index[0] = start[0]
    index[stop[:-1]] = start[1:] - start[:-1] - length[:-1] + 1
    return np.cumsum(index, out=index)


def copy_tokens(ids: Ids, start: Index, length: NDArray[Any], literals: Ids | None = None) -> Ids:
    """Concatenate token ranges, each of `ids`, or of `literals` if it starts at len(ids) or later."""
    if literals is None:
        literals = np.empty(0, dtype=np.uint32)
    end, total = len(ids), int(length.sum())
    out = np.empty(total, dtype=np.uint32)
    if _copy is not None and ids.dtype == literals.dtype == out.dtype:
        start, length = (np.ascontiguousarray(numbers, dtype=np.int64) for numbers in (start, length))
        _copy.pieces(out, np.ascontiguousarray(ids), np.ascontiguousarray(literals), start, length)
        return out
    if len(start) and total >= LONG * len(start):
        pieces = zip(start.tolist(), (start + length).tolist(), strict=True)
        return np.concatenate([ids[a:b] if a < end else literals[a - end : b - end] for a, b in pieces])
    index = ragged_index(start, length)
    if end:
        ids.take(index, mode="clip", out=out)
    of_literals = index >= end
    out[of_literals] = literals[index[of_literals] - end]
    return out


def copy_ranges(source: NDArray[Any], start: Index, stop: Index, target: NDArray[Any], to: Index) -> None:
    """Copy source[start:stop] to target[to:], for each of several ranges."""
    if _copy is not None and source.dtype == target.dtype and source.ndim == target.ndim == 1:
        start, stop, to = (np.ascontiguousarray(places, dtype=np.int64) for places in (start, stop, to))
        _copy.ranges(target, to, np.ascontiguousarray(source), start, stop, source.itemsize)
        return
    for a, b, at in zip(start.tolist(), stop.tolist(), to.tolist(), strict=True):
        target[at : at + b - a] = source[a:b]


EMPTY = rows_from_mask(np.empty(0, dtype=np.uint32), np.empty(0), np.empty(0, dtype=np.int64))
