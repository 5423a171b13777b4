"""Printing: conversations that have been laid out, to Rows, many at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import RecordError
from chatmill.format.renderer import origins_of
from chatmill.format.template.encoding.layout import TokenLayout, filled
from chatmill.ledger import Ledger
from chatmill.records import Record
from chatmill.rows import EMPTY, Ids, Index, Rows, Rule, TrainOn, concat, copy_tokens, joined, offsets, weigh
from chatmill.tokenizer.control_encoder import ControlEncoder
from chatmill.tokenizer.token_positions import token_positions


class LaidOutRecord(Record, frozen=True, kw_only=True):
    """A record with its layout, and the texts that fill it."""

    layout: Any
    slots: list[str]
    notes: tuple[str, ...]
    """What of it deserves a look."""


def laid(record: Record, layout: TokenLayout, slots: list[str], notes: tuple[str, ...]) -> LaidOutRecord:
    """A record in a layout."""
    return LaidOutRecord(
        record.messages,
        record.id,
        record.tools,
        record.source,
        record.file,
        record.line,
        layout=layout,
        slots=slots,
        notes=notes,
    )


def encode_rows(
    batch: Sequence[LaidOutRecord], marked: ControlEncoder, *, train_on: TrainOn, tags: bool, ledger: Ledger
) -> Rows:
    """One row for each, and what deserves a look noted in the ledger."""
    if not batch:
        return EMPTY
    press = _RowEncoder(marked, tags)
    parts: list[Rows] = []
    if marked.by_sections:
        made, vague = press.by_sections(batch)
        first = 0
        for at in np.flatnonzero(vague).tolist():
            parts += [made[first:at], press.as_whole(batch[at])]
            first = at + 1
        parts.append(made[first:])
    else:
        parts = [press.as_whole(one) for one in batch]
    out = parts[0] if len(parts) == 1 else concat(parts)
    spans = joined([out.spans])
    _flags(batch, spans, out.first_span)
    weigh(spans, out.first_span, train_on)
    origins, files = origins_of(batch)
    for note, rows in Counter(note for one in batch for note in one.notes).items():
        ledger.add("noted", note, rows=rows)
    if press.straddling:
        ledger.add("noted", "straddling_token", tokens=press.straddling)
    return Rows(out.ids, spans, out.first_span, origins, out.first_segment, files)


def _flags(batch: Sequence[LaidOutRecord], spans: NDArray[np.void], first_span: Index) -> None:
    """A weight that a message brings itself wins over who speaks."""
    for row, one in enumerate(batch):
        for number, message in enumerate(one.messages):
            if message.weight is not None:
                of_row = slice(first_span[row], first_span[row + 1])
                chosen = (spans["message"][of_row] == number) & (spans["rule"][of_row] == Rule.ROLE)
                spans["rule"][of_row][chosen] = Rule.FLAG
                spans["weight"][of_row][chosen] = message.weight


class _RowEncoder:
    def __init__(self, marked: ControlEncoder, tags: bool) -> None:
        self.marked, self.tags = marked, tags
        self.straddling = 0
        """Tokens that begin before a border of an answer and end after it."""

    def by_sections(self, batch: Sequence[LaidOutRecord]) -> tuple[Rows, NDArray[np.bool_]]:
        """All rows at once; and which of them have a border that cannot be told from the bytes of their tokens."""
        layouts: list[TokenLayout] = [one.layout for one in batch]
        texts = [filled(section.words, one.slots) for one in batch for section in one.layout.sections] or [""]
        eaten = self._fed(layouts, texts) if self.marked.appetite else None
        flat, text_start = self.marked.encode_sections(texts)
        sections = [len(layout.sections) for layout in layouts]
        section = _shifted([layout.section for layout in layouts], sections)
        border = _shifted([layout.border for layout in layouts], [len(layout.borders) for layout in layouts])
        open_cell = section >= 0
        last = text_start[np.where(open_cell, section, 0) + 1]
        first = text_start[np.where(open_cell, section, 0)]
        of_row = np.repeat(np.arange(len(batch)), [len(layout.borders) for layout in layouts])
        bad = np.zeros(len(batch), dtype=bool)
        if len(of_row):
            places, vague = self._places(batch, texts, eaten, flat, text_start)
            bad[of_row[vague]] = True
            inner = np.flatnonzero(border >= 0)
            # A cell begins where the one before it in its section ends.
            last[inner] = first[inner + 1] = places[border[inner]]

        # Ids that cells bring themselves stand behind the encoded ones, those of each layout once.
        different = {id(layout): layout for layout in layouts}
        base = dict(zip(different, offsets(np.array([len(x.ids) for x in different.values()])).tolist(), strict=False))
        own = np.concatenate([layout.lengths for layout in layouts])
        own_start = np.concatenate([layout.starts + base[id(layout)] for layout in layouts])
        starts = np.where(open_cell, first, own_start + len(flat))
        lengths = np.where(open_cell, last - first, own)
        literals = np.concatenate([layout.ids for layout in different.values()])
        return _assembled(layouts, lengths, copy_tokens(flat, starts, lengths, literals)), bad

    def _fed(self, layouts: Sequence[TokenLayout], texts: list[str]) -> list[int]:
        """Take from the texts what control tokens eat of them; how many characters that is at their beginnings."""
        around = [(section.before, section.after) for layout in layouts for section in layout.sections]
        fed = [self.marked.feed(text, *sides) for text, sides in zip(texts, around, strict=False)]
        texts[: len(fed)] = [text for text, _ in fed]
        return [eaten for _, eaten in fed]

    def _places(
        self,
        batch: Sequence[LaidOutRecord],
        texts: Sequence[str],
        eaten: Sequence[int] | None,
        flat: Ids,
        text_start: Index,
    ) -> tuple[Index, NDArray[np.bool_]]:
        """For each border the first token after it, and whether that is vague.

        A token belongs to the cell it begins in: one that the end of the prompt falls into is context. Under
        generation tags it belongs to the answer, as transformers counts it.
        """
        layouts: list[TokenLayout] = [one.layout for one in batch]
        which = _shifted([layout.border_section for layout in layouts], [len(layout.sections) for layout in layouts])
        offset = np.concatenate([layout.border_bytes for layout in layouts])
        if eaten is not None or offset.min() < 0:
            borders = [(border, one.slots) for one in batch for border in one.layout.borders]
            for at in range(len(offset)) if eaten is not None else np.flatnonzero(offset < 0).tolist():
                border, slots = borders[at]
                gone = eaten[which[at]] if eaten is not None else 0
                upto = filled(border.words, slots)[gone:]
                offset[at] = min(len(upto.encode()), len(texts[which[at]].encode()))
        size = np.array([len(text) if (text := texts[at]).isascii() else len(text.encode()) for at in which.tolist()])
        position, inside, exact = token_positions(
            self.marked.tokenizer.byte_lengths(flat), text_start[which], text_start[which + 1], size=size, offset=offset
        )
        across = inside & exact & np.concatenate([layout.border_of_turn for layout in layouts])
        self.straddling += int(across.sum())
        return np.where(across, position - 1, position) if self.tags else position, ~exact

    def as_whole(self, one: LaidOutRecord) -> Rows:
        """One row, encoded as one text, with the beginnings that the tokenizer itself reports."""
        if not self.marked.knows_whole:
            what = "where its tokens begin cannot be told: the tokenizer rewrites its text"
            raise RecordError(what, "use a tokenizer.json, or leave it out", kind="vague_border")
        layout: TokenLayout = one.layout
        parts = [filled(words, one.slots) for words in layout.words]
        ids, begins = self.marked.encode_whole(parts, [name is not None for name in layout.names])
        starts = offsets(np.array([len(part) for part in parts]))
        places = np.searchsorted(begins, starts)
        places[-1] = len(ids)
        for cell in np.flatnonzero(layout.border >= 0).tolist():
            place = places[cell + 1]
            if layout.border_of_turn[layout.border[cell]] and (place == len(ids) or begins[place] != starts[cell + 1]):
                self.straddling += 1
                places[cell + 1] -= int(self.tags)
        return _assembled([layout], np.diff(places), ids)


def _shifted(columns: Sequence[Index], counts: Sequence[int]) -> Index:
    """Columns one after the other, numbers from 0 up shifted past those of the rows before."""
    shift = np.repeat(offsets(np.array(counts))[:-1], [len(column) for column in columns])
    joined_up = np.concatenate(columns)
    return np.where(joined_up >= 0, joined_up + shift, joined_up)


def _assembled(layouts: Sequence[TokenLayout], lengths: Index, ids: Ids) -> Rows:
    """Rows of one conversation each from the lengths of their cells; origins are still to come."""
    spans = joined([layout.spans for layout in layouts])
    base = offsets(np.array([layout.cells for layout in layouts]))
    first = np.concatenate([layout.first_cell[:-1] + at for layout, at in zip(layouts, base[:-1], strict=True)])
    spans["length"] = np.add.reduceat(lengths, first) if len(first) else 0
    counts = np.array([len(layout.spans) for layout in layouts])
    kept = spans["length"] > 0
    first_span = offsets(kept)[offsets(counts)]
    origins = np.zeros(len(layouts), dtype=EMPTY.origins.dtype)
    return Rows(ids, spans.take(np.flatnonzero(kept)), first_span, origins, np.arange(len(layouts) + 1))
