"""Truncation: rows that are too long are cut by a rule that is chosen by name.

    turns     whole exchanges go, oldest first; the system turn and the last answer stay
    tail      the last tokens stay
    windows   the row becomes several, which train each token once
    drop      the row goes
    error     the first such row stops everything

A rule is a plan over spans: it never looks at a token. What is cut or dropped is counted with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError, RecordError
from chatmill.fit.gather import OWN_RULE, GatherPlan, gather
from chatmill.fit.turns import first_of, last_of, turns_of
from chatmill.fit.windows import windows
from chatmill.ledger import Ledger
from chatmill.rows import NO_FILE, Index, Rows, Rule, concat

FitRule = Literal["turns", "tail", "windows", "drop", "error"]
RULES: tuple[FitRule, ...] = get_args(FitRule)
STRETCH = 16
"""Rows that stand together, on average, from which on copying stretches is quicker than copying rows."""


@dataclass(frozen=True)
class Truncation:
    """New rows, each made of three ranges of one source row, any of them empty: head, context, and what is trained."""

    source: Index
    start: Index
    stop: Index
    """(new rows, 3)"""

    def take(self, numbers: Index) -> Truncation:
        return Truncation(self.source[numbers], self.start[numbers], self.stop[numbers])


def truncate(
    rows: Rows,
    capacity: int | None,
    rule: FitRule = "turns",
    *,
    ledger: Ledger,
    drop_untrained: bool = True,
    require_terminators: bool = False,
    min_tokens: int = 1,
) -> Rows:
    """Rows of at most `capacity` tokens (None: nothing is cut), without those that could teach nothing."""
    return truncate_from(
        rows,
        capacity,
        rule,
        ledger=ledger,
        drop_untrained=drop_untrained,
        require_terminators=require_terminators,
        min_tokens=min_tokens,
    )[0]


def truncate_from(
    rows: Rows,
    capacity: int | None,
    rule: FitRule,
    *,
    ledger: Ledger,
    drop_untrained: bool,
    require_terminators: bool,
    min_tokens: int = 1,
) -> tuple[Rows, Index]:
    """What `truncate` gives, and the row that each of the new ones was made from.

    Counted: tokens `truncated` under the rule's name; rows `dropped` as too_long, too_short, no_trained_tokens,
    answers_cut_off (what was left had none, the row had) or no_terminator; rows and tokens `repeated` by windows; and,
    `noted` as answer_cut, answers that lost a part.
    """
    if capacity is not None and capacity < 1:
        raise DataError(f"rows of {capacity} tokens cannot be; give at least 1")
    if np.any(np.diff(rows.first_segment) != 1):
        raise DataError("a row holds several conversations; truncate before packing")
    too_long = rows.lengths > capacity if capacity is not None else np.zeros(len(rows), dtype=bool)
    whole_trained = _trained_in_rows(rows)
    if not too_long.any() and whole_trained.all() and np.all(rows.lengths >= min_tokens):
        return rows, np.arange(len(rows), dtype=np.int64)
    cut, hurt = _whole(rows), np.zeros((2, len(rows)), dtype=bool)
    if capacity is not None and too_long.any():
        cut, hurt = _cut_long(rows, np.flatnonzero(too_long), capacity, rule)

    size = (cut.stop - cut.start).sum(axis=1)
    shortened = size < rows.lengths[cut.source]
    trained = whole_trained[cut.source]
    trained[shortened] = _trained(rows, cut.take(np.flatnonzero(shortened)))
    begins_cut, ends_cut = hurt
    # A row that goes is counted as it was; a window as it is, for the others hold the rest.
    counted, counted_trained = size, trained
    if rule != "windows":
        counted, counted_trained = rows.lengths[cut.source], whole_trained[cut.source]
    reasons = {
        "too_long": too_long[cut.source] if rule == "drop" else np.zeros(len(size), dtype=bool),
        "too_short": size < min_tokens,
        "no_trained_tokens": (counted_trained == 0) & drop_untrained,
        "answers_cut_off": (trained == 0) & drop_untrained,
        "no_terminator": ends_cut & require_terminators,
    }
    kept = np.ones(len(size), dtype=bool)
    for reason, found in reasons.items():
        found &= kept
        if found.any():
            of_rows = {"rows": int(found.sum()), "tokens": int(counted[found].sum())}
            ledger.add("dropped", reason, **of_rows, trained=int(counted_trained[found].sum()))
            kept &= ~found
    lost = int((counted - size)[kept].sum())
    if lost:
        ledger.add("truncated", rule, tokens=lost, trained=int((whole_trained[cut.source] - trained)[kept].sum()))
    more_rows, more_tokens = len(size) - len(rows), int(size.sum()) - len(rows.ids)
    if rule == "windows" and more_rows:
        ledger.add("repeated", "windows", rows=more_rows, tokens=more_tokens)
    cut_answers = (begins_cut | ends_cut) & kept
    if cut_answers.any():
        ledger.add("noted", "answer_cut", rows=int(cut_answers.sum()), tokens=int(size[cut_answers].sum()))
    if kept.all() and len(size) == len(rows) and not lost:
        return rows, cut.source
    chosen = cut.take(np.flatnonzero(kept))
    return _gathered(rows, chosen, shortened[kept]), chosen.source


def _gathered(rows: Rows, cut: Truncation, shortened: NDArray[np.bool_]) -> Rows:
    """The new rows. Where few are shortened or gone, the others stay together and are copied as they stand."""
    source = np.where(shortened, -2, cut.source)
    ends = np.flatnonzero(source[1:] != source[:-1] + 1) + 1
    if not len(source) or len(ends) * STRETCH > len(source):
        return gather(rows, _plan(cut))
    made = gather(rows, _plan(cut.take(np.flatnonzero(shortened))))
    parts, at = [], 0
    for start, stop in pairwise([0, *ends.tolist(), len(source)]):
        if shortened[start]:
            parts.append(made[at : at + 1])
            at += 1
        else:
            parts.append(rows[source[start] : source[stop - 1] + 1])
    return concat(parts)


def _cut_long(rows: Rows, long: Index, capacity: int, rule: FitRule) -> tuple[Truncation, NDArray[np.bool_]]:
    """The cut of all rows, of which only the long ones are looked at, and where it begins or ends inside an answer."""
    few = rows.take(long)
    cut = _choose(few, capacity, rule)
    hurt = np.array(_answers_cut(few, cut))
    shift = (rows.row_start[long] - few.row_start[:-1])[cut.source][:, None]
    others = _whole(rows).take(np.flatnonzero(rows.lengths <= capacity))
    source = np.concatenate([long[cut.source], others.source])
    order = np.argsort(source, kind="stable")
    whole = Truncation(
        source, np.concatenate([cut.start + shift, others.start]), np.concatenate([cut.stop + shift, others.stop])
    )
    return whole.take(order), np.column_stack([hurt, np.zeros((2, len(others.source)), dtype=bool)])[:, order]


def turns(rows: Rows, capacity: int) -> GatherPlan:
    """Cut every row to at most `capacity` tokens, by exchanges first.

        system | user asst | user asst | user asst | user        too long by a little
        system             | user asst | user asst | user        the oldest exchange goes
        system                         | user asst               then what follows the last answer
                                          er asst                then tokens from the very left

    An exchange is a user turn and all that follows it up to the next one. The one that holds the last
    assistant turn is never dropped, so the end of that turn is always there to be learned.
    """
    return _plan(_turns(rows, capacity))


def _turns(rows: Rows, capacity: int) -> Truncation:
    turn, count = turns_of(rows), len(rows)
    row_start, row_stop = rows.row_start[:-1], rows.row_start[1:]
    anchor_start, anchor_stop = np.append(turn.start, 0)[turn.anchor], np.append(turn.stop, 0)[turn.anchor]
    head = turn.head_stop - row_start

    # Oldest exchanges: the tail begins at the first exchange from which on all fits, at the latest the anchor's.
    exchange = turn.begins_exchange & (turn.start <= anchor_start[turn.row])
    need = row_stop - row_start - capacity
    fits = exchange & (turn.start - turn.head_stop[turn.row] >= need[turn.row])
    never = np.iinfo(np.int64).max
    latest = last_of(np.where(exchange, turn.start, -1), turn.row, count)
    earliest = first_of(np.where(fits, turn.start, never), turn.row, count, never)
    tail_start = np.where(latest < 0, turn.head_stop, np.minimum(earliest, latest))
    # Turns after the anchor, the last one first.
    ends = (turn.stop >= anchor_stop[turn.row]) & (head[turn.row] + turn.stop - tail_start[turn.row] <= capacity)
    tail_stop = np.maximum(last_of(np.where(ends, turn.stop, -1), turn.row, count), anchor_stop)
    tail_stop = np.where(row_stop > row_start, tail_stop, row_stop)
    # Tokens from the very left.
    excess = np.maximum(head + tail_stop - tail_start - capacity, 0)
    head_start = row_start + np.minimum(excess, head)
    tail_start = tail_start + np.maximum(excess - head, 0)
    return _ranges(np.arange(count), (head_start, turn.head_stop), (tail_start, tail_stop))


def _tail(rows: Rows, capacity: int) -> Truncation:
    start, stop = rows.row_start[:-1], rows.row_start[1:]
    return _ranges(np.arange(len(rows)), (start, start), (np.maximum(start, stop - capacity), stop))


def _windows(rows: Rows, capacity: int) -> Truncation:
    return Truncation(*windows(rows, capacity))


def _error(rows: Rows, capacity: int) -> Truncation:
    row = int(np.flatnonzero(rows.lengths > capacity)[0])
    origin = rows.origins[rows.first_segment[row]]
    file = "" if origin["file"] == NO_FILE else rows.files[origin["file"]].path
    raise RecordError(
        f"the row has {rows.lengths[row]:,} tokens, more than the {capacity:,} allowed",
        f"allow more, or choose another rule: {', '.join(RULES[:-1])}",
        kind="too_long",
    ).at(file, int(origin["line"]))


def _whole(rows: Rows, capacity: int = 0) -> Truncation:
    start, stop = rows.row_start[:-1], rows.row_start[1:]
    return _ranges(np.arange(len(rows)), (start, start), (start, stop))


def _choose(rows: Rows, capacity: int, rule: FitRule) -> Truncation:
    cuts: dict[str, Callable[[Rows, int], Truncation]] = {
        "turns": _turns,
        "tail": _tail,
        "windows": _windows,
        "drop": _whole,
        "error": _error,
    }
    return cuts[rule](rows, capacity)


def _ranges(source: Index, head: tuple[Index, Index], tail: tuple[Index, Index]) -> Truncation:
    empty = tail[0]
    return Truncation(source, np.column_stack([head[0], empty, tail[0]]), np.column_stack([head[1], empty, tail[1]]))


def _plan(cut: Truncation) -> GatherPlan:
    count = len(cut.source)
    rule = np.tile(np.array([OWN_RULE, Rule.EARLIER_WINDOW, OWN_RULE], dtype=np.uint8), count)
    return GatherPlan(
        cut.start.ravel(),
        cut.stop.ravel(),
        np.arange(0, 3 * count + 1, 3, dtype=np.int64),
        cut.source,
        np.arange(count + 1, dtype=np.int64),
        rule,
    )


def _trained_in_rows(rows: Rows) -> Index:
    """How many trained tokens each row has."""
    trained = np.where(rows.spans["weight"] > 0, rows.spans["length"], 0)
    first = rows.first_span[rows.first_segment]
    out = np.zeros(len(rows), dtype=np.int64)
    filled = np.diff(first) > 0
    if filled.any():
        out[filled] = np.add.reduceat(trained, first[:-1][filled], dtype=np.int64)
    return out


def _trained(rows: Rows, cut: Truncation) -> Index:
    """How many trained tokens each new row has."""
    trained = rows.spans["weight"] > 0
    before = np.append(0, np.cumsum(np.where(trained, rows.spans["length"], 0)))

    def until(token: Index) -> Index:
        span = np.minimum(np.searchsorted(rows.span_start, token, side="right") - 1, len(trained) - 1)
        out: Index = before[span] + np.where(trained[span], token - rows.span_start[span], 0)
        return out

    if not len(trained):
        return np.zeros(len(cut.source), dtype=np.int64)
    own = [0, 2]
    counts: Index = (until(cut.stop[:, own]) - until(cut.start[:, own])).sum(axis=1)
    return counts


def _answers_cut(rows: Rows, cut: Truncation) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether a new row begins inside an answer, or ends inside one and so lacks its terminator."""
    start, stop = cut.start, cut.stop
    # The trained range is what counts; the head and the context before it are whole, or are not trained.
    context = start[:, 1] < stop[:, 1]
    first = np.where(context, start[:, 1], start[:, 2])
    head_cut = (start[:, 0] < stop[:, 0]) & _inside_answer(rows, start[:, 0])
    begins = (first < stop[:, 2]) & _inside_answer(rows, first)
    ends = (start[:, 2] < stop[:, 2]) & _inside_answer(rows, stop[:, 2])
    return head_cut | begins, ends


def _inside_answer(rows: Rows, token: Index) -> NDArray[np.bool_]:
    """Whether a cut before this token parts trained tokens of one message."""
    if not len(rows.spans):
        return np.zeros(len(token), dtype=bool)
    inner = (token > 0) & (token < len(rows.ids)) & ~np.isin(token, rows.row_start)
    right = np.searchsorted(rows.span_start, np.where(inner, token, 0), side="right") - 1
    left = np.searchsorted(rows.span_start, np.where(inner, token - 1, 0), side="right") - 1
    weight, message = rows.spans["weight"], rows.spans["message"]
    found: NDArray[np.bool_] = inner & (weight[left] > 0) & (weight[right] > 0) & (message[left] == message[right])
    return found
