"""Truncate or drop rows that are too long, by one of several rules.

    exchanges   keep the system turn and as many complete exchanges from the end as fit; drop the row if none fits
    turns       drop whole exchanges, oldest first; keep the system turn and the last answer
    tail        keep the last tokens
    windows     split the row into several rows; each token is trained on once
    drop        drop the row
    error       raise an error for the first row that is too long

The ledger counts removed tokens and dropped rows by reason.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError, RecordError
from chatmill.fit.gather_plan import OWN_RULE, GatherPlan, gather
from chatmill.fit.turns import by_row, exchanges_of, turns_of
from chatmill.ledger import Ledger
from chatmill.rows import NO_FILE, Index, Part, Rows, Rule, concat, offsets

FitRule = Literal["exchanges", "turns", "tail", "windows", "drop", "error"]
RULES: tuple[FitRule, ...] = get_args(FitRule)
OVER = "last_exchange_over_max_tokens"
"""Ledger reason for rows that `exchanges` drops because their last exchange is too long."""
HEADER = "header_of_cut_message"
"""Ledger reason for rows that keep the header of a removed message; only `exchanges` drops them."""
LONGEST_ROW = np.iinfo(np.int64).max
STRETCH = 16
"""If runs of unchanged rows are shorter than this on average, one `gather` of all rows is faster than copying each run.
"""


@dataclass(frozen=True)
class Truncation:
    """The token ranges of new rows.

    Each new row consists of three ranges of one source row: the head (such as the system turn), context that is not
    trained on, and the tokens that are kept after the context. A range can be empty.
    """

    source: Index
    start: Index
    stop: Index
    """The shape of `start` and `stop` is (new rows, 3)."""

    def take(self, numbers: Index) -> Truncation:
        return Truncation(self.source[numbers], self.start[numbers], self.stop[numbers])


def truncate(rows: Rows, capacity: int | None, rule: FitRule = "exchanges", *, ledger: Ledger, **options: Any) -> Rows:
    """Return rows of at most `capacity` tokens (None means no limit); rows without trained tokens are dropped.

    `options` are passed to `truncate_with_sources`.

    >>> import numpy as np
    >>> from chatmill.fit import truncate
    >>> from chatmill.ledger import Ledger
    >>> from chatmill.rows import rows_from_mask
    >>> rows = rows_from_mask(np.arange(6, dtype=np.uint32), np.ones(6), [6])
    >>> truncate(rows, 4, "tail", ledger=Ledger()).ids.tolist()
    [2, 3, 4, 5]
    """
    return truncate_with_sources(rows, capacity, rule, ledger=ledger, **options)[0]


def truncate_with_sources(
    rows: Rows,
    capacity: int | None,
    rule: FitRule,
    *,
    ledger: Ledger,
    drop_untrained: bool = True,
    require_terminators: bool = False,
    min_tokens: int = 1,
) -> tuple[Rows, Index]:
    """Like `truncate`, but also return the index of the source row of each new row.

    The ledger counts every change and every dropped row:

        truncated   tokens, under the name of the rule
        dropped     rows, as too_long, too_short, no_trained_tokens, last_exchange_over_max_tokens,
                    header_of_cut_message, answers_cut_off (only the removed part had trained tokens) or no_terminator
        repeated    rows and tokens, if the rule is `windows`
        noted       rows with a truncated answer (answer_cut), and rows that keep the header of a removed message
                    (header_of_cut_message)
    """
    if capacity is not None and capacity < 1:
        raise DataError(f"the maximum row length is {capacity} tokens; expected at least 1")
    if np.any(np.diff(rows.first_segment) != 1):
        raise DataError("a row contains several conversations; truncate before packing")
    too_long = rows.lengths > capacity if capacity is not None else np.zeros(len(rows), dtype=bool)
    trained_before = offsets(np.where(rows.spans["weight"] > 0, rows.spans["length"], 0))
    whole_trained = np.diff(trained_before[rows.first_span[rows.first_segment]])
    if not too_long.any() and whole_trained.all() and np.all(rows.lengths >= min_tokens):
        return rows, np.arange(len(rows), dtype=np.int64)
    cut, answers_cut = _whole(rows), np.zeros((2, len(rows)), dtype=bool)
    if capacity is not None and too_long.any():
        cut, answers_cut = _cut_long(rows, np.flatnonzero(too_long), capacity, rule)

    size = (cut.stop - cut.start).sum(axis=1)
    shortened = size < rows.lengths[cut.source]
    trained = whole_trained[cut.source]
    trained[shortened] = _trained(rows, trained_before, cut.take(np.flatnonzero(shortened)))
    begins_cut, ends_cut = answers_cut
    # For a dropped row, count all of its tokens; for a dropped window, only the tokens in that window.
    counted, counted_trained = size, trained
    if rule != "windows":
        counted, counted_trained = rows.lengths[cut.source], whole_trained[cut.source]
    # Rows that are still too long because the rule does not shorten them.
    over = size > (LONGEST_ROW if capacity is None else capacity)
    keeps_header = np.zeros(len(size), dtype=bool)
    keeps_header[shortened] = _keeps_header(rows, cut.take(np.flatnonzero(shortened)))
    reasons = {
        "too_long": over & (rule == "drop"),
        "too_short": size < min_tokens,
        "no_trained_tokens": (counted_trained == 0) & drop_untrained,
        OVER: over & (rule == "exchanges"),
        HEADER: keeps_header & (rule == "exchanges"),
        "answers_cut_off": (trained == 0) & drop_untrained,
        "no_terminator": ends_cut & require_terminators,
    }
    kept = np.ones(len(size), dtype=bool)
    for reason, applies in reasons.items():
        dropped = applies & kept
        if dropped.any():
            of_rows = {"rows": int(dropped.sum()), "tokens": int(counted[dropped].sum())}
            ledger.add("dropped", reason, **of_rows, trained=int(counted_trained[dropped].sum()))
            kept &= ~dropped
    if lost := int((counted - size)[kept].sum()):
        ledger.add("truncated", rule, tokens=lost, trained=int((whole_trained[cut.source] - trained)[kept].sum()))
    more_rows, more_tokens = len(size) - len(rows), int(size.sum()) - len(rows.ids)
    if rule == "windows" and more_rows:
        ledger.add("repeated", "windows", rows=more_rows, tokens=more_tokens)
    cut_answers = (begins_cut | ends_cut) & kept
    if cut_answers.any():
        ledger.add("noted", "answer_cut", rows=int(cut_answers.sum()), tokens=int(size[cut_answers].sum()))
    if headers := int((keeps_header & kept).sum()):
        ledger.add("noted", HEADER, rows=headers)
    if kept.all() and len(size) == len(rows) and not lost:
        return rows, cut.source
    chosen = cut.take(np.flatnonzero(kept))
    return _gathered(rows, chosen, shortened[kept]), chosen.source


def _gathered(rows: Rows, cut: Truncation, shortened: NDArray[np.bool_]) -> Rows:
    """Return the truncated rows. Long runs of unchanged rows are copied in one step."""
    source = np.where(shortened, -2, cut.source)
    ends = np.flatnonzero(source[1:] != source[:-1] + 1) + 1
    if not len(source) or len(ends) * STRETCH > len(source):
        return gather(rows, _plan(cut))
    changed = gather(rows, _plan(cut.take(np.flatnonzero(shortened))))
    parts, at = [], 0
    for start, stop in pairwise([0, *ends.tolist(), len(source)]):
        if shortened[start]:
            parts.append(changed[at : at + 1])
            at += 1
        else:
            parts.append(rows[source[start] : source[stop - 1] + 1])
    return concat(parts)


def _plan(cut: Truncation) -> GatherPlan:
    count = len(cut.source)
    each = np.arange(count + 1, dtype=np.int64)
    rule = np.tile(np.array([OWN_RULE, Rule.EARLIER_WINDOW, OWN_RULE], dtype=np.uint8), count)
    return GatherPlan(cut.start.ravel(), cut.stop.ravel(), 3 * each, cut.source, each, rule)


def _cut_long(rows: Rows, long: Index, capacity: int, rule: FitRule) -> tuple[Truncation, NDArray[np.bool_]]:
    """Truncate the rows that are longer than `capacity`. For each new row, also return whether it starts inside an
    answer, and whether it ends inside an answer.
    """
    if rule == "error":
        raise _too_long(rows, int(long[0]), capacity)
    few = rows.take(long)
    rules = {"exchanges": _exchanges, "turns": _turns, "tail": _tail, "windows": _windows, "drop": _whole}
    cut = rules[rule](few, capacity)
    # The rules `exchanges` and `drop` never split a message.
    inside = np.zeros((2, len(cut.source)), dtype=bool)
    if rule not in ("exchanges", "drop"):
        inside = np.array(_answers_cut(few, cut))
    shift = (rows.row_start[long] - few.row_start[:-1])[cut.source][:, None]
    others = _whole(rows).take(np.flatnonzero(rows.lengths <= capacity))
    source = np.concatenate([long[cut.source], others.source])
    order = np.argsort(source, kind="stable")
    whole = Truncation(
        source, np.concatenate([cut.start + shift, others.start]), np.concatenate([cut.stop + shift, others.stop])
    )
    return whole.take(order), np.column_stack([inside, np.zeros((2, len(others.source)), dtype=bool)])[:, order]


# The rules.


def _exchanges(rows: Rows, capacity: int) -> Truncation:
    """Keep the head (such as the system turn) and as many complete exchanges from the end as fit. If the last exchange
    does not fit, keep the whole row.

        system | user asst | user asst tool asst | user asst | user      too long
        system | user asst | user asst tool asst | user asst             remove what follows the last trained exchange
        system             | user asst tool asst | user asst             then remove the oldest exchanges
    """
    turn, count = exchanges_of(rows), len(rows)
    row_stop = rows.row_start[1:]
    head = turn.head_stop - rows.row_start[:-1]

    # The last exchange is the one with the last trained token, because later tokens do not affect the loss.
    trained = rows.spans["weight"] > 0
    span_row = np.repeat(np.arange(count), np.diff(rows.first_span[rows.first_segment]))
    last_trained = by_row(np.maximum, np.where(trained, rows.span_start[1:] - 1, -1), span_row, count)
    last_trained = np.where(last_trained < 0, row_stop - 1, last_trained)
    follows = turn.begins & (turn.start > last_trained[turn.row])
    stop = by_row(np.minimum, np.where(follows, turn.start, LONGEST_ROW), turn.row, count, LONGEST_ROW)
    stop = np.minimum(stop, row_stop)
    begins = turn.begins & (turn.start <= last_trained[turn.row])
    fits = begins & (head[turn.row] + stop[turn.row] - turn.start <= capacity)
    start = by_row(np.minimum, np.where(fits, turn.start, LONGEST_ROW), turn.row, count, LONGEST_ROW)
    # If only the head of a row is trained on, keep the head.
    only_head = ~np.isin(np.arange(count), turn.row[begins]) & (head <= capacity)
    start = np.where(only_head, stop, start)
    is_kept = start <= stop
    return _ranges(
        (rows.row_start[:-1], np.where(is_kept, turn.head_stop, rows.row_start[:-1])),
        (np.where(is_kept, start, rows.row_start[:-1]), np.where(is_kept, stop, row_stop)),
    )


def _turns(rows: Rows, capacity: int) -> Truncation:
    """Shorten every row to at most `capacity` tokens, removing whole exchanges first.

        system | user asst | user asst | user asst | user        too long by a little
        system             | user asst | user asst | user        drop the oldest exchange
        system                         | user asst               then drop the turns after the last answer
                                          er asst                then drop tokens from the left

    An exchange is a user turn and everything up to the next user turn. The exchange with the last assistant turn is
    never dropped, only shortened from the left.
    """
    turn, count = turns_of(rows), len(rows)
    row_start, row_stop = rows.row_start[:-1], rows.row_start[1:]
    anchor_start, anchor_stop = np.append(turn.start, 0)[turn.anchor], np.append(turn.stop, 0)[turn.anchor]
    head = turn.head_stop - row_start

    # Step 1: drop the oldest exchanges. The tail starts at the first exchange that makes the row fit, or at the
    # exchange with the last assistant turn.
    exchange = turn.begins_exchange & (turn.start <= anchor_start[turn.row])
    need = row_stop - row_start - capacity
    fits = exchange & (turn.start - turn.head_stop[turn.row] >= need[turn.row])
    never = np.iinfo(np.int64).max
    latest = by_row(np.maximum, np.where(exchange, turn.start, -1), turn.row, count)
    earliest = by_row(np.minimum, np.where(fits, turn.start, never), turn.row, count, never)
    tail_start = np.where(latest < 0, turn.head_stop, np.minimum(earliest, latest))
    # Step 2: if the row is still too long, drop turns after the last assistant turn, starting with the last turn of the
    # row.
    can_end = (turn.stop >= anchor_stop[turn.row]) & (head[turn.row] + turn.stop - tail_start[turn.row] <= capacity)
    tail_stop = np.maximum(by_row(np.maximum, np.where(can_end, turn.stop, -1), turn.row, count), anchor_stop)
    tail_stop = np.where(row_stop > row_start, tail_stop, row_stop)
    # Step 3: if the row is still too long, drop tokens from the left.
    excess = np.maximum(head + tail_stop - tail_start - capacity, 0)
    head_start = row_start + np.minimum(excess, head)
    return _ranges((head_start, turn.head_stop), (tail_start + np.maximum(excess - head, 0), tail_stop))


def _tail(rows: Rows, capacity: int) -> Truncation:
    start, stop = rows.row_start[:-1], rows.row_start[1:]
    return _ranges((start, start), (np.maximum(start, stop - capacity), stop))


def _whole(rows: Rows, capacity: int = 0) -> Truncation:
    start, stop = rows.row_start[:-1], rows.row_start[1:]
    return _ranges((start, start), (start, stop))


def _ranges(head: tuple[Index, Index], tail: tuple[Index, Index]) -> Truncation:
    """Return one new row per source row, made of the token ranges `head` and `tail` of the source row."""
    start, stop = (np.column_stack([head[end], tail[0], tail[end]]) for end in (0, 1))
    return Truncation(np.arange(len(start)), start, stop)


def _windows(rows: Rows, capacity: int) -> Truncation:
    """Split each row into several rows, called windows; each trained token is trained on in exactly one window.

        row         system | user asst | user asst | user asst
        window 1    system | user asst                            trained: the first exchange
        window 2    system |      asst | user asst                trained: the second exchange
        window 3    system                  r asst | user asst    trained: the third exchange

    The other tokens of a window are untrained context: the system turn, and as many of the preceding tokens as fit.

    A window contains as many complete exchanges as fit. An exchange longer than a window is split: the first part fills
    a window, and each further window reserves half of its space for the preceding tokens. A system turn longer than
    half a window is not repeated.
    """
    turn = turns_of(rows)
    boundaries = [0, *turn.start[turn.begins_exchange].tolist()]
    source: list[int] = []
    ranges: list[tuple[int, int, int, int, int, int]] = []
    row_ranges = pairwise(rows.row_start.tolist())
    for row, ((start, stop), head) in enumerate(zip(row_ranges, turn.head_stop.tolist(), strict=True)):
        if stop - start <= capacity:
            source.append(row)
            ranges.append((start, start, start, start, start, stop))
            continue
        first_exchange = head
        if 2 * (head - start) > capacity:
            head = start
        room = capacity - (head - start)
        at = head
        for until in _window_ends(head, stop, boundaries, room, first_exchange):
            source.append(row)
            ranges.append((start, head, max(head, until - room), at, at, until))
            at = until
    table = np.array(ranges, dtype=np.int64).reshape(-1, 3, 2)
    return Truncation(np.array(source, dtype=np.int64), table[:, :, 0], table[:, :, 1])


def _window_ends(at: int, stop: int, boundaries: list[int], room: int, first_exchange: int) -> list[int]:
    """Return the positions at which the trained tokens of the windows end. `boundaries` contains the positions at which
    exchanges start.
    """
    ends = []
    whole = True
    while at < stop:
        reach = at + (room if whole else max(1, room // 2))
        boundary = stop if reach >= stop else boundaries[bisect_right(boundaries, reach) - 1]
        # A window that ends where the first exchange starts would not contain any exchange.
        whole = boundary > max(at, first_exchange)
        at = boundary if whole else min(reach, stop)
        ends.append(at)
    return ends


def _too_long(rows: Rows, row: int, capacity: int) -> RecordError:
    origin = rows.origins[rows.first_segment[row]]
    file = "" if origin["file"] == NO_FILE else rows.files[origin["file"]].path
    return RecordError(
        f"the row has {rows.lengths[row]:,} tokens, but at most {capacity:,} are allowed",
        f"raise the limit or use another rule: {', '.join(RULES[:-1])}",
        kind="too_long",
    ).at(file, int(origin["line"]))


# Effects of truncation on trained tokens.


def _trained(rows: Rows, before: Index, cut: Truncation) -> Index:
    """Count the trained tokens of each new row; `before` is the number of trained tokens before each span."""
    trained = rows.spans["weight"] > 0
    if not len(trained):
        return np.zeros(len(cut.source), dtype=np.int64)

    def until(token: Index) -> Index:
        span = np.minimum(np.searchsorted(rows.span_start, token, side="right") - 1, len(trained) - 1)
        out: Index = before[span] + np.where(trained[span], token - rows.span_start[span], 0)
        return out

    own = [0, 2]
    counts: Index = (until(cut.stop[:, own]) - until(cut.start[:, own])).sum(axis=1)
    return counts


def _answers_cut(rows: Rows, cut: Truncation) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return whether each new row starts inside an answer, and whether it ends inside an answer."""
    start, stop = cut.start, cut.stop
    context = start[:, 1] < stop[:, 1]
    first = np.where(context, start[:, 1], start[:, 2])
    head_cut = (start[:, 0] < stop[:, 0]) & _inside_answer(rows, start[:, 0])
    begins = (first < stop[:, 2]) & _inside_answer(rows, first)
    ends = (start[:, 2] < stop[:, 2]) & _inside_answer(rows, stop[:, 2])
    return head_cut | begins, ends


def _keeps_header(rows: Rows, cut: Truncation) -> NDArray[np.bool_]:
    """For each new row, return whether it keeps the header of a message whose content was removed.

    Some templates write tools or the system text into the first user message, after its header:

        row        user header, tools | question | assistant … | user header, question | assistant …
        new row    user header, tools                          | user header, question | assistant …
    """
    head_stop, start = cut.stop[:, 0], cut.start[:, 2]
    leaves_out = (cut.start[:, 0] < head_stop) & (head_stop < start) & (start < cut.stop[:, 2])
    after_head, first = (
        np.searchsorted(rows.span_start, np.where(leaves_out, at, 0), side="right") - 1 for at in (head_stop, start)
    )
    part = rows.spans["part"]
    keeps: NDArray[np.bool_] = leaves_out & (part[after_head] == Part.CONTENT) & (part[first] == Part.OPEN)
    return keeps


def _inside_answer(rows: Rows, token: Index) -> NDArray[np.bool_]:
    """For each token, return whether a cut before it would split the trained tokens of one message."""
    if not len(rows.spans):
        return np.zeros(len(token), dtype=bool)
    inner = (token > 0) & (token < len(rows.ids)) & ~np.isin(token, rows.row_start)
    right, left = (
        np.searchsorted(rows.span_start, np.where(inner, token - back, 0), side="right") - 1 for back in (0, 1)
    )
    weight, message = rows.spans["weight"], rows.spans["message"]
    inside: NDArray[np.bool_] = inner & (weight[left] > 0) & (weight[right] > 0) & (message[left] == message[right])
    return inside
