"""Find the turns in rows, either from the spans of the rows or from the turn markers in plain token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chatmill.errors import DataError
from chatmill.rows import OWN_ID, SPAN, Index, Part, Role, Rows, Rule, mask_runs, no_origins, offsets, weigh


@dataclass(frozen=True)
class TurnTable:
    """A table of the turns in a set of rows. A turn consists of the consecutive spans of one message.

    turns    system | user asst | user asst asst | user
    parts    head     exchange    exchange         exchange
    anchor                                  ^^^^
    """

    start: Index
    stop: Index
    row: Index
    role: NDArray[np.uint8]
    begins_exchange: NDArray[np.bool_]
    """Whether the turn is a user turn or the first turn after the head (BOS and the system turn)."""
    head_stop: Index
    """For each row, the end of the head, which consists of BOS and a leading system turn."""
    anchor: Index
    """For each row, the index of its last assistant turn; if it has none, of its last turn; -1 if the row is empty."""


def turns_of(rows: Rows) -> TurnTable:
    new_turn = begins_segment(rows)
    new_turn[1:] |= rows.spans["message"][1:] != rows.spans["message"][:-1]
    first_span = np.flatnonzero(new_turn)
    start = rows.span_start[first_span]
    stop = np.append(start[1:], len(rows.ids))
    role = rows.spans["role"][first_span]
    row = np.searchsorted(rows.row_start, start, side="right") - 1
    row_start, count = rows.row_start[:-1], len(rows)

    number = np.arange(len(start))
    first_turn = by_row(np.minimum, np.where(role == Role.NONE, len(start), number), row, count, len(start))
    is_system = np.append(role, Role.NONE)[first_turn] == Role.SYSTEM
    begins = (role == Role.NONE) & (rows.spans["part"][first_span] == Part.OPEN) & (start == row_start[row])
    begin_stop = np.maximum(by_row(np.maximum, np.where(begins, stop, -1), row, count), row_start)
    # In a transcript, the head also includes the text between the system turn and the next turn.
    in_turns = np.flatnonzero(~np.isin(rows.spans["rule"][first_span], (Rule.OUTSIDE, Rule.WHITESPACE)))
    following = np.append(start[in_turns], len(rows.ids))[np.searchsorted(in_turns, first_turn, side="right")]
    head_stop = np.where(is_system, np.minimum(following, rows.row_start[1:]), begin_stop)

    anchor = by_row(np.maximum, np.where(role == Role.ASSISTANT, number, -1), row, count)
    anchor = np.where(anchor >= 0, anchor, by_row(np.maximum, number, row, count))
    exchange = (role == Role.USER) | (start == head_stop[row])
    exchange &= start >= head_stop[row]
    return TurnTable(start, stop, row, role, exchange, head_stop, anchor)


@dataclass(frozen=True)
class ExchangeTable:
    """For each turn: its first token, its row, and whether it begins an exchange. For each row: the end of its head,
    which consists of BOS and the leading system turns.
    """

    start: Index
    row: Index
    begins: NDArray[np.bool_]
    head_stop: Index


def exchanges_of(rows: Rows) -> ExchangeTable:
    """Return the exchanges of every row: each is a user turn and everything up to the next user turn.

        turns    BOS system system | asst | user user asst tool asst | system user asst
        parts    head                       exchange                   exchange

    Consecutive user turns belong to the same exchange. A system turn next to a user turn belongs to the same exchange
    as the user turn, unless it is at the start of the row. Turns of other roles before the first user turn form a
    separate exchange.
    """
    turn, count = turns_of(rows), len(rows)
    number, in_turns = np.arange(len(turn.start)), turn.role != Role.NONE
    first_other = by_row(
        np.minimum, np.where(in_turns & (turn.role != Role.SYSTEM), number, len(number)), turn.row, count, len(number)
    )
    leading = (turn.role == Role.SYSTEM) & (number < first_other[turn.row])
    head_stop = np.maximum(by_row(np.maximum, np.where(leading, turn.stop, -1), turn.row, count), turn.head_stop)

    asks = ((turn.role == Role.USER) | (turn.role == Role.SYSTEM)) & (turn.start >= head_stop[turn.row])
    # Tokens outside of turns, such as line breaks between them, do not separate consecutive user turns.
    spoken = np.flatnonzero(in_turns)
    follows = np.zeros(len(spoken), dtype=bool)
    follows[1:] = asks[spoken[:-1]] & (turn.row[spoken[1:]] == turn.row[spoken[:-1]])
    opens = np.zeros(len(number), dtype=bool)
    opens[spoken] = asks[spoken] & ~follows
    question = np.cumsum(opens)
    by_user = np.bincount(question[asks & (turn.role == Role.USER)], minlength=int(question[-1:].sum()) + 1) > 0
    begins = (opens & by_user[question]) | (turn.start == head_stop[turn.row])
    return ExchangeTable(turn.start, turn.row, begins & (turn.start >= head_stop[turn.row]), head_stop)


def begins_segment(rows: Rows) -> NDArray[np.bool_]:
    begins = np.zeros(len(rows.spans), dtype=bool)
    begins[rows.first_span[:-1][np.diff(rows.first_span) > 0]] = True
    return begins


def by_row(reduce: np.ufunc, values: Index, row: Index, rows: int, default: int = -1) -> Index:
    """Combine all values of each row into one value with a ufunc, such as `np.minimum`."""
    out = np.full(rows, default, dtype=np.int64)
    reduce.at(out, row, values)
    return out


# Functions for callers that have token ids instead of conversations.


def rows_from_ids(
    documents: Sequence[Sequence[int]], *, openers: Mapping[Role, int], close: int, eos: int | None = None
) -> Rows:
    """Make one row from the token ids of each document. A turn extends from its marker in `openers` to the next `close`
    token.

        U u E A a EOS b   ->   U|u|E A|a EOS   b EOS
                               user  asst      outside of every turn

    If another marker occurs before `close`, the turn ends at that marker and is not closed. If `eos` is given, an EOS
    token is appended to each document, and every EOS token ends a turn and a segment. Without `eos`, each document is
    one segment.
    """
    ends_with: tuple[int, ...] = () if eos is None else (eos,)
    if len({*openers.values(), close, *ends_with}) < len(openers) + 1 + len(ends_with):
        raise DataError("two markers have the same id; expected different ids")
    wide = np.fromiter(chain.from_iterable(chain(document, ends_with) for document in documents), dtype=np.int64)
    if np.any((wide < 0) | (wide >= 2**32)):
        raise DataError("token ids must be integers from 0 to 4294967295")
    tokens, size = wide.astype(np.uint32), len(wide)
    row_start = offsets(np.array([len(document) + len(ends_with) for document in documents], dtype=np.int64))

    role_at = np.full(size, Role.NONE, dtype=np.uint8)
    for role, opener in openers.items():
        role_at[wide == opener] = role
    opens = np.flatnonzero(role_at != Role.NONE)
    ends = np.flatnonzero(wide == eos) if eos is not None else np.empty(0, dtype=np.int64)
    segment_start = row_start if eos is None else np.append(0, ends + 1)
    breaks = np.unique(np.concatenate([opens, ends, segment_start]))
    limit = np.append(breaks, size)[np.searchsorted(breaks, opens, side="right")]
    closes = np.append(np.flatnonzero(wide == close), size)
    first_close = closes[np.searchsorted(closes, opens)]
    closed = first_close < limit
    stops = np.where(closed, first_close + 1, limit)
    closes = first_close[closed]

    border = np.zeros(size + 1, dtype=bool)
    for at in (segment_start, opens, opens + 1, closes, stops, ends):
        border[at] = True
    start = np.flatnonzero(border[:-1])
    turn = np.searchsorted(opens, start, side="right") - 1
    inside = (turn >= 0) & (start < np.append(stops, 0)[turn])
    part_at = np.full(size, Part.CONTENT, dtype=np.uint8)
    part_at[opens], part_at[closes], part_at[ends] = Part.OPEN, Part.CLOSE, Part.EOS

    first_span = np.searchsorted(start, segment_start)
    spans = np.zeros(len(start), dtype=SPAN)
    spans["length"] = np.diff(np.append(start, size))
    spans["target"] = OWN_ID
    spans["role"] = np.where(inside, np.append(role_at[opens], Role.NONE)[turn], Role.NONE)
    spans["part"] = part_at[start]
    spans["rule"] = np.where(spans["part"] == Part.EOS, Rule.HEADER, Rule.ROLE)
    # Consecutive tokens outside of turns form a message, too. EOS belongs to the last message, as in a rendered row.
    unit = np.cumsum((spans["part"] == Part.OPEN) | (~inside & (spans["part"] != Part.EOS)))
    before = np.append(0, unit)[first_span[:-1]]
    spans["message"] = np.maximum(unit - np.repeat(before, np.diff(first_span)) - 1, 0)
    weigh(spans, first_span, "assistant")
    origins = no_origins(len(segment_start) - 1)
    return Rows(tokens, spans, first_span, origins, np.searchsorted(segment_start, row_start))


def with_mask(rows: Rows, mask: ArrayLike) -> Rows:
    """Replace the loss weights of rows with a loss mask; spans are split where the mask changes."""
    trained = np.asarray(mask, dtype=bool)
    start = mask_runs(trained, rows.span_start)
    spans = rows.spans.take(np.searchsorted(rows.span_start, start[:-1], side="right") - 1)
    spans["length"], spans["weight"], spans["rule"] = np.diff(start), trained[start[:-1]], Rule.GIVEN
    return replace(rows, spans=spans, first_span=np.searchsorted(start, rows.segment_start))


def assistant_mask(ids: ArrayLike, *, assistant: int, close: int) -> NDArray[np.bool_]:
    """Return a loss mask that includes the tokens after each `assistant` token, up to and including the next `close`
    token. Turn markers of other roles are ignored.
    """
    tokens = np.asarray(ids, dtype=np.int64)
    place = np.arange(1, len(tokens) + 1)
    opened = np.maximum.accumulate(np.where(tokens == assistant, place, 0))
    closed = np.maximum.accumulate(np.where(tokens == close, place, 0))
    closed_before = np.append(0, closed[:-1])[: len(tokens)]
    mask: NDArray[np.bool_] = (opened > closed_before) & (tokens != assistant)
    return mask
