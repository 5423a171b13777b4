"""Records with their layouts to Rows, many at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from chatmill.errors import RecordError
from chatmill.format.renderer import origins_of
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.layout import TokenLayout, split_text_tokens
from chatmill.format.template.ranges import section_weights, whole_weights
from chatmill.format.template.row_check import RowCheck
from chatmill.format.template.tracing.trace import fill_slots
from chatmill.format.train_ranges import REWRITES, TokenWeights, apply_ranges, vague
from chatmill.ledger import Ledger
from chatmill.records import Record
from chatmill.rows import EMPTY, Ids, Index, Rows, Rule, TrainOn, concat, copy_tokens, joined, offsets, weigh
from chatmill.tokenizer.control_encoder import ControlEncoder
from chatmill.tokenizer.tokenizer import token_positions


class LaidOutRecord(Record, frozen=True, kw_only=True):
    """A record with its layout, and the texts for the slots."""

    layout: Any
    slots: list[str]
    notes: tuple[str, ...]
    """Reasons for entries in the ledger."""
    expected: Any
    """The `ExpectedAnswers` of its row; None if its answers are between generation tags."""
    char_weights: Any = None
    """The weights that `train_ranges` give to characters of its rendering; None if it has no ranges."""


Batch = Sequence[LaidOutRecord]


def encode_rows(
    batch: Batch,
    encoder: ControlEncoder,
    *,
    text_tokens: ControlTokens,
    train_on: TrainOn,
    tags: bool,
    check: RowCheck | None,
    ledger: Ledger,
) -> Rows:
    """One row for each record; `tags`: a token across the border of an answer belongs to the answer."""
    if not batch:
        return EMPTY
    rows_encoder = _RowEncoder(encoder, text_tokens, tags)
    parts: list[Rows] = []
    if encoder.by_sections:
        rows, inexact = rows_encoder.by_sections(batch)
        first = 0
        for at in np.flatnonzero(inexact).tolist():
            parts += [rows[first:at], rows_encoder.as_whole(batch[at])]
            first = at + 1
        parts.append(rows[first:])
    else:
        parts = [rows_encoder.as_whole(record) for record in batch]
    out = parts[0] if len(parts) == 1 else concat(parts)
    if check is not None:
        check.check(out, batch, [record.expected for record in batch])
    by_range = rows_encoder.range_weights(batch, out)
    spans = joined([out.spans])
    _apply_weights(batch, spans, out.first_span)
    weigh(spans, out.first_span, train_on)
    origins, files = origins_of(batch)
    for note, count in Counter(note for record in batch for note in record.notes).items():
        ledger.add("noted", note, rows=count)
    if rows_encoder.straddling:
        ledger.add("noted", "straddling_token", tokens=rows_encoder.straddling)
    rows = Rows(out.ids, spans, out.first_span, origins, out.first_segment, files)
    return rows if by_range is None else apply_ranges(rows, by_range, ledger)


def _apply_weights(batch: Batch, spans: NDArray[np.void], first_span: Index) -> None:
    """The weight of a message overrides that of its role."""
    for row, record in enumerate(batch):
        for number, message in enumerate(record.messages):
            if message.weight is not None:
                of_row = slice(first_span[row], first_span[row + 1])
                chosen = (spans["message"][of_row] == number) & (spans["rule"][of_row] == Rule.ROLE)
                spans["rule"][of_row][chosen] = Rule.FLAG
                spans["weight"][of_row][chosen] = message.weight


TemplateTextIds = tuple[list[int], list[bool], str]
"""The ids of a text of the template, which of them are control tokens, and the text after the last one."""


def template_text_ids(
    text: str, encoder: ControlEncoder, control_tokens: ControlTokens, text_tokens: ControlTokens
) -> TemplateTextIds:
    """Encode a text that the template writes, such as a header, as in a row."""
    parts: list[tuple[str, bool]] = []
    start = 0
    for match in control_tokens.find(text):
        parts += [(text[start : match.start()], False), (match[0], True)]
        start = match.end()
    parts = [part for part in (*parts, (text[start:], False)) if part[0]]
    tail = parts[-1][0] if parts and not parts[-1][1] else ""
    tail = encoder.strip(tail, parts[-2][0] if len(parts) > 1 else None, None)[0]
    if not encoder.by_sections:
        names = [name for name, _ in parts]
        aliased = [control and name not in text_tokens.ids for name, control in parts]
        whole = encoder.encode_whole(names, aliased)[0].tolist()
        known = {*encoder.ids.values()}
        return whole, [id in known for id in whole], tail
    ids: list[int] = []
    is_control: list[bool] = []
    for at, (part, control) in enumerate(parts):
        before = parts[at - 1][0] if at else None
        after = parts[at + 1][0] if at + 1 < len(parts) else None
        stripped = part if control else encoder.strip(part, before, after)[0]
        encoded = [encoder.ids[part]] if control else encoder.tokenizer.encode(stripped)
        ids += encoded
        is_control += [control] * len(encoded)
    return ids, is_control, tail


@dataclass
class _RowEncoder:
    encoder: ControlEncoder
    text_tokens: ControlTokens
    tags: bool
    straddling: int = 0
    """Tokens that begin before the border of an answer and end after it."""

    def by_sections(self, batch: Batch) -> tuple[Rows, NDArray[np.bool_]]:
        """All rows at once; and which of them have a border without an exact token position."""
        batch, texts, inexact = self._with_text_tokens(batch)
        layouts: list[TokenLayout] = [record.layout for record in batch]
        sections = [section for layout in layouts for section in layout.sections]
        stripped: list[int] | None = None
        if self.encoder.lstrip or self.encoder.rstrip:
            both = [self.encoder.strip(text, one.before, one.after) for text, one in zip(texts, sections, strict=True)]
            texts, stripped = [text for text, _ in both], [count for _, count in both]
        flat, text_start = self.encoder.tokenizer.encode_batch(texts or [""])
        section = _shifted([layout.section for layout in layouts], [len(layout.sections) for layout in layouts])
        border = _shifted([layout.border for layout in layouts], [len(layout.border_text) for layout in layouts])
        in_section = section >= 0
        last = text_start[np.where(in_section, section, 0) + 1]
        first = text_start[np.where(in_section, section, 0)]
        row_of_border = np.repeat(np.arange(len(batch)), [len(layout.border_text) for layout in layouts])
        if len(row_of_border):
            position, exact = self._border_positions(batch, texts, stripped, flat, text_start)
            inexact[row_of_border[~exact]] = True
            inner = np.flatnonzero(border >= 0)
            # A cell begins where the one before it in its section ends.
            last[inner] = first[inner + 1] = position[border[inner]]

        # The known ids of each distinct layout follow the encoded ones.
        distinct = {id(layout): layout for layout in layouts}
        base = dict(zip(distinct, offsets(np.array([len(x.ids) for x in distinct.values()])).tolist(), strict=False))
        known = np.concatenate([layout.lengths for layout in layouts])
        known_start = np.concatenate([layout.starts + base[id(layout)] for layout in layouts])
        starts = np.where(in_section, first, known_start + len(flat))
        lengths = np.where(in_section, last - first, known)
        literals = np.concatenate([layout.ids for layout in distinct.values()])
        return _rows(layouts, lengths, copy_tokens(flat, starts, lengths, literals)), inexact

    def _with_text_tokens(self, batch: Batch) -> tuple[Batch, list[str], NDArray[np.bool_]]:
        """The records, those whose texts hold text tokens with layouts of their own; the texts of all sections.

        And which rows must be encoded as a whole: those with such a token across a border, or with a text that is
        normalized before tokens are found in it.
        """
        texts = _section_texts(batch)
        whole = np.zeros(len(batch), dtype=bool)
        if not self.text_tokens.ids:
            return batch, texts, whole
        first = offsets(np.array([len(record.layout.sections) for record in batch]))
        row = np.repeat(np.arange(len(batch)), np.diff(first)).tolist()
        if self.encoder.normalized is not None:
            whole[[row[at] for at, text in enumerate(texts) if not self.encoder.is_normal(text)]] = True
        holding = self.text_tokens.indices_in(texts)
        if not holding:
            return batch, texts, whole
        out = list(batch)
        for at, numbers in groupby(holding, key=row.__getitem__):
            record, sections = batch[at], [number - int(first[at]) for number in numbers]
            split = split_text_tokens(record.layout, record.slots, sections, self.text_tokens, self.encoder)
            if split is None:
                whole[at] = True
            else:
                out[at] = msgspec.structs.replace(record, layout=split[0], slots=split[1])
        return out, _section_texts(out), whole

    def _border_positions(
        self, batch: Batch, texts: Sequence[str], stripped: Sequence[int] | None, flat: Ids, text_start: Index
    ) -> tuple[Index, NDArray[np.bool_]]:
        """For each border its token position, and whether that is exact.

        A token across the end of the prompt is context. With generation tags it belongs to the answer, as in
        transformers. `stripped`: by text, how many characters a control token before it has stripped.
        """
        layouts: list[TokenLayout] = [record.layout for record in batch]
        which = _shifted([layout.border_section for layout in layouts], [len(layout.sections) for layout in layouts])
        offset = np.concatenate([layout.border_bytes for layout in layouts])
        if stripped is not None or offset.min() < 0:
            borders = [(text, record.slots) for record in batch for text in record.layout.border_text]
            for at in range(len(offset)) if stripped is not None else np.flatnonzero(offset < 0).tolist():
                before = fill_slots(*borders[at])[stripped[which[at]] if stripped is not None else 0 :]
                offset[at] = min(len(before.encode()), len(texts[which[at]].encode()))
        size = np.array([len(text) if (text := texts[at]).isascii() else len(text.encode()) for at in which.tolist()])
        lengths, first, last = self.encoder.tokenizer.byte_lengths(flat), text_start[which], text_start[which + 1]
        position, inside, exact = token_positions(lengths, first, last, size=size, offset=offset)
        straddles = inside & exact & np.concatenate([layout.border_of_answer for layout in layouts])
        self.straddling += int(straddles.sum())
        return np.where(straddles, position - 1, position) if self.tags else position, exact

    def range_weights(self, batch: Batch, rows: Rows) -> TokenWeights | None:
        """What ranges say about the tokens of the rows; None if no record has ranges."""
        ranged = [at for at, record in enumerate(batch) if record.char_weights is not None]
        if not ranged:
            return None
        out = TokenWeights.none(len(rows.ids))
        for at in ranged:
            tokens = slice(rows.row_start[at], rows.row_start[at + 1])
            weights = self._range_weights(batch[at], rows.ids[tokens])
            if weights is None:
                number = next(n for n, message in enumerate(batch[at].messages) if message.train_ranges)
                raise vague(batch[at], number, *REWRITES)
            out.set(tokens, weights)
        return out

    def _range_weights(self, record: LaidOutRecord, ids: Ids) -> TokenWeights | None:
        if self.encoder.by_sections:
            ((split,), _, whole) = self._with_text_tokens([record])
            if not whole[0]:
                weights = section_weights(record.char_weights, split.layout, split.slots, ids, self.encoder)
                if weights is not None:
                    return weights
        if not self.encoder.can_encode_whole:
            return None
        return whole_weights(record.char_weights, *self._parts(record), ids, self.encoder)

    def _parts(self, record: LaidOutRecord) -> tuple[list[str], list[bool]]:
        """The texts of all cells, and which of them are control tokens that no text becomes."""
        texts = [fill_slots(text, record.slots) for text in record.layout.texts]
        return texts, [token is not None and token not in self.text_tokens.ids for token in record.layout.tokens]

    def as_whole(self, record: LaidOutRecord) -> Rows:
        """One row, encoded as one text, with the offsets that `tokenizers` reports."""
        if not self.encoder.can_encode_whole:
            what = "the start of its tokens cannot be located: the tokenizer changes its text"
            raise RecordError(what, "use a tokenizer.json, or leave it out", kind="vague_border")
        layout: TokenLayout = record.layout
        texts, is_control = self._parts(record)
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
        return _rows([layout], np.diff(places), ids)


def _section_texts(batch: Batch) -> list[str]:
    return [fill_slots(section.text, record.slots) for record in batch for section in record.layout.sections]


def _shifted(columns: Sequence[Index], counts: Sequence[int]) -> Index:
    """Columns of indices concatenated, each shifted by the counts before it; negative numbers stay."""
    shift = np.repeat(offsets(np.array(counts))[:-1], [len(column) for column in columns])
    indices = np.concatenate(columns)
    return np.where(indices >= 0, indices + shift, indices)


def _rows(layouts: Sequence[TokenLayout], lengths: Index, ids: Ids) -> Rows:
    """Rows of one conversation each, from the lengths of their cells; origins are empty."""
    spans = joined([layout.spans for layout in layouts])
    base = offsets(np.array([len(layout.tokens) for layout in layouts]))
    first = np.concatenate([layout.first_cell[:-1] + at for layout, at in zip(layouts, base[:-1], strict=True)])
    spans["length"] = np.add.reduceat(lengths, first) if len(first) else 0
    counts = np.array([len(layout.spans) for layout in layouts])
    kept = spans["length"] > 0
    first_span = offsets(kept)[offsets(counts)]
    origins = np.zeros(len(layouts), dtype=EMPTY.origins.dtype)
    return Rows(ids, spans.take(np.flatnonzero(kept)), first_span, origins, np.arange(len(layouts) + 1))
