"""`Rows` stores token sequences with a table of spans; each span gives its tokens a role, a part and a loss weight.

    ids       u32[N]                 all tokens of all rows, flat
    spans     SPAN[P]                tile the ids: length, role, part, message, weight, target, rule
    segments  first_span i64[G+1]    one conversation each (padding is a segment too), with its origin
    rows      first_segment i64[R+1]

The loss mask, position ids and segment ids are computed from the spans and segments. Rendered conversations, packed
rows, fixed-size blocks and rollout targets are all stored as `Rows`.
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
    """The role of padding and of tokens outside turns."""


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
    """The prefix of a rollout that is kept unchanged."""
    SLOT = 9
    """A coordinate of a rollout; its label is the coordinate of the matched object."""
    STRUCTURE = 10
    """Keys and punctuation of an entry that was appended to a rollout."""
    VALUE = 11
    """Text of an appended entry: a description or a field."""
    COORD = 12
    """A coordinate of an appended entry."""
    BRACE = 13
    """The brace that closes the JSON answer of a rollout."""


class Rule(IntEnum):
    """The reason for the loss weight of a span. `Rows.reweigh` changes only the weights of spans with `Rule.ROLE`."""

    ROLE = 0
    """The role and `train_on` set the weight: by default, assistant turns are trained and other turns are context."""
    HEADER = 1
    """A part that is never in the loss mask: the header of a turn, text after its end, or the end of a conversation."""
    FLAG = 2
    """The message has its own `train` or `weight`, which sets the weight."""
    GIVEN = 3
    """The caller passed a mask, which sets the weight."""
    UNFINISHED = 4
    """Context, because the turn is incomplete in its row or follows an unclosed answer."""
    PAD = 5
    INCOMPLETE_USER = 6
    """Context, because no complete user turn precedes the answer in its row."""
    INJECTED = 7
    """A copy of a turn header that reopens a truncated turn."""
    EARLIER_WINDOW = 8
    """Context in this row, because the token is trained in an earlier window of the conversation."""
    PROMPT = 9
    """Context, because the token belongs to the prompt of a rollout."""
    ROLLOUT = 10
    """Context, because the model generated the token in a rollout."""
    MATCHED = 11
    """A coordinate of a matched object; its label is the true value."""
    MISSED = 12
    """An object that the rollout missed, or the correct end of its answer."""
    VALUES_OFF = 13
    """Text of an appended entry in a run that does not train on the texts of appended entries."""
    EARLIER_ROW = 14
    """With --unroll: context in this row, because the token is trained in an earlier row of the conversation."""
    RANGE = 15
    """The message has `train_ranges`, which set the weights of character ranges in its content."""
    OUTSIDE = 16
    """Text of a transcript outside turns, or an unmatched end marker; always context."""
    WHITESPACE = 17
    """Whitespace between the turns of a transcript; always context."""
    NOT_ANSWER = 18
    """Context, because the message is not an answer. With --fit blocks or a format that trains only on answers, `train`
    and `weight` on other messages are ignored.
    """
    SURPLUS = 19
    """The rollout continues after all true objects have been found; the target closes the answer."""


NO_MESSAGE = np.uint32(2**32 - 1)
"""Message index of spans outside the record's messages, such as padding or a default system text."""
NO_FILE = np.uint32(2**32 - 1)
LONG = 64
"""Minimum average piece length, in tokens, at which copying slices is faster than indexing tokens."""
OWN_ID = np.int32(-1)
"""Target of a span whose tokens are their own labels."""

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
"""The file and line of a conversation, and a hash of its messages before rendering."""


class File(NamedTuple):
    """An input file: the name of the data source that it belongs to, and its path as the user gave it."""

    source: str
    path: str


@dataclass(frozen=True, eq=False)
class Rows:
    """Token sequences with a table of spans; each span gives its tokens a role, a part and a loss weight.

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
        """Return consecutive rows as views, without copying."""
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise ValueError("a slice of Rows must have step 1; use take for other selections")
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

    # Offsets of the first token of each span, segment or row, followed by the total number of tokens.

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
        """Number of tokens in each row."""
        return np.diff(self.row_start)

    # Values per token.

    def per_token(self, values: NDArray[Any]) -> NDArray[Any]:
        """Repeat the value of each span for every token in the span."""
        return np.repeat(values, self.spans["length"])

    def weights(self) -> NDArray[np.float32]:
        """Return the loss weight of each token; tokens with weight 0 are not trained."""
        return self.per_token(self.spans["weight"])

    def mask(self) -> NDArray[np.bool_]:
        return self.per_token(self.spans["weight"] > 0)

    def targets(self) -> NDArray[np.int64]:
        """Return the label of each token: the token id itself, or the target of its span if the span has a target."""
        target = self.per_token(self.spans["target"])
        return np.where(target == OWN_ID, self.ids.astype(np.int64), target.astype(np.int64))

    def positions(self) -> Index:
        """Return position ids: 0, 1, 2 … from the first token of each segment."""
        return run_positions(np.diff(self.segment_start))

    def segments(self) -> Index:
        """Return the segment index of each token; segments are numbered from 0 in each row."""
        return np.repeat(run_positions(np.diff(self.first_segment)), np.diff(self.segment_start))

    # Operations.

    def take(self, rows: ArrayLike) -> Rows:
        """Return the rows with the given indices, in the given order; an index may be repeated."""
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
        """Return the rows with loss weights recomputed for `train_on`; only spans with `Rule.ROLE` change.

        A conversation keeps its record weight if at least one of its spans with `Rule.ROLE` is trained. Otherwise, the
        record weight cannot be recovered from the rows and is assumed to be 1.
        """
        spans = joined([self.spans])
        weigh(spans, self.first_span, train_on)
        return Rows(self.ids, spans, self.first_span, self.origins, self.first_segment, self.files)

    def check(self) -> None:
        """Raise `DataError` if the rows are inconsistent, for example if the spans do not cover every token exactly
        once.
        """
        for name, first, count in (
            ("segments", self.first_span, len(self.spans)),
            ("rows", self.first_segment, len(self.origins)),
        ):
            if len(first) == 0 or first[0] != 0 or first[-1] != count or np.any(np.diff(first) < 0):
                raise DataError(f"the offsets of {name} are invalid; expected increasing offsets from 0 to {count}")
        if len(self.first_span) != len(self.origins) + 1:
            raise DataError(
                f"{len(self.origins)} origins for {len(self.first_span) - 1} segments; expected one per segment"
            )
        if self.span_start[-1] != len(self.ids):
            raise DataError(
                f"spans cover {self.span_start[-1]} tokens, but there are {len(self.ids)} ids; expected equal numbers"
            )
        if np.any(self.spans["length"] == 0):
            raise DataError("a span is empty; expected at least one token per span")
        weight = self.spans["weight"]
        if not np.all(np.isfinite(weight) & (weight >= 0)):
            raise DataError("a weight is negative or not finite; expected 0 for context, or a positive number")
        if np.any(self.spans["target"] < OWN_ID):
            raise DataError("a target is below -1; expected a token id, or -1 for the token itself")
        file = self.origins["file"]
        if np.any((file != NO_FILE) & (file >= len(self.files))):
            raise DataError(f"an origin has a file index of {len(self.files)} or more; expected the index of a file")


def concat(parts: Sequence[Rows]) -> Rows:
    """Concatenate several `Rows` objects; an input file that occurs in more than one of them is listed only once. A
    single object is returned without copying it.
    """
    if not parts:
        return EMPTY
    if len(parts) == 1:
        return parts[0]
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
    """Concatenate structured arrays of the same dtype.

    The records are copied as raw bytes, because numpy copies structured arrays field by field, which is ten times
    slower. Indexing a structured array with `[]` also copies field by field, so use `take` to select records.
    """
    dtype = tables[0].dtype
    return np.concatenate([as_bytes(table) for table in tables]).view(dtype)


def as_bytes(table: Table) -> Table:
    """Return a view of a structured array in which each record is one opaque byte string."""
    return np.ascontiguousarray(table).view(np.dtype((np.void, table.dtype.itemsize)))


def weigh(
    spans: Table, first_span: Index, train_on: TrainOn, record_weights: NDArray[np.float32] | None = None
) -> None:
    """Set the loss weight of every span with `Rule.ROLE`. Tool results always get weight 0.

    `record_weights` contains the weight of the record in each segment. Without `record_weights`, the record weight of a
    segment is the largest weight of its spans with `Rule.ROLE`, or 1 if all these spans have weight 0.
    """
    decided = spans["rule"] == Rule.ROLE
    factor: NDArray[np.float32] | float = 1.0
    if record_weights is None and np.any(decided & (spans["weight"] != 0) & (spans["weight"] != 1)):
        record_weights = weights_by_role(spans, first_span)
        record_weights[record_weights == 0] = 1
    if record_weights is not None:
        factor = np.repeat(record_weights, np.diff(first_span))
    spans["weight"] = np.where(decided, select(spans, first_span, train_on) * factor, spans["weight"])


def select(spans: Table, first_span: Index, train_on: TrainOn) -> NDArray[np.bool_]:
    """Return a boolean mask of the spans that `train_on` selects, regardless of the rule of each span.

    `last` selects the last assistant message of each conversation; `last-exchange` selects all assistant messages after
    the last user message.
    """
    role = spans["role"]
    selected: NDArray[np.bool_] = (role != Role.TOOL) & (role != Role.NONE)
    if train_on != "all":
        selected = role == Role.ASSISTANT
    if train_on == "last":
        # Select the last assistant message even if its own flag excludes it, instead of an earlier message.
        selected &= spans["message"] == _last_message(spans, first_span, selected)
    elif train_on == "last-exchange":
        # Without a user message, `_last_message` returns -1, which selects all messages.
        of_user = (role == Role.USER) & (spans["message"] != NO_MESSAGE)
        selected &= spans["message"] > _last_message(spans, first_span, of_user)
    return selected


def weights_by_role(spans: Table, first_span: Index) -> NDArray[np.float32]:
    """For each segment, return the largest loss weight of its spans with `Rule.ROLE`.

    The largest weight equals the weight of the segment's record, or is 0 if no span with `Rule.ROLE` is trained.
    """
    counts = np.diff(first_span)
    largest = np.zeros(len(counts), dtype=np.float32)
    if len(spans):
        weight = np.where(spans["rule"] == Rule.ROLE, spans["weight"], np.float32(0))
        largest[counts > 0] = np.maximum.reduceat(weight, first_span[:-1][counts > 0])
    return largest


def _last_message(spans: Table, first_span: Index, chosen: NDArray[np.bool_]) -> Index:
    """For each span, return the highest message index among the chosen spans of the same segment, or -1 if there are
    none.
    """
    counts = np.diff(first_span)
    last = np.full(len(counts), -1, dtype=np.int64)
    if len(spans):
        message = np.where(chosen, spans["message"].astype(np.int64), -1)
        last[counts > 0] = np.maximum.reduceat(message, first_span[:-1][counts > 0])
    return np.repeat(last, counts)


def offsets(lengths: NDArray[Any]) -> Index:
    """Return the start offset of each item, followed by the total length.

    [2 3]  ->  [0 2 5]
    """
    start = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=start[1:])
    return start


def run_positions(lengths: NDArray[Any], *, width: int = 0, dtype: DTypeLike = np.int64) -> NDArray[Any]:
    """Number the elements of consecutive runs from 0; `lengths` contains the length of each run. If `width` is given,
    return a 2-D array with rows of this width; runs must not cross row boundaries.

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
    """Return `edges` and all indices at which the mask value changes, in ascending order.

    mask [0 1 1 1], edges [0 2 4]  ->  [0 1 2 4]
    """
    begins = np.zeros(len(mask) + 1, dtype=bool)
    np.not_equal(mask[1:], mask[:-1], out=begins[1:-1])
    begins[edges] = True
    return np.flatnonzero(begins)


def rows_from_mask(ids: Ids, mask: NDArray[Any], lengths: ArrayLike) -> Rows:
    """Build `Rows` from token ids and a loss mask; each run of equal mask values within a row becomes one span."""
    trained, row_start = mask > 0, offsets(np.asarray(lengths))
    start = mask_runs(trained, row_start)
    spans = np.zeros(len(start) - 1, dtype=SPAN)
    spans["length"], spans["weight"] = np.diff(start), trained[start[:-1]]
    spans["message"], spans["target"] = NO_MESSAGE, OWN_ID
    spans["role"], spans["part"], spans["rule"] = Role.NONE, Part.CONTENT, Rule.GIVEN
    one_each = np.arange(len(row_start), dtype=np.int64)
    return Rows(ids, spans, np.searchsorted(start, row_start), no_origins(len(row_start) - 1), one_each)


def no_origins(count: int) -> Table:
    """Return `count` origins for segments that were not read from a file."""
    origins = np.zeros(count, dtype=ORIGIN)
    origins["file"] = NO_FILE
    return origins


def ragged_index(start: Index, length: NDArray[Any]) -> Index:
    """Concatenate the index ranges start, start + 1, …, start + length - 1.

    [5 0], lengths [2 3]  ->  [5 6 0 1 2]
    """
    full = length > 0
    start, length = start[full], length[full]
    if not len(start):
        return np.empty(0, dtype=np.int64)
    # Compute one cumulative sum: steps of 1 inside a range, and a jump to the start of the next range.
    stop = np.cumsum(length, dtype=np.int64)
    index = np.ones(stop[-1], dtype=np.int64)
    index[0] = start[0]
    index[stop[:-1]] = start[1:] - start[:-1] - length[:-1] + 1
    return np.cumsum(index, out=index)


def copy_tokens(ids: Ids, start: Index, length: NDArray[Any], literals: Ids | None = None) -> Ids:
    """Concatenate token ranges; indices below len(ids) refer to `ids`, and index len(ids) + i is `literals[i]`."""
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
    """For each range, copy source[start:stop] to `target`, beginning at index `to`."""
    if _copy is not None and source.dtype == target.dtype and source.ndim == target.ndim == 1:
        start, stop, to = (np.ascontiguousarray(places, dtype=np.int64) for places in (start, stop, to))
        _copy.ranges(target, to, np.ascontiguousarray(source), start, stop, source.itemsize)
        return
    for a, b, at in zip(start.tolist(), stop.tolist(), to.tolist(), strict=True):
        target[at : at + b - a] = source[a:b]


EMPTY = rows_from_mask(np.empty(0, dtype=np.uint32), np.empty(0), np.empty(0, dtype=np.int64))
