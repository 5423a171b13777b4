"""Layouts: what a rendering becomes in tokens, for one conversation or for all that are written alike.

A layout is a row of cells. A cell is one control token, or a stretch of text that is one thing: the opener of a turn,
a content, the reasoning of an answer. Texts between two control tokens make a section, which is encoded as one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.format.template.answers.answer_spans import AnswerSpan, disputed, shown
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.tracing.traced_template import NOBODY, Rendering
from chatmill.rows import NO_MESSAGE, OWN_ID, SPAN, Ids, Index, Part, Role, Rule, Table, offsets
from chatmill.tokenizer.control_encoder import ControlEncoder

PARTS = {"content": Part.CONTENT, "reasoning": Part.REASONING, "tool_calls": Part.TOOL_CALL}

Words = str | int
"""A part of a section: words that are always the same, or the slot of a text."""


class SpanKind(NamedTuple):
    """What the tokens of a cell are, in the terms of a span."""

    role: int
    part: int
    rule: int
    message: int


class Section(NamedTuple):
    """A text between two control tokens that is still to be filled and encoded."""

    words: tuple[Words, ...]
    before: str | None
    after: str | None
    """The control tokens on its sides."""


class Border(NamedTuple):
    """Where one cell of a section ends and the next begins."""

    section: int
    words: tuple[Words, ...]
    """The section up to here."""
    of_turn: bool
    """Whether an answer begins or ends here."""

    @property
    def bytes(self) -> int:
        """How far into its section it is; -1 where that depends on the texts."""
        return sum(len(str(word).encode()) for word in self.words) if _is_fixed(self.words) else -1


@dataclass(frozen=True)
class TokenLayout:
    """The cells of a row. A cell has ids of its own, or is a stretch of a section."""

    sections: tuple[Section, ...]
    borders: tuple[Border, ...]
    names: tuple[str | None, ...]
    """By cell: the control token it is, if it is one."""
    words: tuple[tuple[Words, ...], ...]
    """By cell: its text."""
    section: Index
    """By cell: its section, or -1 if it has ids of its own."""
    border: Index
    """By cell: the border it ends at, or -1 where its section ends."""
    ids: Ids
    """The ids of the cells that have their own, one after the other."""
    lengths: Index
    """By cell: how many of them it has."""
    starts: Index
    """By cell: the first of them."""
    border_section: Index
    border_bytes: Index
    border_of_turn: NDArray[np.bool_]
    first_cell: Index
    """By span, and the end."""
    spans: Table
    """Spans without their lengths."""

    @property
    def cells(self) -> int:
        return len(self.names)

    def text(self, slots: Sequence[str]) -> str:
        """All of it as text."""
        return "".join(filled(words, slots) for words in self.words)


def lay_out(
    full: Rendering,
    turns: Sequence[AnswerSpan],
    roles: Sequence[int],
    markers: ControlTokens,
    *,
    cast: ControlEncoder | None = None,
) -> TokenLayout:
    """The cells of a rendering whose answers are known.

    Without `cast` it is for this conversation alone, and its texts stand in it as they are. With it, texts that have
    a slot are left open, and what is the same in every conversation is encoded here, once.
    """
    cells: list[_Cell] = []
    for atom in _Cutter(full, turns, roles, markers, fixed=cast is None).atoms():
        last = cells[-1] if cells else None
        if last is None or atom.name or last.name or last.kind != atom.kind or atom.edge:
            cells.append(_Cell(atom.kind, [atom.words], atom.name, atom.edge))
        else:
            last.words.append(atom.words)
    sections: list[Section] = []
    borders: list[Border] = []
    section, border = np.full((2, len(cells)), -1, dtype=np.int64)
    own: list[list[int]] = [[] for _ in cells]
    at = 0
    while at < len(cells):
        if (name := cells[at].name) is not None:
            own[at] = [markers.ids[name]]
            at += 1
            continue
        stop = next((n for n in range(at, len(cells)) if cells[n].name is not None), len(cells))
        around = (cells[at - 1].name if at else None, cells[stop].name if stop < len(cells) else None)
        words = _merged([word for cell in cells[at:stop] for word in cell.words])
        inner = [_merged([word for cell in cells[at : n + 1] for word in cell.words]) for n in range(at, stop - 1)]
        if cast is not None and cast.by_sections and stop - at == 1 and _is_fixed(words):
            own[at] = cast.tokenizer.encode(cast.feed(filled(words, ()), *around)[0])
        else:
            section[at:stop] = len(sections)
            border[at : stop - 1] = np.arange(len(inner)) + len(borders)
            borders += [Border(len(sections), upto, cells[at + n + 1].edge) for n, upto in enumerate(inner)]
            sections.append(Section(words, *around))
        at = stop
    first = [n for n, cell in enumerate(cells) if n == 0 or cell.kind != cells[n - 1].kind]
    spans = np.zeros(len(first), dtype=SPAN)
    spans["target"] = OWN_ID
    for number, field in enumerate(SpanKind._fields):
        spans[field] = [cells[n].kind[number] for n in first]
    lengths = np.array([len(ids) for ids in own], dtype=np.int64)
    return TokenLayout(
        tuple(sections),
        tuple(borders),
        tuple(cell.name for cell in cells),
        tuple(_merged(cell.words) for cell in cells),
        section,
        border,
        np.array([id for ids in own for id in ids], dtype=np.uint32),
        lengths,
        offsets(lengths)[:-1],
        np.array([border.section for border in borders], dtype=np.int64),
        np.array([border.bytes for border in borders], dtype=np.int64),
        np.array([border.of_turn for border in borders], dtype=bool),
        np.array([*first, len(cells)], dtype=np.int64),
        spans,
    )


@dataclass
class _Cell:
    kind: SpanKind
    words: list[Words]
    name: str | None
    edge: bool


class _Atom(NamedTuple):
    kind: SpanKind
    words: Words
    name: str | None
    edge: bool
    """Whether an answer begins or ends before it."""


class _Cutter:
    """Cuts a rendering wherever the kind of its characters changes."""

    def __init__(
        self, full: Rendering, turns: Sequence[AnswerSpan], roles: Sequence[int], markers: ControlTokens, fixed: bool
    ) -> None:
        self.full, self.roles, self.markers, self.fixed = full, roles, markers, fixed
        self.turns = sorted(turns, key=lambda turn: turn.start)
        self.starts = [turn.start for turn in self.turns]
        self.edges = sorted({edge for turn in turns for edge in (turn.start, turn.stop)})
        self.seen: set[int] = set()
        """Messages of which a text has been written."""
        self.last = NOBODY
        # The next field from each piece on, and the last one before it.
        fields = [piece.source is not None for piece in full.pieces]
        self._following, self._preceding = [len(fields)] * len(fields), [-1] * len(fields)
        for at in range(1, len(fields)):
            self._preceding[at] = at - 1 if fields[at - 1] else self._preceding[at - 1]
        for at in range(len(fields) - 1, -1, -1):
            self._following[at] = at if fields[at] else (self._following[at + 1] if at + 1 < len(fields) else at + 1)

    def atoms(self) -> Iterator[_Atom]:
        pieces, place, number = self.full.pieces, 0, 0
        while number < len(pieces):
            stop = number + 1
            if pieces[number].source is None:
                while stop < len(pieces) and pieces[stop].source is None:
                    stop += 1
                yield from self._words(number, stop, place)
            else:
                yield self._field(number, place)
            place += sum(len(piece.text) for piece in pieces[number:stop])
            number = stop

    def _field(self, number: int, place: int) -> _Atom:
        piece = self.full.pieces[number]
        assert piece.source is not None
        if piece.mixed and self.markers.any_in([piece.text]):
            what = f"a control token may be of the template or of message {piece.source.message} in {shown(piece.text)}"
            raise disputed(what)
        kind = self._kind(number, place, None)
        if piece.source.message >= 0:
            self.seen.add(piece.source.message)
            self.last = piece.source.message
        return _Atom(kind, piece.text if self.fixed or piece.slot is None else piece.slot, None, place in self.edges)

    def _words(self, first: int, stop: int, place: int) -> Iterator[_Atom]:
        """The template's own words between two fields: control tokens, and text between them."""
        pieces = self.full.pieces[first:stop]
        text = "".join(piece.text for piece in pieces)
        ends, at = [], place
        for piece in pieces:
            at += len(piece.text)
            ends.append(at)
        found = {place + marker.start: marker for marker in self.markers.find(text)}
        cuts = {place, place + len(text), *ends, *(edge for edge in self.edges if place < edge < place + len(text))}
        for begin, marker in found.items():
            cuts = {cut for cut in cuts if not begin < cut < place + marker.stop} | {begin, place + marker.stop}
        for begin, end in pairwise(sorted(cuts)):
            owner = first + bisect_right(ends, begin)
            token = found[begin].token if begin in found else None
            kind = self._kind(owner, begin, end if token else None)
            yield _Atom(kind, text[begin - place : end - place], token, begin in self.edges)

    def _kind(self, number: int, place: int, token_stop: int | None) -> SpanKind:
        piece, owner = self.full.pieces[number], self.full.owners[number]
        turn = self._turn(place)
        if turn is not None:
            ends = turn.closed and token_stop == turn.stop
            part = Part.CLOSE if ends else self._part(number, turn)
            return SpanKind(Role.ASSISTANT, part, Rule.ROLE, turn.message)
        source = piece.source
        if source is not None and source.message >= 0 and self.roles[source.message] != Role.ASSISTANT:
            return SpanKind(self.roles[source.message], Part.CONTENT, Rule.ROLE, source.message)
        message = owner if owner != NOBODY else self.last
        if message == NOBODY:
            return SpanKind(Role.NONE, Part.OPEN, Rule.HEADER, int(NO_MESSAGE))
        if owner == NOBODY and len(self.seen) == len(self.roles):
            return SpanKind(Role.NONE, Part.EOS, Rule.HEADER, message)
        part = Part.CLOSE if message in self.seen else Part.OPEN
        return SpanKind(self.roles[message], part, Rule.HEADER, message)

    def _turn(self, place: int) -> AnswerSpan | None:
        """The answer that a place is in."""
        at = bisect_right(self.starts, place) - 1
        return self.turns[at] if at >= 0 and place < self.turns[at].stop else None

    def _part(self, number: int, turn: AnswerSpan) -> int:
        """What a piece of an answer is; words of the template go with the text that follows, or else precedes."""
        for at in (self._following[number], self._preceding[number]):
            source = self.full.pieces[at].source if 0 <= at < len(self.full.pieces) else None
            if source is not None and source.message == turn.message:
                return PARTS.get(str(source.path[0]), Part.CONTENT)
        return Part.CONTENT


def _merged(words: Sequence[Words]) -> tuple[Words, ...]:
    """Neighbouring words as one."""
    out: list[Words] = []
    for word in words:
        if isinstance(word, str) and out and isinstance(out[-1], str):
            out[-1] += word
        else:
            out.append(word)
    return tuple(out)


def _is_fixed(words: Sequence[Words]) -> bool:
    return all(isinstance(word, str) for word in words)


def filled(words: Sequence[Words], slots: Sequence[str]) -> str:
    """The text of words and slots."""
    return "".join([word if isinstance(word, str) else slots[word] for word in words])
