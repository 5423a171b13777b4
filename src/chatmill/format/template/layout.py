"""Token layouts, which divide the rendered text of a conversation into cells for encoding.

A layout is a sequence of cells, for one conversation or for all conversations that share a trace. A cell is one control
token, or text of one kind: the header of a turn, content, or reasoning. The text between two control tokens is a
section, which is encoded as a whole.

    cells      <|im_start|> | assistant\\n | Hi | <|im_end|> | \\n
    sections                  ----------------                --
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import RecordError
from chatmill.format.chat_format import ROLE_CODES
from chatmill.format.template.answers.by_origin import AnswerSpan, disputed, shown
from chatmill.format.template.answers.derived import DerivedAnswers
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.tracing.trace import OUTSIDE, TextItem, fill_slots, merge_literals
from chatmill.records import Record
from chatmill.rows import NO_MESSAGE, OWN_ID, SPAN, Ids, Index, Part, Role, Rule, Table, offsets
from chatmill.tokenizer.control_encoder import ControlEncoder

PARTS = {"content": Part.CONTENT, "reasoning": Part.REASONING, "tool_calls": Part.TOOL_CALL}


MAX_SECTION = 2**13
"""Maximum number of cells in a section. The time to lay out a section is quadratic in the number of its cells."""
MAX_SPLITS = 8
"""Maximum number of cached layouts with text tokens for each trace."""


class SpanKind(NamedTuple):
    """The fields of a span that are known before encoding."""

    role: int
    part: int
    rule: int
    message: int


class Section(NamedTuple):
    """The text between two control tokens, which is encoded after its slots are filled."""

    text: tuple[TextItem, ...]
    before: str | None
    after: str | None
    """`before` and `after` are the control tokens around the section, if any."""
    first_cell: int
    stop_cell: int


class SimpleSections(NamedTuple):
    """Sections that each consist of the text of one message field between two pieces of fixed template text.

    assistant\\n | Hi |       around ("assistant\\n", ""), slot 1
    """

    slots: tuple[int, ...]
    around: tuple[tuple[str, str], ...]
    literal_bytes: Index
    """Number of bytes of template text in each section."""
    border_bytes: Index
    """Number of bytes of template text before each cell boundary, in its section."""
    after_text: NDArray[np.bool_]
    """For each cell boundary, whether it follows the message text of its section."""
    takes_columns: bool
    """Whether all message texts of the conversation are encoded unchanged.

    False if the template changes a text, or if a text and the literals around it may together form a text token.
    """

    def texts(self, slots: Sequence[str]) -> list[str]:
        return [before + slots[at] + after for at, (before, after) in zip(self.slots, self.around, strict=True)]


@dataclass(frozen=True)
class TokenLayout:
    """The cells of a row. The token ids of a cell are either known, or computed when its section is encoded."""

    sections: tuple[Section, ...]
    tokens: tuple[str | None, ...]
    """For each cell, its control token, or None if the cell is text."""
    texts: tuple[tuple[TextItem, ...], ...]
    """The text of each cell."""
    section: Index
    """For each cell, the index of its section, or -1 if the ids of the cell are known."""
    border: Index
    """For each cell, the index of the boundary at its end, or -1 if the cell ends its section."""
    ids: Ids
    """The known ids of all cells, concatenated."""
    lengths: Index
    """The number of known ids of each cell."""
    starts: Index
    """Offset in `ids` of the known ids of each cell."""
    border_section: Index
    """For each boundary between two cells of a section, the index of the section."""
    border_text: tuple[tuple[TextItem, ...], ...]
    """For each boundary, the text of its section before the boundary."""
    border_bytes: Index
    """Byte offset of each boundary in its section, or -1 if the offset depends on slots."""
    border_of_answer: NDArray[np.bool_]
    """Whether an answer starts or ends at each boundary."""
    first_cell: Index
    """Index of the first cell of each span. The last entry is the number of cells."""
    spans: Table
    """The spans of the row; their lengths are known only after encoding."""
    simple: SimpleSections | None = None
    """The sections as `SimpleSections`, if the layout belongs to a trace and each section has exactly one slot."""
    splits: dict[tuple[tuple[int, str | None], ...], TokenLayout] = dataclasses.field(default_factory=dict)
    """Cached layouts in which some cells are split at text tokens; the keys are the pieces of these cells."""


@dataclass
class _Cell:
    kind: SpanKind
    text: list[TextItem]
    token: str | None
    at_border: bool
    """Whether an answer starts or ends at the start of the cell."""


def token_layout(
    record: Record,
    derived: DerivedAnswers,
    tokens: ControlTokens,
    *,
    text_tokens: ControlTokens,
    encoder: ControlEncoder | None = None,
) -> TokenLayout:
    """Return the layout of a rendered record. `text_tokens` are the added tokens that are also recognized in message
    text.

    Without `encoder`, the layout contains the message texts and is valid only for this conversation. With `encoder`,
    the layout contains slots in place of the message texts, and sections without slots are encoded immediately.
    """
    cells: list[_Cell] = []
    for cell in _CellSplitter(record, derived, tokens, text_tokens, filled=encoder is None).cells():
        last = cells[-1] if cells else None
        if last is None or cell.token or last.token or last.kind != cell.kind or cell.at_border:
            cells.append(cell)
        else:
            last.text += cell.text
    return _layout(cells, tokens.ids, text_tokens, encoder)


def split_text_tokens(
    layout: TokenLayout, slots: list[str], sections: Sequence[int], tokens: ControlTokens, encoder: ControlEncoder
) -> tuple[TokenLayout, list[str]] | None:
    """Give each added token that occurs in the message text of `sections` a separate cell. Return the new layout and
    the texts for its slots.

    Return None if an added token, including the whitespace that it strips, crosses a cell boundary.
    """
    pieces: list[tuple[int, str | None]] = []
    texts: list[str] = []
    for _, _, _, first, end in (layout.sections[number] for number in sections):
        of_cells = [fill_slots(text, slots) for text in layout.texts[first:end]]
        text = "".join(of_cells)
        borders = [*accumulate(map(len, of_cells), initial=0)]
        cuts: dict[int, str | None] = dict.fromkeys(borders)
        for match in tokens.find(text):
            start, stop = encoder.with_stripped(match[0], text, *match.span())
            if bisect_right(borders, start) < bisect_left(borders, stop):
                return None
            cuts |= {match.start(): match[0], match.end(): cuts.get(match.end())}
        for start, stop in pairwise(sorted(cuts)):
            pieces.append((first + bisect_right(borders, start) - 1, cuts[start]))
            if cuts[start] is None:
                texts.append(text[start:stop])
    key = tuple(pieces)
    split = layout.splits.get(key)
    if split is None:
        split = _split(layout, pieces, len(slots), tokens, encoder)
        if len(layout.splits) < MAX_SPLITS:
            layout.splits[key] = split
    return split, [*slots, *texts]


def _split(
    layout: TokenLayout,
    pieces: Sequence[tuple[int, str | None]],
    num_slots: int,
    tokens: ControlTokens,
    encoder: ControlEncoder,
) -> TokenLayout:
    """Return a layout in which some cells are split into pieces.

    A piece is (cell index, added token), or (cell index, None) for text, which gets a new slot.
    """
    kinds = [SpanKind(*(int(span[field]) for field in SpanKind._fields)) for span in layout.spans]
    kind_of = np.repeat(np.arange(len(kinds)), np.diff(layout.first_cell)).tolist()
    in_pieces = {at: [token for _, token in group] for at, group in groupby(pieces, key=itemgetter(0))}
    new_slots = count(num_slots)
    cells: list[_Cell] = []
    for at, (text, token, kind) in enumerate(zip(layout.texts, layout.tokens, kind_of, strict=True)):
        border = layout.border[at - 1] if at else -1
        at_border = bool(border >= 0 and layout.border_of_answer[border])
        if at not in in_pieces:
            cells.append(_Cell(kinds[kind], list(text), token, at_border))
        for number, piece in enumerate(in_pieces.get(at, ())):
            item = next(new_slots) if piece is None else piece
            cells.append(_Cell(kinds[kind], [item], piece, at_border and number == 0))
    # Encode the literals of a layout with slots once, because other conversations may reuse the layout.
    return _layout(cells, encoder.ids, tokens, encoder if num_slots else None)


def _layout(
    cells: Sequence[_Cell], ids: Mapping[str, int], text_tokens: ControlTokens, encoder: ControlEncoder | None
) -> TokenLayout:
    """Build a layout from cells. With `encoder`, encode the sections that contain neither slots nor tokens in
    `text_tokens`.
    """
    sections: list[Section] = []
    borders: list[tuple[int, tuple[TextItem, ...], bool]] = []
    section, border = np.full((2, len(cells)), -1, dtype=np.int64)
    known: dict[int, list[int]] = {}
    literals: dict[int, str] = {}
    at = 0
    while at < len(cells):
        if (token := cells[at].token) is not None:
            known[at] = [ids[token]]
            at += 1
            continue
        stop = next((n for n in range(at, len(cells)) if cells[n].token is not None), len(cells))
        if stop - at > MAX_SECTION:
            what = f"the template alternates between its own text and message text more than {MAX_SECTION:,} times"
            right = "use a template with a control token in each turn, or remove the record"
            raise RecordError(f"{what} without a control token", right, kind="template_limit")
        around = (cells[at - 1].token if at else None, cells[stop].token if stop < len(cells) else None)
        # For each cell, the text from the start of the section to the end of the cell.
        texts = [merge_literals(item for cell in cells[at : n + 1] for item in cell.text) for n in range(at, stop)]
        text = fill_slots(texts[0], ()) if len(texts) == 1 and _is_literal(texts[0]) else None
        if encoder and encoder.by_sections and text and not text_tokens.any_in([text]) and encoder.is_normal(text):
            literals[at] = encoder.strip(text, *around)[0]
        else:
            section[at:stop] = len(sections)
            border[at : stop - 1] = np.arange(stop - at - 1) + len(borders)
            borders += [
                (len(sections), text, cell.at_border)
                for text, cell in zip(texts[:-1], cells[at + 1 : stop], strict=True)
            ]
            sections.append(Section(texts[-1], *around, at, stop))
        at = stop
    if encoder and literals:
        distinct = [*dict.fromkeys(literals.values())]
        encoded, start = encoder.tokenizer.encode_batch(distinct)
        parts = (encoded[begin:end].tolist() for begin, end in pairwise(start))
        ids_of = dict(zip(distinct, parts, strict=True))
        known |= {at: ids_of[text] for at, text in literals.items()}
    known_ids = [known.get(at, []) for at in range(len(cells))]
    first = [n for n, cell in enumerate(cells) if n == 0 or cell.kind != cells[n - 1].kind]
    spans = np.zeros(len(first), dtype=SPAN)
    spans["target"] = OWN_ID
    for number, field in enumerate(SpanKind._fields):
        spans[field] = [cells[n].kind[number] for n in first]
    lengths = np.array([len(of_cell) for of_cell in known_ids], dtype=np.int64)
    return TokenLayout(
        sections=tuple(sections),
        tokens=tuple(cell.token for cell in cells),
        texts=tuple(merge_literals(cell.text) for cell in cells),
        section=section,
        border=border,
        ids=np.array([id for of_cell in known_ids for id in of_cell], dtype=np.uint32),
        lengths=lengths,
        starts=offsets(lengths)[:-1],
        border_section=np.array([number for number, _, _ in borders], dtype=np.int64),
        border_text=tuple(text for _, text, _ in borders),
        border_bytes=np.array(
            [len(fill_slots(text, ()).encode()) if _is_literal(text) else -1 for _, text, _ in borders], dtype=np.int64
        ),
        border_of_answer=np.array([of_answer for _, _, of_answer in borders], dtype=bool),
        first_cell=np.array([*first, len(cells)], dtype=np.int64),
        spans=spans,
    )


class _CellSplitter:
    """Splits a rendered conversation into cells, each with a single `SpanKind`."""

    def __init__(
        self,
        record: Record,
        derived: DerivedAnswers,
        tokens: ControlTokens,
        text_tokens: ControlTokens,
        *,
        filled: bool,
    ) -> None:
        self.pieces, self.tokens, self.text_tokens, self.filled = derived.rendering.pieces, tokens, text_tokens, filled
        self.roles = [ROLE_CODES[message.role] for message in record.messages]
        self.answers = sorted(derived.answers, key=lambda answer: answer.start)
        self.starts = [answer.start for answer in self.answers]
        self.edges = {edge for answer in self.answers for edge in (answer.start, answer.stop)}
        self.answered = {answer.message for answer in derived.answers}
        self.written: set[int] = set()
        """Indices of the messages with a field that has been processed."""
        self.last = OUTSIDE
        """Index of the message that contains the last processed field."""
        self.fields = [at for at, piece in enumerate(self.pieces) if piece.source is not None]

    def cells(self) -> Iterator[_Cell]:
        number = place = 0
        for field in [*self.fields, len(self.pieces)]:
            if number < field:
                yield from self._literals(number, field, place)
            place += sum(len(piece.text) for piece in self.pieces[number:field])
            if field < len(self.pieces):
                yield self._field(field, place)
                place += len(self.pieces[field].text)
            number = field + 1

    def _field(self, number: int, place: int) -> _Cell:
        piece = self.pieces[number]
        assert piece.source is not None
        if piece.mixed and any(match[0] not in self.text_tokens.ids for match in self.tokens.find(piece.text)):
            what = f"cannot determine whether a control token in {shown(piece.text)}"
            raise disputed(f"{what} comes from the template or from message {piece.source.message}")
        kind = self._kind(number, place, None)
        if piece.source.message >= 0:
            self.written.add(piece.source.message)
            self.last = piece.source.message
        item = piece.text if self.filled or piece.slot is None else piece.slot
        return _Cell(kind, [item], None, place in self.edges)

    def _literals(self, first: int, stop: int, place: int) -> Iterator[_Cell]:
        """Split the template text between two message fields into cells: control tokens, and the text between them."""
        text = "".join(piece.text for piece in self.pieces[first:stop])
        ends = [*accumulate((len(piece.text) for piece in self.pieces[first:stop]), initial=place)][1:]
        matches = {place + match.start(): match for match in self.tokens.find(text)}
        cuts = {place, place + len(text), *ends, *(edge for edge in self.edges if place < edge < place + len(text))}
        inside = {at for begin, match in matches.items() for at in range(begin + 1, place + match.end())}
        cuts = (cuts - inside) | {at for begin, match in matches.items() for at in (begin, place + match.end())}
        for begin, end in pairwise(sorted(cuts)):
            token = matches[begin][0] if begin in matches else None
            kind = self._kind(first + bisect_right(ends, begin), begin, end if token else None)
            yield _Cell(kind, [text[begin - place : end - place]], token, begin in self.edges)

    def _kind(self, number: int, place: int, token_stop: int | None) -> SpanKind:
        """Return the `SpanKind` of the characters at the character offset `place`.

        `token_stop` is the end offset of the control token at `place`, or None if the characters are text.
        """
        source, owner = self.pieces[number].source, self.pieces[number].owner
        at = bisect_right(self.starts, place) - 1
        if at >= 0 and place < self.answers[at].stop:
            answer = self.answers[at]
            closes = answer.closed and token_stop == answer.stop
            part = Part.CLOSE if closes else self._part(number, answer)
            return SpanKind(Role.ASSISTANT, part, Rule.ROLE, answer.message)
        if source is not None and source.message >= 0 and self.roles[source.message] != Role.ASSISTANT:
            return SpanKind(self.roles[source.message], Part.CONTENT, Rule.ROLE, source.message)
        if source is not None and source.message >= 0 and source.message not in self.answered:
            part = PARTS.get(str(source.path[0]), Part.CONTENT)
            return SpanKind(Role.ASSISTANT, part, Rule.EARLIER_ROW, source.message)
        message = owner if owner != OUTSIDE else self.last
        if message == OUTSIDE:
            return SpanKind(Role.NONE, Part.OPEN, Rule.HEADER, int(NO_MESSAGE))
        if owner == OUTSIDE and len(self.written) == len(self.roles):
            return SpanKind(Role.NONE, Part.EOS, Rule.HEADER, message)
        # An empty answer has no field and is not in `written`, so also check whether the answer starts before `place`.
        is_after = message in self.written or (at >= 0 and self.answers[at].message == message)
        part = Part.CLOSE if is_after else Part.OPEN
        # If an assistant message is context, its end token is also context.
        context = self.roles[message] == Role.ASSISTANT and message not in self.answered and part == Part.CLOSE
        return SpanKind(self.roles[message], part, Rule.EARLIER_ROW if context else Rule.HEADER, message)

    def _part(self, number: int, answer: AnswerSpan) -> int:
        """Return the `Part` of one piece of an answer, such as content or reasoning.

        Template text has the same `Part` as the next message field, or as the previous field if the next field belongs
        to another message.
        """
        after = bisect_left(self.fields, number)
        for at in (*self.fields[after : after + 1], *self.fields[:after][-1:]):
            source = self.pieces[at].source
            if source is not None and source.message == answer.message:
                return PARTS.get(str(source.path[0]), Part.CONTENT)
        return Part.CONTENT


def _is_literal(text: Sequence[TextItem]) -> bool:
    return all(isinstance(item, str) for item in text)
