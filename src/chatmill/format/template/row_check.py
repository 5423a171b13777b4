"""The invariant of every trained answer, checked on the token ids of finished rows, many at a time.

    row      … <|im_end|> \n | <|im_start|> assistant \n | Hello . <|im_end|> | \n …
                               header of the prompt         trained, ends with an end token

Nothing here knows how answers were derived: where a row is trained is read off its spans.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import RecordError
from chatmill.format.template.answer_check import NO_END
from chatmill.format.template.answers.contexts import Context
from chatmill.records import Record
from chatmill.rows import Ids, Index, Role, Rows, Rule, offsets

Encode = Callable[[str], tuple[list[int], list[bool]]]
"""The ids of a text with control tokens, and which of them are control tokens."""


@dataclass(frozen=True)
class ExpectedAnswers:
    """What must stand before the answers of a row, as ids."""

    headers: Ids
    """The headers of their prompts from their first control token on, concatenated."""
    is_text: NDArray[np.bool_]
    """By id of a header: whether it is text, which may be part of a longer token in a row."""
    lengths: Index
    """By answer: the length of its header; 0 if the header has no control token."""
    parts: NDArray[np.bool_]
    """By answer: whether row and prompt part behind the header."""


def expected_answers(contexts: Sequence[Context], encode: Encode) -> ExpectedAnswers:
    encoded = [encode(context.text + context.rest) for context in contexts]
    # Text before the first control token may be encoded otherwise in a row.
    first = [next((at for at, control in enumerate(is_control) if control), len(ids)) for ids, is_control in encoded]
    headers = [ids[at:] for (ids, _), at in zip(encoded, first, strict=True)]
    return ExpectedAnswers(
        np.array([id for ids in headers for id in ids], dtype=np.uint32),
        np.array([not control for (_, flags), at in zip(encoded, first, strict=True) for control in flags[at:]], bool),
        np.array([len(ids) for ids in headers], dtype=np.int64),
        np.array([bool(context.rest) for context in contexts], dtype=bool),
    )


@dataclass(frozen=True)
class RowCheck:
    """The token ids that a template opens and ends turns with."""

    other_headers: tuple[tuple[int, ...], ...]
    """What opens turns of users and tools; each begins with a control token."""
    ends: Ids
    allow_no_end: bool

    def check(self, rows: Rows, records: Sequence[Record], expected: Sequence[ExpectedAnswers]) -> None:
        """Raise a `RecordError` for the first record whose row breaks the invariant."""
        answers = _answers(rows)
        counts = np.array([len(one.lengths) for one in expected])
        other = np.flatnonzero(np.bincount(answers.row, minlength=len(rows)) != counts)
        if len(other):
            raise _fault(records[other[0]], "its row has another number of answers than it has", "foreign_text")
        if not len(answers.row):
            return
        for broken, what, kind in (
            (~self._begins(rows.ids, answers, expected), "does not begin where its prompt ends", "prompt_mismatch"),
            (self._holds_header(rows.ids, answers), "holds the header of another turn", "foreign_text"),
            (~self._ends(rows.ids, answers), "does not end with a token that ends a turn", NO_END),
        ):
            if broken.any():
                at = int(broken.argmax())
                raise _fault(records[answers.row[at]], f"the answer of message {answers.message[at]} {what}", kind)

    def _begins(self, ids: Ids, answers: _Answers, expected: Sequence[ExpectedAnswers]) -> NDArray[np.bool_]:
        headers = np.concatenate([one.headers for one in expected])
        is_text = np.concatenate([one.is_text for one in expected])
        lengths = np.concatenate([one.lengths for one in expected])
        parts = np.concatenate([one.parts for one in expected])
        first = offsets(lengths)[:-1]
        right: NDArray[np.bool_] = lengths == 0
        for size in range(1, int(lengths.max(initial=0)) + 1):
            # Where row and prompt part, any part of the header may stand before the answer.
            tried = np.flatnonzero(~right & (answers.start >= size) & ((lengths == size) | (parts & (lengths > size))))
            if not len(tried):
                continue
            column = np.arange(size)
            at = first[tried, None] + column
            same = ids[(answers.start[tried] - size)[:, None] + column] == headers[at]
            # The last token may go on behind the header.
            same[:, -1] |= is_text[at[:, -1]]
            right[tried] |= same.all(axis=1)
        return right

    def _holds_header(self, ids: Ids, answers: _Answers) -> NDArray[np.bool_]:
        holds = np.zeros(len(answers.start), dtype=bool)
        for header in self.other_headers:
            places = np.flatnonzero(ids == header[0])
            for at, id in enumerate(header[1:], 1):
                places = places[places + at < len(ids)]
                places = places[ids[places + at] == id]
            which = np.searchsorted(answers.start, places, side="right") - 1
            # The token that opens the next turn may end an answer, if a server stops there.
            stop = places + len(header)
            is_end = (stop == answers.stop[which]) & (len(header) == 1) & np.isin(ids[places], self.ends)
            inside = (which >= 0) & (stop <= answers.stop[which]) & ~is_end
            holds[which[inside]] = True
        return holds

    def _ends(self, ids: Ids, answers: _Answers) -> NDArray[np.bool_]:
        if self.allow_no_end:
            return np.ones(len(answers.stop), dtype=bool)
        # An answer may be written as several turns.
        goes_on = (answers.row[1:] == answers.row[:-1]) & (answers.message[1:] == answers.message[:-1])
        ended: NDArray[np.bool_] = np.isin(ids[answers.stop - 1], self.ends) | np.append(goes_on, False)
        return ended


@dataclass(frozen=True)
class _Answers:
    """The stretches of rows that are answers, in their order."""

    row: Index
    message: Index
    start: Index
    stop: Index


def _answers(rows: Rows) -> _Answers:
    spans = rows.spans
    of_answer = (spans["role"] == Role.ASSISTANT) & (spans["rule"] == Rule.ROLE)
    row = np.repeat(np.arange(len(rows)), np.diff(rows.first_span))
    at = np.flatnonzero(of_answer)
    same = (np.diff(at) == 1) & (np.diff(row[at]) == 0) & (np.diff(spans["message"][at].astype(np.int64)) == 0)
    begins = at[np.append(True, ~same)] if len(at) else at
    ends = at[np.append(~same, True)] if len(at) else at
    start = rows.span_start
    return _Answers(row[begins], spans["message"][begins].astype(np.int64), start[begins], start[ends + 1])


def _fault(record: Record, what: str, kind: str) -> RecordError:
    right = "leave the record out; this is a fault of chatmill, please report it with the template"
    return RecordError(what, right, kind=kind).at(record.file, record.line, record.id)


def header_ids(headers: Collection[str], encode: Encode) -> tuple[tuple[int, ...], ...]:
    """Headers as ids, without text at their end, which may be part of a longer token in a row."""
    out = []
    for header in headers:
        ids, is_control = encode(header)
        if len(ids) > 1 and not is_control[-1]:
            ids = ids[:-1]
        out.append(tuple(ids))
    return tuple(dict.fromkeys(out))
