"""Check, using the token ids of finished rows, that each trained answer starts and ends where it should (see
`answer_check`).

    row      … <|im_end|> \n | <|im_start|> assistant \n | Hello . <|im_end|> | \n …
                               header of the prompt         trained, ends with an end token

The check reads the loss mask from the spans, so it is independent of the code that finds the answers in the text.
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
from chatmill.rows import Ids, Index, Role, Rows, Rule, offsets, run_positions
from chatmill.tokenizer.find import ids_in_range

Encode = Callable[[str], tuple[list[int], list[bool], str]]
"""Returns the token ids of a text, whether each id is a control token, and the text after the last control token."""
NOT_PROMPTED = "does not start where its prompt ends"
MAX_TAIL = 256
"""Maximum number of text tokens at the end of a header."""


NEARBY = 64
"""If the ids of all tokens that open or end turns are in a range of this size, one comparison per token finds them."""


@dataclass(frozen=True, eq=False)
class ExpectedAnswers:
    """The headers (such as `<|im_start|>assistant\\n`) that must precede the answers of a row.

    The text after the last control token of a header can be tokenized differently if an answer follows. Therefore, the
    size of this text in bytes is compared, not its token ids.

        <|im_start|> assistant <|im_sep|>   \\n
        compared by id                      by size
    """

    ids: Ids
    """The ids of all headers, each from its first to its last control token, concatenated."""
    lengths: Index
    """Number of ids in the header of each answer, or 0 if the header has no control token and cannot be compared."""
    tail_bytes: Index
    """Size in bytes of the text at the end of each header, or -1 if the tokenizer changes this text."""


def expected_answers(contexts: Sequence[Context], encode: Encode, *, rewrites: bool, strips: bool) -> ExpectedAnswers:
    """Return the headers that must precede the answers, as token ids.

    Set `rewrites` if the tokenizer normalizes text, so that the bytes of the tokens can differ from the text. Set
    `strips` if some control tokens remove the whitespace before them (lstrip).
    """
    headers, tails = [], []
    encoded = {text: encode(text) for text in {context.text for context in contexts}}
    for context in contexts:
        ids, is_control, tail = encoded[context.text]
        controls = [at for at, control in enumerate(is_control) if control]
        headers.append(ids[controls[0] : controls[-1] + 1] if controls else [])
        tails.append(-1 if rewrites or (strips and tail != tail.rstrip()) else len(tail.encode()))
    return ExpectedAnswers(
        np.array([id for ids in headers for id in ids], dtype=np.uint32),
        np.array([len(ids) for ids in headers], dtype=np.int64),
        np.array(tails, dtype=np.int64),
    )


class RowCheck:
    """Checks the answers in rows with the token ids that open and end the turns of a chat template."""

    def __init__(
        self,
        other_headers: Sequence[Sequence[int]],
        ends: Collection[int],
        *,
        vocab_size: int,
        byte_lengths: Callable[[Ids], NDArray[np.int32]],
        allow_no_end: bool,
    ) -> None:
        """`other_headers` contains the token ids of the headers of user and tool turns, each of which starts with a
        control token.
        """
        self.other_headers, self.allow_no_end = tuple(map(tuple, other_headers)), allow_no_end
        self._byte_lengths = byte_lengths
        self._is_end = np.zeros(vocab_size, dtype=bool)
        self._is_end[list(ends)] = True
        self._marks = sorted({*ends, *(header[0] for header in other_headers)})
        self._is_mark = np.zeros(vocab_size, dtype=bool)
        self._is_mark[self._marks] = True

    def check(self, rows: Rows, records: Sequence[Record], expected: Sequence[ExpectedAnswers], which: Index) -> None:
        """Raise a `RecordError` for the first answer that starts or ends at the wrong token or contains the header of
        another turn. `which` contains the index in `expected` for each row.
        """
        answers = _answers(rows)
        counts = np.array([len(one.lengths) for one in expected])
        other = np.flatnonzero(np.bincount(answers.row, minlength=len(rows)) != counts[which])
        if len(other):
            raise _fault(records[other[0]], "the row does not have the expected number of answers", "foreign_text")
        if not len(answers.row):
            return
        # For each answer in the rows, the index of its header in the concatenated headers of `expected`.
        of_answer = np.repeat(offsets(counts)[which], counts[which]) + run_positions(counts[which])
        ids, places = rows.ids, self._places(rows.ids)
        for broken, what, kind in (
            (~self._begins(ids, answers, expected, of_answer), NOT_PROMPTED, "prompt_mismatch"),
            (self._holds_header(ids, places, answers), "contains the header of another turn", "foreign_text"),
            (self._goes_on(ids, places, answers), "continues after a token that ends a turn", "foreign_text"),
            (~self._ends(ids, answers), "does not end with a token that ends a turn", NO_END),
        ):
            if broken.any():
                at = int(broken.argmax())
                raise _fault(records[answers.row[at]], f"the answer of message {answers.message[at]} {what}", kind)

    def _places(self, ids: Ids) -> Index:
        """Return the positions of the tokens that start a header or end a turn."""
        if not self._marks:
            return np.zeros(0, dtype=np.int64)
        # Comparisons are faster than a table lookup for each token.
        first, last = self._marks[0], self._marks[-1]
        if last - first < NEARBY:
            nearby = ids_in_range(ids, first, last)
            return nearby[self._is_mark[ids[nearby]]]
        is_mark = np.zeros(len(ids), dtype=bool)
        for mark in self._marks:
            is_mark |= ids == mark
        return np.flatnonzero(is_mark)

    def _begins(
        self, ids: Ids, answers: _Answers, expected: Sequence[ExpectedAnswers], of_answer: Index
    ) -> NDArray[np.bool_]:
        headers = np.concatenate([one.ids for one in expected])
        lengths = np.concatenate([one.lengths for one in expected])
        tail_bytes = np.concatenate([one.tail_bytes for one in expected])[of_answer]
        stop, lengths = offsets(lengths)[1:][of_answer], lengths[of_answer]
        right: NDArray[np.bool_] = lengths == 0
        waiting = np.flatnonzero(~right)
        for count in range(MAX_TAIL):
            if not len(waiting):
                break
            # Check the answers that start `count` tokens after the last control token of the header.
            start = answers.start.take(waiting)
            is_last = (start > count) & (
                ids.take(start - count - 1, mode="clip") == headers.take(stop.take(waiting) - 1)
            )
            at, waiting = waiting.take(np.flatnonzero(is_last)), waiting.take(np.flatnonzero(~is_last))
            if not len(at):
                continue
            fits = self._spells(ids, answers.start[at], count, tail_bytes[at])
            for before in range(2, int(lengths[at].max(initial=0)) + 1):
                place = answers.start[at] - count - before
                same = (place >= 0) & (ids[place] == headers[stop[at] - before])
                fits &= same | (lengths[at] < before)
            right[at[fits]] = True
        return right

    def _spells(self, ids: Ids, start: Index, count: int, size: Index) -> NDArray[np.bool_]:
        """For each answer, return whether the `count` tokens before it are exactly the tokens that contain the last
        `size` bytes of its header.
        """
        if not count:
            return size <= 0
        tokens = ids[(start - count)[:, None] + np.arange(count)]
        lengths = self._byte_lengths(tokens.ravel()).reshape(tokens.shape)
        total = lengths.sum(axis=1)
        spelled: NDArray[np.bool_] = (size < 0) | ((total >= size) & (total - lengths[:, -1] < size))
        return spelled

    def _holds_header(self, ids: Ids, places: Index, answers: _Answers) -> NDArray[np.bool_]:
        holds = np.zeros(len(answers.start), dtype=bool)
        for header in self.other_headers:
            begins = places[ids[places] == header[0]]
            for at, id in enumerate(header[1:], 1):
                begins = begins[begins + at < len(ids)]
                begins = begins[ids[begins + at] == id]
            which = np.searchsorted(answers.start, begins, side="right") - 1
            stop = begins + len(header)
            # A token that opens the next turn may end the answer, if an inference server stops generating at this
            # token.
            is_end = (stop == answers.stop[which]) & (len(header) == 1) & self._is_end[ids[begins]]
            holds[which[(which >= 0) & (stop <= answers.stop[which]) & ~is_end]] = True
        return holds

    def _goes_on(self, ids: Ids, places: Index, answers: _Answers) -> NDArray[np.bool_]:
        ends = np.append(places[self._is_end[ids[places]]], len(ids))
        first_end = ends[np.searchsorted(ends, answers.start)]
        goes_on: NDArray[np.bool_] = first_end < answers.stop - 1
        return goes_on

    def _ends(self, ids: Ids, answers: _Answers) -> NDArray[np.bool_]:
        if self.allow_no_end:
            return np.ones(len(answers.stop), dtype=bool)
        # If an answer consists of several turns, only the last turn must end with an end token.
        goes_on = (answers.row[1:] == answers.row[:-1]) & (answers.message[1:] == answers.message[:-1])
        ended: NDArray[np.bool_] = self._is_end[ids[answers.stop - 1]] | np.append(goes_on, False)
        return ended


@dataclass(frozen=True)
class _Answers:
    """Row, message index and token range of each answer, in row order."""

    row: Index
    message: Index
    start: Index
    stop: Index


def _answers(rows: Rows) -> _Answers:
    spans = rows.spans
    at = np.flatnonzero((spans["role"] == Role.ASSISTANT) & (spans["rule"] == Rule.ROLE))
    row = np.searchsorted(rows.first_span, at, side="right") - 1
    message = spans["message"][at]
    same = (at[1:] == at[:-1] + 1) & (row[1:] == row[:-1]) & (message[1:] == message[:-1])
    # `take` with indices is faster than a boolean index.
    cuts = np.flatnonzero(~same) + 1
    begins, ends = np.append(0, cuts)[: len(at)], np.append(cuts, len(at))[: len(at)] - 1
    start = rows.span_start
    return _Answers(
        row.take(begins),
        message.take(begins).astype(np.int64),
        start.take(at.take(begins)),
        start.take(at.take(ends) + 1),
    )


def _fault(record: Record, what: str, kind: str) -> RecordError:
    right = "this is a bug in chatmill, please report it with the template; remove the record to continue"
    return RecordError(what, right, kind=kind).at(record.file, record.line, record.id)


def header_ids(headers: Collection[str], encode: Encode) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each header. If a header ends with text, its last token is omitted, because this text can
    be part of a longer token in a row.
    """
    out = []
    for header in headers:
        ids, is_control, _ = encode(header)
        if len(ids) > 1 and not is_control[-1]:
            ids = ids[:-1]
        out.append(tuple(ids))
    return tuple(dict.fromkeys(out))
