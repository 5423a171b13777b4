"""Encode the rendered text of many records to `Rows` in one batch, using the token layout of each record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import RecordError
from chatmill.format.renderer import origins_of
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.layout import TokenLayout, split_text_tokens
from chatmill.format.template.layout_table import MAX_KINDS, LayoutTable, LayoutTables
from chatmill.format.template.ranges import section_weights, whole_weights
from chatmill.format.template.row_check import ExpectedAnswers, RowCheck
from chatmill.format.template.tracing.trace import fill_slots
from chatmill.format.train_ranges import REWRITES, CharWeights, TokenWeights, apply_ranges, vague
from chatmill.ledger import Ledger
from chatmill.records import ChatColumns, Record
from chatmill.rows import EMPTY, Ids, Index, Rows, Rule, Table, TrainOn, concat, copy_tokens, offsets, weigh
from chatmill.tokenizer.backend import TextColumns
from chatmill.tokenizer.control_encoder import ControlEncoder

RECORD_FIELDS = attrgetter(*Record.__struct_fields__)
_LAYOUT, _WEIGHT = attrgetter("layout"), attrgetter("weight")


class LaidOut(NamedTuple):
    """The token layout of a conversation, and the message texts to fill into the slots of the layout."""

    layout: TokenLayout
    slots: list[str] | None
    """The texts for the slots of the layout, or None if the conversation and its texts are stored in columns."""
    notes: tuple[str, ...]
    """Notes about the record for the ledger."""
    expected: ExpectedAnswers | None
    """The headers that must precede the answers, or None if generation tags mark the answers."""
    char_weights: CharWeights | None = None
    """The weight of each rendered character according to `train_ranges`, or None if the record has no ranges."""


@dataclass(frozen=True)
class LaidOutBatch:
    """The layouts of consecutive conversations; conversations that are stored in columns share layouts.

    Each layout with `slots` belongs to one conversation. These layouts are in the order of their conversations.
    """

    distinct: list[LaidOut]
    which: Index
    """For each conversation, the index of its layout in `distinct`."""

    @classmethod
    def of(cls, laid_out: Sequence[LaidOut]) -> LaidOutBatch:
        return cls(list(laid_out), np.arange(len(laid_out)))

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, row: int) -> LaidOut:
        return self.distinct[int(self.which[row])]


class LaidOutRecord(Record, frozen=True, kw_only=True):
    laid_out: Any
    """A `LaidOut`."""


def laid_out_record(record: Record, laid_out: LaidOut) -> LaidOutRecord:
    return LaidOutRecord(*RECORD_FIELDS(record), laid_out=laid_out)


def encode_rows(
    records: Sequence[Record],
    laid_out: LaidOutBatch,
    encoder: ControlEncoder,
    tables: LayoutTables,
    *,
    text_tokens: ControlTokens,
    train_on: TrainOn,
    tags: bool,
    check: RowCheck | None,
    ledger: Ledger,
) -> Rows:
    """Encode each record to one row, and apply the loss weights.

    With `tags`, a token that spans the boundary of an answer belongs to the answer.
    """
    if not len(records):
        return EMPTY
    rows_encoder = _RowEncoder(
        encoder, text_tokens, tags, tables, records if isinstance(records, ChatColumns) else None
    )
    parts: list[Rows] = []
    if encoder.by_sections:
        rows, inexact = rows_encoder.by_sections(laid_out)
        first = 0
        for at in np.flatnonzero(inexact).tolist():
            parts += [rows[first:at], rows_encoder.as_whole(laid_out[at], at)]
            first = at + 1
        parts.append(rows[first:] if first else rows)
    else:
        parts = [rows_encoder.as_whole(laid_out[at], at) for at in range(len(records))]
    out = parts[0] if len(parts) == 1 else concat(parts)
    if check is not None:
        expected = [one.expected for one in laid_out.distinct if one.expected is not None]
        check.check(out, records, expected, laid_out.which)
    by_range = rows_encoder.range_weights(records, laid_out, out)
    _apply_weights(records, out.spans, out.first_span)
    weigh(out.spans, out.first_span, train_on)
    origins, files = origins_of(records)
    notes = Counter[str]()
    for one, rows_of in zip(laid_out.distinct, np.bincount(laid_out.which).tolist(), strict=True):
        notes.update(dict.fromkeys(one.notes, rows_of) if rows_of else {})
    for note, count in notes.items():
        ledger.add("noted", note, rows=count)
    if rows_encoder.straddling:
        ledger.add("noted", "straddling_token", tokens=rows_encoder.straddling)
    rows = replace(out, origins=origins, files=files)
    return rows if by_range is None else apply_ranges(rows, by_range, ledger)


def _apply_weights(records: Sequence[Record], spans: Table, first_span: Index) -> None:
    """Apply the `weight` of individual messages, which overrides the weight of their role."""
    if isinstance(records, ChatColumns):
        return
    for row, record in enumerate(records):
        weights = list(map(_WEIGHT, record.messages))
        if weights.count(None) == len(weights):
            continue
        of_row = slice(first_span[row], first_span[row + 1])
        for number, weight in enumerate(weights):
            if weight is not None:
                chosen = (spans["message"][of_row] == number) & (spans["rule"][of_row] == Rule.ROLE)
                spans["rule"][of_row][chosen] = Rule.FLAG
                spans["weight"][of_row][chosen] = weight


class _Sections(NamedTuple):
    ids: Ids
    """The token ids of all sections. `first` and `last` are the start and stop of each section in `ids`."""
    first: Index
    last: Index
    size: Index
    """Size of the text of each section, in bytes."""
    literal_bytes: Index
    """Number of bytes of template text in each section; see `SimpleSections`."""
    stripped: dict[int, int]
    """Maps each section to the number of characters that the preceding control token strips from it."""


@dataclass
class _RowEncoder:
    encoder: ControlEncoder
    text_tokens: ControlTokens
    tags: bool
    tables: LayoutTables
    columns: ChatColumns | None
    """The conversations, if they are stored in columns."""
    straddling: int = 0
    """Number of tokens that span the boundary of an answer."""

    def by_sections(self, laid_out: LaidOutBatch) -> tuple[Rows, NDArray[np.bool_]]:
        """Encode all rows in one batch. Also return which rows have a cell boundary whose token position is not exactly
        known.
        """
        distinct, whole = self._with_text_tokens(laid_out.distinct)
        laid_out, inexact = replace(laid_out, distinct=distinct), whole[laid_out.which]
        rows = self.tables.rows([*map(_LAYOUT, laid_out.distinct)], laid_out.which)
        table = rows.table
        if len(table.around) > MAX_KINDS:
            laid_out = LaidOutBatch.of(
                [laid_out[at]._replace(slots=self._slots(laid_out[at], at)) for at in range(len(laid_out))]
            )
        cells, num_cells = rows.items(table.first_cell)
        numbers, num_sections = rows.items(table.first_section)
        encoded = self._encoded(laid_out, table, numbers, num_sections)
        section = table.section[cells]
        in_section = np.flatnonzero(section >= 0)
        first_section = offsets(num_sections)[:-1]
        section = section[in_section] + np.repeat(first_section, num_cells)[in_section]
        starts, lengths = table.starts[cells] + len(encoded.ids), table.lengths[cells]
        first, last = encoded.first[section], encoded.last[section]
        borders, num_borders = rows.items(table.first_border)
        if len(borders):
            of_section = table.border_section[borders] + np.repeat(first_section, num_borders)
            row = np.repeat(np.arange(len(laid_out)), num_borders)
            position, exact = self._border_positions(laid_out, encoded, table, borders, of_section)
            inexact[row[~exact]] = True
            border = table.border[cells][in_section]
            inner = np.flatnonzero(border >= 0)
            border = border[inner] + np.repeat(offsets(num_borders)[:-1], num_cells)[in_section[inner]]
            # A cell starts where the previous cell of the same section ends.
            last[inner] = first[inner + 1] = position[border]
        starts[in_section], lengths[in_section] = first, last - first
        return rows.rows(lengths, copy_tokens(encoded.ids, starts, lengths, table.ids)), inexact

    def _encoded(self, laid_out: LaidOutBatch, table: LayoutTable, numbers: Index, num_sections: Index) -> _Sections:
        """Encode the sections of all rows.

        `numbers` contains the index of each section in `table`, and `num_sections` the number of sections in each row.
        """
        in_columns = np.array([one.slots is None for one in laid_out.distinct], dtype=bool)
        of_columns = np.repeat(in_columns[laid_out.which], num_sections)
        ids, literal_bytes = EMPTY.ids, table.literal_bytes[numbers]
        first, last, size = np.zeros((3, len(numbers)), dtype=np.int64)
        if of_columns.any():
            assert self.columns is not None
            chosen = numbers[of_columns]
            message = np.repeat(self.columns.first_message[:-1], num_sections)[of_columns] + table.slot[chosen]
            begin, end = self.columns.start[message], self.columns.stop[message]
            before, after = ([text.encode() for text in side] for side in zip(*table.around, strict=True))
            texts = TextColumns(self.columns.data, begin, end, table.kind[chosen], before, after)
            ids, start = self.encoder.tokenizer.encode_batch(texts)
            first[of_columns], last[of_columns] = start[:-1], start[1:]
            size[of_columns] = end - begin + literal_bytes[of_columns]
        if of_columns.all():
            return _Sections(ids, first, last, size, literal_bytes, {})
        others = np.flatnonzero(~of_columns)
        filled = _section_texts(laid_out.distinct)
        stripped: dict[int, int] = {}
        if self.encoder.lstrip or self.encoder.rstrip:
            sections = (
                section for one in laid_out.distinct if one.slots is not None for section in one.layout.sections
            )
            both = [self.encoder.strip(text, one.before, one.after) for text, one in zip(filled, sections, strict=True)]
            filled, counts = [text for text, _ in both], [count for _, count in both]
            stripped = dict(zip(others.tolist(), counts, strict=True))
        more, start = self.encoder.tokenizer.encode_batch(filled)
        start = start + len(ids)
        first[others], last[others] = start[:-1], start[1:]
        size[others] = [len(text) if text.isascii() else len(text.encode()) for text in filled]
        ids = np.concatenate([ids, more]) if len(ids) else more
        return _Sections(ids, first, last, size, literal_bytes, stripped)

    def _with_text_tokens(self, laid_out: list[LaidOut]) -> tuple[list[LaidOut], NDArray[np.bool_]]:
        """Give each text token (an added token in the text of a message) a separate cell in the layout of its row.

        Also return which layouts must be encoded as a single text, because a text token spans a cell boundary or the
        tokenizer normalizes the text. Conversations that are stored in columns contain no text tokens.
        """
        whole = np.zeros(len(laid_out), dtype=bool)
        filled = [at for at, one in enumerate(laid_out) if one.slots is not None] if self.text_tokens.ids else []
        if not filled:
            return laid_out, whole
        texts = _section_texts(laid_out)
        counts = np.array([len(laid_out[at].layout.sections) for at in filled])
        first, row = dict(zip(filled, offsets(counts).tolist(), strict=False)), np.repeat(filled, counts).tolist()
        if self.encoder.normalized is not None:
            whole[[row[at] for at, text in enumerate(texts) if not self.encoder.is_normal(text)]] = True
        holding = self.text_tokens.indices_in(texts)
        if not holding:
            return laid_out, whole
        out = list(laid_out)
        for at, numbers in groupby(holding, key=row.__getitem__):
            one, sections = laid_out[at], [number - first[at] for number in numbers]
            split = split_text_tokens(one.layout, one.slots or [], sections, self.text_tokens, self.encoder)
            if split is None:
                whole[at] = True
            else:
                out[at] = one._replace(layout=split[0], slots=split[1])
        return out, whole

    def _border_positions(
        self,
        laid_out: LaidOutBatch,
        encoded: _Sections,
        table: LayoutTable,
        borders: Index,
        section: Index,
    ) -> tuple[Index, NDArray[np.bool_]]:
        """Return the token position of each cell boundary, and whether this position is exact.

        A token that spans the end of the prompt and the start of the answer is not trained on. With generation tags, a
        token that spans the start of an answer belongs to the answer, as in transformers.
        """
        size = encoded.size[section]
        text_bytes = np.where(table.after_text[borders], size - encoded.literal_bytes[section], 0)
        offset = table.border_bytes[borders] + text_bytes
        stripped = encoded.stripped
        by_text = np.flatnonzero(np.isin(section, list(stripped)) if stripped else offset < 0).tolist()
        if by_text:
            layouts = [laid_out[row] for row in range(len(laid_out))]
            texts = [(text, one.slots or []) for one in layouts for text in one.layout.border_text]
            for at in by_text:
                before = fill_slots(*texts[at])[stripped.get(int(section[at]), 0) :]
                offset[at] = min(len(before.encode()), size[at])
        first, last = encoded.first[section], encoded.last[section]
        position, inside, exact = self.encoder.tokenizer.positions(encoded.ids, first, last, size=size, offset=offset)
        straddles = inside & exact & table.border_of_answer[borders]
        self.straddling += int(straddles.sum())
        return np.where(straddles, position - 1, position) if self.tags else position, exact

    def range_weights(self, records: Sequence[Record], laid_out: LaidOutBatch, rows: Rows) -> TokenWeights | None:
        """Return the weight of each token according to `train_ranges`, or None if no record has ranges."""
        has_weights = np.array([one.char_weights is not None for one in laid_out.distinct])
        ranged = np.flatnonzero(has_weights[laid_out.which]).tolist()
        if not ranged:
            return None
        out = TokenWeights.none(len(rows.ids))
        for at in ranged:
            tokens = slice(rows.row_start[at], rows.row_start[at + 1])
            weights = self._range_weights(laid_out[at], rows.ids[tokens])
            if weights is None:
                number = next(n for n, message in enumerate(records[at].messages) if message.train_ranges)
                raise vague(records[at], number, *REWRITES)
            out.set(tokens, weights)
        return out

    def _range_weights(self, one: LaidOut, ids: Ids) -> TokenWeights | None:
        assert one.char_weights is not None and one.slots is not None
        if self.encoder.by_sections:
            (split,), whole = self._with_text_tokens([one])
            if not whole[0]:
                weights = section_weights(one.char_weights, split.layout, split.slots or [], ids, self.encoder)
                if weights is not None:
                    return weights
        if not self.encoder.can_encode_whole:
            return None
        return whole_weights(one.char_weights, *self._parts(one.layout, one.slots), ids, self.encoder)

    def _parts(self, layout: TokenLayout, slots: Sequence[str]) -> tuple[list[str], list[bool]]:
        """Return the text of each cell, and whether the cell is a control token that the template wrote."""
        texts = [fill_slots(text, slots) for text in layout.texts]
        return texts, [token is not None and token not in self.text_tokens.ids for token in layout.tokens]

    def _slots(self, one: LaidOut, row: int) -> list[str]:
        if one.slots is not None:
            return one.slots
        assert self.columns is not None
        return self.columns.texts(row)

    def as_whole(self, one: LaidOut, row: int) -> Rows:
        """Encode one row as a single text, and locate its cells by the character offsets of the tokens."""
        if not self.encoder.can_encode_whole:
            what = "cannot determine where the tokens start, because the tokenizer changes the text"
            raise RecordError(what, "use a tokenizer.json, or remove the record", kind="vague_border")
        layout = one.layout
        texts, is_control = self._parts(layout, self._slots(one, row))
        ids, begins = self.encoder.encode_whole(texts, is_control)
        starts = offsets(np.array([len(text) for text in texts]))
        places = np.searchsorted(begins, starts)
        places[-1] = len(ids)
        for cell in np.flatnonzero(layout.border >= 0).tolist():
            place = places[cell + 1]
            straddles = place == len(ids) or begins[place] != starts[cell + 1]
            if straddles and layout.border_of_answer[layout.border[cell]]:
                self.straddling += 1
                places[cell + 1] -= int(self.tags)
        return LayoutTables().rows([layout], np.zeros(1, dtype=np.int64)).rows(np.diff(places), ids)


def _section_texts(laid_out: Sequence[LaidOut]) -> list[str]:
    """Return the texts of all sections, except those of conversations that are stored in columns."""
    texts: list[str] = []
    for layout, slots, *_ in laid_out:
        if slots is not None:
            simple = layout.simple
            if simple is not None:
                texts += simple.texts(slots)
            else:
                texts += [fill_slots(section.text, slots) for section in layout.sections]
    return texts
