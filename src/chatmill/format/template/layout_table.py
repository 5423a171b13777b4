"""Store the token layouts of many rows in columns, to assemble all rows of a batch together.

rows        0  1  2  3            which layout each row has: [0 1 0 0]
layouts     [<|im_start|> user\\n · <|im_end|> \\n …]  [<|im_start|> system\\n · …]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.layout import SimpleSections, TokenLayout
from chatmill.format.template.tracing.trace import TextItem
from chatmill.rows import EMPTY, Ids, Index, Rows, Table, joined, offsets, ragged_index
from chatmill.tokenizer.control_encoder import ControlEncoder

MAX_KINDS = 2**8
"""Maximum length of `LayoutTable.around` for batches whose texts are stored in columns."""
MAX_KEPT = 2**14
"""Maximum number of cells in a layout table that is kept for the next batch."""


def simple_sections(
    layout: TokenLayout, num_texts: int, text_tokens: ControlTokens, encoder: ControlEncoder
) -> SimpleSections | None:
    """Return the sections of a token layout if each has exactly one slot for message text, otherwise None."""
    slots: list[int] = []
    around: list[tuple[str, str]] = []
    takes_columns = encoder.by_sections and not encoder.normalizes and encoder.normalized is None
    for section in layout.sections:
        at = [number for number, item in enumerate(section.text) if isinstance(item, int)]
        if len(at) != 1:
            return None
        before, after = _literals(section.text[: at[0]]), _literals(section.text[at[0] + 1 :])
        slot = section.text[at[0]]
        assert isinstance(slot, int)
        slots.append(slot)
        around.append((before, after))
        stripped = section.before in encoder.rstrip or section.after in encoder.lstrip
        takes_columns &= slot < num_texts and not stripped and not text_tokens.may_touch(before, after)
    literals = [len((before + after).encode()) for before, after in around]
    return SimpleSections(
        tuple(slots),
        tuple(around),
        np.array(literals, dtype=np.int64),
        np.array([len(_literals(text).encode()) for text in layout.border_text], dtype=np.int64),
        np.array([any(isinstance(item, int) for item in text) for text in layout.border_text], dtype=bool),
        takes_columns,
    )


def _literals(text: Sequence[TextItem]) -> str:
    return "".join(item for item in text if isinstance(item, str))


@dataclass(frozen=True, eq=False)
class LayoutTable:
    """Several token layouts, stored in columns.

    The `first_…` columns contain the offsets of each layout's cells, sections, boundaries and spans.
    """

    first_cell: Index
    section: Index
    border: Index
    lengths: Index
    starts: Index
    """Offset in `ids` of the known ids of each cell."""
    ids: Ids
    first_section: Index
    slot: Index
    """The slot for message text in each section, or -1 in a layout without simple sections."""
    kind: NDArray[np.uint8]
    """For each section with text from columns, the index in `around` of the literals around the text."""
    around: list[tuple[str, str]]
    literal_bytes: Index
    first_border: Index
    border_section: Index
    border_bytes: Index
    """Size in bytes of the literals before each boundary, or -1 if this size depends on slots."""
    after_text: NDArray[np.bool_]
    border_of_answer: NDArray[np.bool_]
    first_span: Index
    spans: Table
    span_cell: Index
    """Index of the first cell of each span, relative to its layout."""


_Kept = tuple[LayoutTable, dict[int, tuple[int, TokenLayout]]]
"""A table, and a mapping from the `id` of each layout to its index in the table and the layout itself.

Storing the layouts keeps them alive, so that no other object gets the same `id`.
"""


class LayoutTables:
    """Builds tables of token layouts, and keeps the last table, because the next batch often has the same layouts."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def rows(self, layouts: Sequence[TokenLayout], which: Index) -> RowCells:
        """Return a layout table, and the index of each row's layout in the table. `which` contains the index in
        `layouts` for each row.
        """
        by_id = {id(layout): layout for layout in layouts}
        # Read `_kept` only once, because another thread may replace it at any time.
        kept = self._kept
        if kept is None or not by_id.keys() <= kept[1].keys():
            self._kept = kept = _with(kept, by_id)
        table, numbers = kept
        return RowCells(table, np.array([numbers[id(layout)][0] for layout in layouts], dtype=np.int64)[which])


def _with(kept: _Kept | None, by_id: dict[int, TokenLayout]) -> _Kept:
    """Return the kept table with new layouts added, or a table of only the new layouts if it would become too large."""
    every = {key: layout for key, (_, layout) in kept[1].items()} | by_id if kept else by_id
    if sum(len(layout.tokens) for layout in every.values()) > MAX_KEPT:
        every = by_id
    table = layout_table([*every.values()])
    if len(table.around) > MAX_KINDS and len(every) > len(by_id):
        every, table = by_id, layout_table([*by_id.values()])
    return table, {key: (at, layout) for at, (key, layout) in enumerate(every.items())}


def layout_table(layouts: Sequence[TokenLayout]) -> LayoutTable:
    def column(name: str) -> NDArray[np.int64]:
        return np.concatenate([getattr(layout, name) for layout in layouts])

    kinds: dict[tuple[str, str], int] = {}
    slot, kind, literal_bytes, border_bytes, after_text = [], [], [], [], []
    for layout in layouts:
        simple = layout.simple
        count = len(layout.sections)
        if simple is None:
            slot.append(np.full(count, -1, dtype=np.int64))
            literal_bytes.append(np.zeros(count, dtype=np.int64))
            border_bytes.append(layout.border_bytes)
            after_text.append(np.zeros(len(layout.border_text), dtype=bool))
        else:
            slot.append(np.array(simple.slots, dtype=np.int64))
            literal_bytes.append(simple.literal_bytes)
            border_bytes.append(simple.border_bytes)
            after_text.append(simple.after_text)
        around = simple.around if simple is not None and simple.takes_columns else (("", ""),) * count
        kind += [kinds.setdefault(each, len(kinds)) for each in around]
    known = offsets(np.array([len(layout.ids) for layout in layouts]))
    cells = np.array([len(layout.tokens) for layout in layouts])
    return LayoutTable(
        first_cell=offsets(cells),
        section=column("section"),
        border=column("border"),
        lengths=column("lengths"),
        starts=column("starts") + np.repeat(known[:-1], cells),
        ids=np.concatenate([layout.ids for layout in layouts]),
        first_section=offsets(np.array([len(layout.sections) for layout in layouts])),
        slot=np.concatenate(slot),
        kind=np.array(kind, dtype=np.int64).astype(np.uint8),
        around=list(kinds),
        literal_bytes=np.concatenate(literal_bytes),
        first_border=offsets(np.array([len(layout.border_text) for layout in layouts])),
        border_section=column("border_section"),
        border_bytes=np.concatenate(border_bytes),
        after_text=np.concatenate(after_text),
        border_of_answer=column("border_of_answer").astype(bool),
        first_span=offsets(np.array([len(layout.spans) for layout in layouts])),
        spans=joined([layout.spans for layout in layouts]),
        span_cell=np.concatenate([layout.first_cell[:-1] for layout in layouts]),
    )


@dataclass(frozen=True, eq=False)
class RowCells:
    """The token layouts of consecutive rows: a table of layouts, and the index of each row's layout."""

    table: LayoutTable
    which: Index
    """Index of the layout of each row."""

    def items(self, first: Index) -> tuple[Index, Index]:
        """Return the indices in a table column for each row, concatenated, and the number of indices per row."""
        counts = np.diff(first)[self.which]
        return ragged_index(first[self.which], counts), counts

    def rows(self, lengths: Index, ids: Ids) -> Rows:
        """Build one row per conversation from token ids and the length of each cell. The rows have empty origins."""
        table = self.table
        numbers, counts = self.items(table.first_span)
        spans = table.spans.take(numbers)
        if len(spans):
            first_cell = offsets(np.diff(table.first_cell)[self.which])[:-1]
            spans["length"] = np.add.reduceat(lengths, table.span_cell[numbers] + np.repeat(first_cell, counts))
        first_span = offsets(counts)
        kept = spans["length"] > 0
        if not kept.all():
            first_span, spans = offsets(kept)[first_span], spans.take(np.flatnonzero(kept))
        origins = np.zeros(len(counts), dtype=EMPTY.origins.dtype)
        return Rows(ids, spans, first_span, origins, np.arange(len(counts) + 1))
