"""Find the token layouts of conversations that are stored in columns.

Conversations with the same sequence of roles share a layout, so few of them are converted to `Record`s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import RecordError
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.encode import RECORD_FIELDS, LaidOut, LaidOutBatch, laid_out_record
from chatmill.format.template.trace_cache import CachedTrace, ShapeKey
from chatmill.records import ROLES, ChatColumns, Record
from chatmill.records.record import new_message, new_record
from chatmill.tokenizer.find import byte_pairs


@dataclass(frozen=True, eq=False)
class LaidOutColumns(ChatColumns):
    """Conversations that are stored in columns, with the token layout of each conversation."""

    laid_out: LaidOutBatch


class RefusedRecord(Record, frozen=True, kw_only=True):
    """A record that cannot be rendered, with the reason."""

    fault: Any
    """A `RecordError`."""


class ColumnSearch:
    """Finds control tokens in conversations that are stored in columns."""

    def __init__(self, tokens: ControlTokens) -> None:
        self._search = tokens.pattern.search
        self._beginnings: dict[int, NDArray[np.bool_]] = {}
        """For each first byte of a control token, whether each byte value can be the second byte."""
        for token in map(str.encode, filter(None, tokens.ids)):
            is_second = self._beginnings.setdefault(token[0], np.zeros(256, dtype=bool))
            is_second[token[1] if len(token) > 1 else slice(None)] = True

    def rows(self, columns: ChatColumns) -> set[int]:
        """Return the indices of the conversations whose texts contain a control token."""
        data, start, stop = columns.data, columns.start, columns.stop
        places = [np.empty(0, dtype=np.int64)]
        places += [byte_pairs(data, first, is_second) for first, is_second in self._beginnings.items()]
        messages = np.unique(np.searchsorted(start, np.concatenate(places), side="right") - 1)
        holding = [at for at in messages.tolist() if at >= 0 and self._search(data[start[at] : stop[at]].decode())]
        return {*(np.searchsorted(columns.first_message, holding, side="right") - 1).tolist()}


def conversation(columns: ChatColumns, row: int, texts: Sequence[str]) -> Record:
    """Return one conversation as a record. The record has no id, because columns do not store ids."""
    first, stop = columns.first_message[row : row + 2].tolist()
    roles = columns.roles[first:stop].tolist()
    messages = [new_message(ROLES[role], text) for role, text in zip(roles, texts, strict=True)]
    return new_record(messages, None, (), columns.source, columns.file, columns.line + row)


def lay_out_columns(
    columns: ChatColumns,
    holding: set[int],
    *,
    plain: Callable[[ShapeKey], CachedTrace | None],
    confirm: Callable[[CachedTrace, Sequence[str], Callable[[], Record]], None],
    lay_out: Callable[[ShapeKey, list[str], Callable[[], Record]], LaidOut],
) -> ChatColumns | list[Record]:
    """Find the token layout of each conversation; return columns, or a list of records if a conversation is rejected.

    If a conversation is rejected, only the records before it have layouts. `holding` contains the indices of the
    conversations whose texts contain control tokens. `plain` returns the cached trace for a sequence of roles,
    `confirm` compares a trace with the template, and `lay_out` returns the layout of one conversation.
    """
    has_empty = columns.start == columns.stop
    odd = holding | {*(np.searchsorted(columns.first_message, np.flatnonzero(has_empty), side="right") - 1).tolist()}
    roles, first_message = columns.roles.tobytes(), columns.first_message.tolist()
    # `map` is several times faster than a loop over all conversations.
    shapes = list(map(roles.__getitem__, map(slice, first_message, first_message[1:])))
    numbers = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
    number = np.fromiter(map(numbers.__getitem__, shapes), dtype=np.int64, count=len(shapes))
    # For each shape: how many conversations can share a trace, and the first of them.
    is_odd = np.zeros(len(shapes), dtype=bool)
    is_odd[list(odd)] = True
    rows = np.flatnonzero(~is_odd)
    counts, first = np.bincount(number[rows], minlength=len(numbers)), np.zeros(len(numbers), dtype=np.int64)
    first[number[rows[::-1]]] = rows[::-1]
    known: dict[bytes, tuple[CachedTrace, int]] = {}
    distinct: list[LaidOut] = []
    to_confirm: set[int] = set()

    def shared_trace(shape: bytes) -> tuple[CachedTrace, int] | None:
        if shape not in known and (trace := plain((False, shape))) is not None:
            known[shape] = trace, len(distinct)
            distinct.append(trace.laid_out)
        return known.get(shape)

    # First, assign the cached traces. If a trace is due for a check, check it with the first conversation of its shape.
    layout_of = np.full(len(numbers), -1, dtype=np.int64)
    for shape, at in numbers.items():
        if counts[at] and (shared := shared_trace(shape)) is not None:
            layout_of[at] = shared[1]
            if shared[0].use(int(counts[at])):
                to_confirm.add(int(first[at]))
    which = np.where(is_odd, -1, layout_of[number])
    # Then check the traces and lay out the other conversations, in order, so that the first rejected one is reported.
    for row in sorted(to_confirm | {*np.flatnonzero(which < 0).tolist()}):
        shape = shapes[row]
        shared = None if row in odd else shared_trace(shape)
        if shared is not None and which[row] < 0:
            # An earlier conversation of this block has added the trace.
            which[row] = shared[1]
            if not shared[0].use():
                continue
        texts = columns.texts(row)
        record = partial(conversation, columns, row, texts)
        try:
            if shared is None:
                laid_out_row = lay_out((False, shape), texts, record)
                which[row] = len(distinct)
                distinct.append(laid_out_row)
            else:
                confirm(shared[0], texts, record)
        except RecordError as fault:
            return _up_to_refused(columns, [distinct[at] for at in which[:row].tolist()], fault)
    laid_out = LaidOutBatch(distinct, which)
    return LaidOutColumns(**{name.name: getattr(columns, name.name) for name in fields(columns)}, laid_out=laid_out)


def _up_to_refused(columns: ChatColumns, laid_out: Sequence[LaidOut], fault: RecordError) -> list[Record]:
    """Return the records with layouts, then the rejected record, then the remaining records unchanged."""
    records: list[Record] = [
        laid_out_record(record, one if one.slots is not None else one._replace(slots=columns.texts(row)))
        for row, (record, one) in enumerate(zip(columns, laid_out, strict=False))
    ]
    refused = columns[len(laid_out)]
    fault = fault.at(refused.file, refused.line, refused.id)
    return [*records, RefusedRecord(*RECORD_FIELDS(refused), fault=fault), *columns[len(laid_out) + 1 :]]
