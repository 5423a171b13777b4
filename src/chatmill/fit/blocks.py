"""Split concatenated conversations into blocks of equal size, and reopen a split user turn in the next block.

    stream    S s E U u E A a E U v w E A b E EOS …
    blocks    S s E U u E A a E U v | S s E U w E A b E EOS …
                                      ~~~~~~~ injected: the system turn and the user marker

Blocks are planned one after the other, because the start of a block determines how many tokens are injected, and thus
where the next block starts. All other steps are vectorized.

If a block starts with EOS or with the marker token of a turn, no turn is reopened in the block, even if the previous
turn was not closed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.answers import TurnStates, answer_rules, masked_spans, note_untrained, turn_states
from chatmill.errors import DataError
from chatmill.fit.gather_plan import OWN_RULE, GatherPlan, gather
from chatmill.fit.turns import begins_segment, rows_from_ids
from chatmill.ledger import Bucket, Ledger
from chatmill.rows import EMPTY, Index, Part, Role, Rows, Rule, Table, concat, ragged_index, rows_from_mask

Remainder = Literal["pad", "drop"]
Flags = NDArray[np.bool_]


def pack_chat_blocks(
    documents: Sequence[Sequence[int]],
    *,
    block_size: int,
    system_id: int,
    user_id: int,
    assistant_id: int,
    end_id: int,
    eos_id: int,
    remainder: Remainder = "pad",
) -> tuple[list[list[int]], list[list[bool]]]:
    """Split documents of token ids into blocks of `block_size` ids; return blocks and loss masks. EOS is appended to
    each document.

    >>> markers = {"system_id": 1, "user_id": 2, "assistant_id": 3, "end_id": 4, "eos_id": 5}
    >>> blocks, masks = pack_chat_blocks([[2, 10, 4, 3, 11, 4]], block_size=8, **markers)
    >>> blocks, [[int(bit) for bit in mask] for mask in masks]
    ([[2, 10, 4, 3, 11, 4, 5, 5]], [[0, 0, 0, 1, 1, 1, 0, 0]])
    """
    openers = {Role.SYSTEM: system_id, Role.USER: user_id, Role.ASSISTANT: assistant_id}
    rows = rows_from_ids(documents, openers=openers, close=end_id, eos=eos_id)
    packed = cut_blocks(rows, block_size, remainder=remainder)
    shape = (len(packed), block_size)
    return packed.ids.reshape(shape).tolist(), packed.mask().reshape(shape).tolist()


def cut_blocks(rows: Rows, block_size: int, *, remainder: Remainder = "pad", ledger: Ledger | None = None) -> Rows:
    """Split rows into blocks of exactly `block_size` tokens; each segment of a block is a conversation or part of one.

    Each row is a document: one or more conversations that each end with EOS. Every turn must start with a marker token.

    A block that starts inside a user turn or tool result begins with the conversation's last complete system turn, if
    that turn fits, and the user marker. If a user turn does not end in the block that reopens it, the remaining tokens
    of its document are dropped. The last block is padded with EOS or dropped.

    The loss mask includes an answer only if the block contains the whole answer, the last user turn before the answer
    is complete in the block, and every earlier answer in the block is closed. Turns before an EOS do not affect the
    answers after that EOS.
    """
    return _blocks(rows, block_size, 0, last=True, remainder=remainder, ledger=ledger)[0]


def stream_blocks(
    chunks: Iterable[Rows], block_size: int, *, remainder: Remainder = "pad", ledger: Ledger | None = None
) -> Iterator[Rows]:
    """Yield the blocks that `cut_blocks` would return for the concatenated chunks, without storing all chunks."""
    carry, at = EMPTY, 0
    for chunk in chunks:
        rows = concat([carry, chunk])
        blocks, stop = _blocks(rows, block_size, at, last=False, remainder=remainder, ledger=ledger)
        if len(blocks):
            yield blocks
        row = int(np.searchsorted(rows.row_start, stop, side="right")) - 1
        carry, at = rows[row:], stop - int(rows.row_start[row])
    blocks, _ = _blocks(carry, block_size, at, last=True, remainder=remainder, ledger=ledger)
    if len(blocks):
        yield blocks


def _blocks(
    rows: Rows, block_size: int, at: int, *, last: bool, remainder: Remainder, ledger: Ledger | None
) -> tuple[Rows, int]:
    """Split the tokens from position `at` on into blocks; return the blocks, and the position where they end."""
    if block_size < 1:
        raise DataError(f"block_size is {block_size}; expected at least 1")
    if remainder not in ("pad", "drop"):
        raise DataError(f'remainder is "{remainder}"; expected pad or drop')
    if len(rows.ids) == at:
        return replace(EMPTY, files=rows.files), at
    turns = _turns(rows)
    cuts, stop = _cut(turns, block_size, at, last=last)
    missing = block_size - int(cuts.length[-1]) if len(cuts.length) else 0
    kept = _Cuts(*(column[:-1] for column in cuts)) if missing and remainder == "drop" else cuts
    padding = missing if remainder == "pad" else 0
    packed = replace(EMPTY, files=rows.files)
    if len(kept.start):
        weighed = replace(rows, spans=_weigh(rows, turns.states, cuts))
        packed = gather(weighed, _plan(rows, turns.states, kept, padding), _eos_padding(int(rows.ids[-1]), padding))
    if ledger is not None:
        _count(ledger, rows, cuts, kept, packed, at, stop)
    return packed, stop


class _BlockTurns(NamedTuple):
    states: TurnStates
    row_stop: Index
    """The position at which the turn's document ends."""
    system: Index
    """Index of the last complete system turn in the conversation up to this turn, or -1."""


def _turns(rows: Rows) -> _BlockTurns:
    part, begins, turns = rows.spans["part"], begins_segment(rows), turn_states(rows)
    row_stop = rows.row_start[np.searchsorted(rows.row_start, turns.start, side="right")]
    such = 'use a format such as "post-training"'
    if np.any(part[np.append(begins[1:], True)] != Part.EOS):
        raise DataError(f"a conversation does not end with EOS; {such}, which adds EOS")
    others = rows.ids[turns.start[(turns.role == Role.SYSTEM) | (turns.role == Role.ASSISTANT)]]
    if len(shared := np.intersect1d(rows.ids[turns.start[turns.role == Role.USER]], others)):
        raise DataError(f"token {shared[0]} opens both user turns and other turns; {such}, whose markers are distinct")
    return _BlockTurns(turns, row_stop, turns.latest((turns.role == Role.SYSTEM) & turns.closed))


class _Cuts(NamedTuple):
    """For each block, its token range [start, stop), and the indices of the system turn and the user turn that are
    injected before it (-1 for none).
    """

    start: Index
    stop: Index
    system: Index
    user: Index
    length: Index
    """Number of tokens in the block without padding."""


def _cut(turns: _BlockTurns, block_size: int, at: int, *, last: bool) -> tuple[_Cuts, int]:
    """Return the bounds of the blocks from token `at` on, and the position where the last block ends.

    A partial final block is allowed only if `last` is true.
    """
    states = turns.states
    users = np.flatnonzero(states.role == Role.USER)
    system = turns.system[users]
    system_length = np.where(system >= 0, states.stop[system] - states.start[system], 0)
    # The user marker and at least one more token must fit; otherwise the next block would start at the same position.
    system[system_length + 2 > block_size] = -1
    injected = 1 + np.where(system >= 0, system_length, 0)

    # Use lists, because indexing single elements of a numpy array is slow.
    user_start, user_stop = states.start[users].tolist(), states.stop[users].tolist()
    row_stop, room = turns.row_stop[users].tolist(), (block_size - injected).tolist()
    taken: list[tuple[int, int, int]] = []
    end = int(states.stop[-1])
    while at < end:
        user = bisect_left(user_start, at) - 1
        if user >= 0 and user_stop[user] <= at:
            user = -1
        if not last and at + (block_size if user < 0 else room[user]) > end:
            break
        if user < 0:
            taken.append((at, min(at + block_size, end), -1))
            at = taken[-1][1]
        else:
            stop = min(at + room[user], end)
            if stop > at:
                taken.append((at, stop, user))
            at = stop if user_stop[user] <= stop else row_stop[user]

    starts, stops, cut = np.array(taken, dtype=np.int64).reshape(-1, 3).T
    # For a block that does not start inside a user turn, `cut` is -1, which selects the value that np.append adds.
    system, users, injected = np.append(system, -1)[cut], np.append(users, -1)[cut], np.append(injected, 0)[cut]
    return _Cuts(starts, stops, system, users, stops - starts + injected), at


def _weigh(rows: Rows, turns: TurnStates, cuts: _Cuts) -> Table:
    """Return the spans, with weight 0 for each answer that is not trained on in its block.

    One weight per span is enough: blocks do not overlap, so an answer is complete in at most one of them.
    """
    block = np.searchsorted(cuts.start, turns.start, side="right") - 1
    # If a turn starts before these blocks, its weights were set when the earlier blocks were made.
    stop = np.where(block >= 0, cuts.stop[block], 0)
    return masked_spans(rows, turns, answer_rules(rows, turns, cuts.start[block], stop))


def _plan(rows: Rows, turns: TurnStates, cuts: _Cuts, padding: int) -> GatherPlan:
    """Plan the tokens of each block: an optional system turn, an optional user marker, then pieces of conversations."""
    block, segment, start, stop = _pieces(rows, cuts.start, cuts.stop)
    count, first = len(cuts.start), np.searchsorted(block, np.arange(len(cuts.start) + 1))
    # Reserve two slots before the pieces of each block, for the system turn and the user marker.
    place = np.arange(len(block)) + 2 * (block + 1)
    system, user = first[:-1] + 2 * np.arange(count), first[:-1] + 2 * np.arange(count) + 1
    piece_start, piece_stop = np.zeros((2, len(block) + 2 * count), dtype=np.int64)
    piece_start[place], piece_stop[place] = start, stop
    piece_start[system], piece_stop[system] = turns.start[cuts.system], turns.stop[cuts.system]
    piece_start[user], piece_stop[user] = turns.start[cuts.user], turns.start[cuts.user] + 1
    piece_stop[system[cuts.system < 0]] = piece_stop[user[cuts.user < 0]] = 0
    rule = np.full(len(piece_start), OWN_RULE, dtype=np.uint8)
    rule[system] = rule[user] = Rule.INJECTED
    first_piece = place.copy()
    first_piece[first[:-1]] -= 2
    if padding:
        end = len(rows.ids)
        first[-1] += 1
        first_piece, segment = np.append(first_piece, len(piece_start)), np.append(segment, -1)
        piece_start, piece_stop = np.append(piece_start, end), np.append(piece_stop, end + padding)
        rule = np.append(rule, np.uint8(OWN_RULE))
    return GatherPlan(piece_start, piece_stop, np.append(first_piece, len(piece_start)), segment, first, rule)


def _pieces(rows: Rows, start: Index, stop: Index) -> tuple[Index, Index, Index, Index]:
    """Split token ranges at conversation boundaries; return the range index, segment, start and stop of each piece."""
    filled = np.flatnonzero(np.diff(rows.segment_start))
    border = np.append(rows.segment_start[filled], len(rows.ids))
    first = np.searchsorted(border, start, side="right") - 1
    count = np.searchsorted(border, stop) - first
    number, of_range = ragged_index(first, count), np.repeat(np.arange(len(start)), count)
    start, stop = np.maximum(border[number], start[of_range]), np.minimum(border[number + 1], stop[of_range])
    return of_range, filled[number], start, stop


def _eos_padding(eos: int, length: int) -> Rows:
    row = rows_from_mask(np.full(length, eos, dtype=np.uint32), np.zeros(length), [length])
    row.spans["part"], row.spans["rule"] = Part.PAD, Rule.PAD
    return row


def _count(ledger: Ledger, rows: Rows, cuts: _Cuts, kept: _Cuts, packed: Rows, at: int, end: int) -> None:
    """Count in the ledger the tokens that are injected, added as padding, omitted, or excluded from the loss.

    A conversation that is split into three blocks becomes three rows; the ledger counts two of the rows as repeated,
    with 0 tokens.
    """
    rule, length = packed.spans["rule"], packed.spans["length"]
    added: tuple[tuple[Bucket, Rule], ...] = (("injected", Rule.INJECTED), ("padding", Rule.PAD))
    for bucket, code in added:
        if np.any(chosen := rule == code):
            ledger.add(bucket, tokens=int(length[chosen].sum()))
    note_untrained(packed, ledger)
    _, pieces, _, _ = _pieces(rows, kept.start, kept.stop)
    # A conversation that started in an earlier block already has a row in that block.
    entered = int(np.searchsorted(rows.segment_start, at, side="right")) - 1
    before = [entered] if at > rows.segment_start[entered] else []
    stored = np.unique(np.concatenate([np.array(before, dtype=np.int64), pieces]))
    if again := len(pieces) + len(before) - len(stored):
        ledger.add("repeated", "goes_on_in_next_block", rows=again)

    if not len(cuts.start):
        # If there are no blocks, create an empty block, and count all tokens as omitted after that block.
        cuts = _Cuts(*(np.array([value], dtype=np.int64) for value in (at, at, -1, -1, 0)))
        kept = cuts
    next_start = np.append(cuts.start[1:], end)
    gap = next_start > cuts.stop
    not_kept = slice(len(kept.start), None)
    for reason, start, stop in (
        ("user_span_over_block", cuts.stop[gap], next_start[gap]),
        ("remainder", cuts.start[not_kept], cuts.stop[not_kept]),
    ):
        _, segment, start, stop = _pieces(rows, start, stop)
        each = np.arange(len(segment) + 1)
        left_out = gather(rows, GatherPlan(start, stop, each, segment, each))
        # Count a conversation as a dropped row if none of its tokens are stored. Count the missing tokens of other
        # conversations as dropped if they are in the dropped last block, and otherwise as truncated.
        whole = ~np.isin(segment, stored)
        dropped = whole | (reason == "remainder")
        sides: tuple[tuple[Bucket, Flags], ...] = (("dropped", dropped), ("truncated", ~dropped))
        for bucket, chosen in sides:
            gone = left_out.take(np.flatnonzero(chosen))
            if len(gone):
                trained = int(gone.mask().sum())
                ledger.add(bucket, reason, rows=int(whole[chosen].sum()), tokens=len(gone.ids), trained=trained)
