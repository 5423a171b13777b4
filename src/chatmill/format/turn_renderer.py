"""Render a batch of conversations to token ids and loss weights, with a preset or a TOML format.

Each message consists of the following pieces:

    <|im_start|> user\\nHello <|im_end|> \\n     <|im_start|>assistant\\n  Hi   <|im_end|> \\n
    open         body         close      after   open                     body close      after

The piece `begin` precedes the first message of a conversation, and the piece `end` follows the last message. Messages
of the same role differ only in the token ids of `body`, and the bodies of all messages are encoded in one call. All
text between two control tokens is encoded together, except that the assistant header is encoded separately from the
body. A generation prompt ends with the assistant header, so its token ids are a prefix of the token ids of the whole
conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.answers import mask_answers
from chatmill.errors import RecordError
from chatmill.format.chat_format import (
    AFTER,
    BEGIN,
    BODY,
    CLOSE,
    END,
    OPEN,
    PARTS,
    ROLE_CODES,
    ChatFormat,
    CompiledFormat,
)
from chatmill.format.messages import MessageColumns, content_place, message_columns, split_bodies, text_runs
from chatmill.format.renderer import OnReject, Renderer, apply_record_weights, origins_of
from chatmill.format.slices import render_slices
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.text_format import adds_space, joined, text_fault
from chatmill.format.train_ranges import (
    REWRITES,
    TokenWeights,
    apply_ranges,
    by_byte,
    char_weights,
    spelled_places,
    token_weights,
    vague,
)
from chatmill.ledger import Ledger
from chatmill.records import NO_ROLE, ROLES, ChatColumns, Record
from chatmill.records.record import is_layout
from chatmill.rows import (
    EMPTY,
    NO_MESSAGE,
    OWN_ID,
    SPAN,
    Ids,
    Index,
    Role,
    Rows,
    Rule,
    TrainOn,
    copy_tokens,
    offsets,
    ragged_index,
    weigh,
)
from chatmill.tokenizer import Tokenizer

PIECES = len(PARTS)


@dataclass(frozen=True)
class TurnRenderer:
    """Renders conversations with a `ChatFormat` and a tokenizer. The tokenizer must have been opened with the control
    tokens of the format.
    """

    format: ChatFormat
    tokenizer: Tokenizer
    masks_answers: bool = True
    """Whether `render` applies the `requires_user` mask. `before_cutting` sets this field to False."""
    uses_date = False

    @property
    def eot(self) -> str:
        return self.format.eot

    @cached_property
    def compiled(self) -> CompiledFormat:
        return CompiledFormat(self.format, self.tokenizer)

    @cached_property
    def _joins(self) -> bool:
        """Whether a prompt and its completion are concatenated before they are encoded."""
        return not self.format.has_turns and adds_space(self.tokenizer)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self.tokenizer.control_ids)

    def _count_control_texts(self, records: Sequence[Record]) -> int:
        """Count the records whose messages contain the characters of a control token, which are encoded as plain
        text.
        """
        texts = ([message.content for message in record.messages] for record in records)
        return sum(map(self._control_tokens.any_in, texts))

    def to_json(self) -> dict[str, Any]:
        return self.format.to_json()

    def renderable(
        self, records: Iterable[Record], on_reject: OnReject | None = None, *, last_only: bool = False
    ) -> Iterator[Record]:
        writes_all = self.format.turns.keys() >= set(ROLES)
        for record in records:
            try:
                if record.is_text or not writes_all:
                    self._check(record)
                for message in record.messages:
                    if message.train_ranges or (self._joins and len(record.messages) > 1):
                        # Encode the record to check that its ranges can be mapped to tokens.
                        self.render([record])
                        break
            except RecordError as fault:
                if on_reject is None:
                    raise
                on_reject(fault)
            else:
                yield record

    def _check(self, record: Record) -> None:
        """Raise a `RecordError` if the format cannot render the record."""
        if fault := text_fault(record, self.format):
            raise fault.at(record.file, record.line, record.id)
        turns = self.format.turns
        for number, message in enumerate(record.messages):
            if message.role not in turns and message.role != NO_ROLE:
                raise RecordError(
                    f"message {number} has role {message.role}, which the format {self.format.name} does not define",
                    f"expected {', '.join(turns)}; or add [{message.role}] to the format",
                    kind="role_not_in_format",
                ).at(record.file, record.line, record.id)

    def lay_out_columns(self, columns: ChatColumns) -> ChatColumns | list[Record]:
        has_turn = np.array([role in self.format.turns for role in ROLES])
        is_plain = self.format.default_system is None and self.format.has_turns
        return columns if is_plain and has_turn[columns.roles].all() else list(columns)

    def warm_up(self, blocks: Iterable[ChatColumns], *, processes: int) -> None:
        """Do nothing, because this renderer has no caches."""

    def render(
        self,
        records: Sequence[Record],
        *,
        train_on: TrainOn = "assistant",
        ledger: Ledger | None = None,
        threads: int | None = None,
    ) -> Rows:
        render = partial(self._render, train_on)
        return render_slices(render, records, ledger=ledger, threads=threads) if records else EMPTY

    def _render(self, train_on: TrainOn, records: Sequence[Record], ledger: Ledger | None) -> Rows:
        if ledger is not None and not isinstance(records, ChatColumns):
            unused = sum(bool(record.template_kwargs) for record in records)
            if unused:
                ledger.add("noted", "template_kwargs_unused", rows=unused)
        if not self.format.has_turns:
            if ledger is not None and (count := self._count_control_texts(records)):
                ledger.add("noted", "control_text", rows=count)
            if self._joins:
                return self._render_joined(records, train_on, ledger)
        columns = message_columns(records, self.format, self.compiled)
        if columns.layout and ledger is not None:
            ledger.add("noted", "whitespace_left_out", rows=columns.layout)
        rows = _rows(self, columns, train_on, ledger)
        apply_record_weights(records, rows.spans, rows.first_span)
        return mask_answers(rows) if self.format.requires_user and self.masks_answers else rows

    def _render_joined(self, records: Sequence[Record], train_on: TrainOn, ledger: Ledger | None) -> Rows:
        """Concatenate each prompt and its completion before encoding. All spans refer to the message of the
        completion.
        """
        texts = [joined(record, train_on) for record in records]
        rows = _rows(self, message_columns(texts, self.format, self.compiled), train_on, ledger)
        numbers = np.repeat([len(record.messages) - 1 for record in records], np.diff(rows.first_span))
        in_message = rows.spans["message"] != NO_MESSAGE
        rows.spans["message"][in_message] = numbers[in_message]
        apply_record_weights(records, rows.spans, rows.first_span)
        return rows

    render_chunks = Renderer.render_chunks

    def prompt_ids(self, record: Record) -> list[int]:
        ids: list[int] = self.render(list(self.renderable([record]))).ids.tolist()
        end = len(self.compiled.fixed("assistant", END))
        return ids[: len(ids) - end] + self.compiled.fixed("assistant", OPEN)


def requires_user(renderer: Renderer) -> bool:
    """Whether the loss mask includes only complete answers that follow a complete user turn in the same row."""
    return isinstance(renderer, TurnRenderer) and renderer.format.requires_user


def before_cutting(renderer: Renderer) -> Renderer:
    """Return a renderer that does not apply the `requires_user` mask, so that the mask can be applied after
    truncation.
    """
    return replace(renderer, masks_answers=False) if isinstance(renderer, TurnRenderer) else renderer


def _rows(renderer: TurnRenderer, columns: MessageColumns, train_on: TrainOn, ledger: Ledger | None) -> Rows:
    """Encode the texts of all messages in one call, and assemble the token ids and spans of the rows."""
    compiled = renderer.compiled
    flat, text_start = renderer.tokenizer.encode_batch(columns.texts)
    by_range = _range_weights(columns, flat, text_start, renderer.tokenizer)
    roles, bodies, first_message, text_of = columns.roles, columns.bodies, columns.first_message, columns.text_of
    # The body of a message is one piece, except in messages that are listed in `bodies`.
    widths = np.full(len(roles), PIECES, dtype=np.int64)
    for at, body in bodies.items():
        widths[at] = PIECES - 1 + len(body)
    base = offsets(widths)
    lengths, starts = np.empty((2, base[-1]), dtype=np.int64)
    parts, rules = np.empty((2, base[-1]), dtype=np.uint8)

    def places(piece: int) -> Index | slice:
        """Return the indices of one piece of every message, such as `open`. Return a slice if possible, because
        indexing with a slice is faster.
        """
        if not bodies:
            return slice(piece, None, PIECES)
        return base[:-1] + piece if piece <= BODY else base[1:] + (piece - PIECES)

    for piece in range(PIECES):
        here = places(piece)
        lengths[here] = compiled.lengths[roles, piece]
        starts[here] = compiled.starts[roles, piece] + len(flat)
        parts[here] = PARTS[piece]
        rules[here] = compiled.rules[piece]
    # Only the first message of a conversation has `begin`, and only the last has `end`.
    is_first, is_last = np.zeros((2, len(roles)), dtype=bool)
    is_first[first_message[:-1]] = True
    is_last[first_message[1:] - 1] = True
    lengths[base[:-1][~is_first]] = 0
    lengths[base[1:][~is_last] - 1] = 0

    lengths[places(BODY)] = text_start[text_of + 1] - text_start[text_of]
    starts[places(BODY)] = text_start[text_of]
    # Copy texts that occur more than once from a pool, which is stored after the other ids. All other texts are then
    # read in order.
    again = np.flatnonzero(text_of != np.arange(len(text_of)))
    recurring, which = np.unique(text_of[again], return_inverse=True)
    size = text_start[recurring + 1] - text_start[recurring]
    pool = copy_tokens(flat, text_start[recurring], size)
    starts[base[again] + BODY] = (len(flat) + len(compiled.literals) + offsets(size))[which]
    if bodies:
        inside = np.concatenate([np.arange(len(body)) + base[at] + BODY for at, body in bodies.items()])
        split = split_bodies([*bodies.values()], flat, text_start, renderer.tokenizer, compiled.control_start)
        starts[inside], lengths[inside], parts[inside] = split
        rules[inside] = compiled.rules[BODY]

    weights = np.zeros(base[-1], dtype=np.float32)
    for at in columns.outside:
        whitespace = is_layout(columns.messages[at])
        rules[base[at] + BODY : base[at + 1] - 1] = Rule.WHITESPACE if whitespace else Rule.OUTSIDE
    for at in columns.extended:
        message = columns.messages[at]
        pieces = slice(base[at], base[at + 1])
        by_role = rules[pieces] == Rule.ROLE
        if not message.complete:
            rules[pieces][by_role] = Rule.UNFINISHED
            lengths[base[at + 1] - PIECES + CLOSE : base[at + 1] - PIECES + AFTER + 1] = 0
        elif message.weight is not None:
            rules[pieces][by_role] = Rule.FLAG
            weights[pieces][by_role] = message.weight

    kept = np.flatnonzero(lengths)
    spans = np.zeros(len(kept), dtype=SPAN)
    numbers = np.repeat(_message_numbers(first_message, columns.added), widths)
    numbers[places(BEGIN)] = NO_MESSAGE
    span_roles = np.repeat(np.where(roles == ROLE_CODES[NO_ROLE], np.uint8(Role.NONE), roles), widths)
    span_roles[places(BEGIN)] = span_roles[places(END)] = Role.NONE
    spans["target"] = OWN_ID
    by_field = {
        "length": lengths,
        "message": numbers,
        "weight": weights,
        "role": span_roles,
        "part": parts,
        "rule": rules,
    }
    for field, values in by_field.items():
        spans[field] = values.take(kept)
    first_span = np.searchsorted(kept, base[first_message])
    weigh(spans, first_span, train_on)
    origins, files = origins_of(columns.records)
    ids = copy_tokens(flat, starts, lengths, np.concatenate([compiled.literals, pool]))
    rows = Rows(ids, spans, first_span, origins, np.arange(len(columns.records) + 1, dtype=np.int64), files)
    return rows if by_range is None else apply_ranges(rows, by_range.take(ragged_index(starts, lengths)), ledger)


def _range_weights(columns: MessageColumns, flat: Ids, text_start: Index, tokenizer: Tokenizer) -> TokenWeights | None:
    """Return the token weights that follow from the `train_ranges` of messages, or None if no message has
    `train_ranges`.

    Raise a `RecordError` if the tokens of a message with `train_ranges` do not decode to the text of the message.
    """
    ranged = {at for at in columns.extended if columns.messages[at].train_ranges}
    if not ranged:
        return None
    weights = TokenWeights.none(len(flat))
    counts = {at: len(text_runs(body)) for at, body in columns.bodies.items()}
    first_run = len(columns.texts) - sum(counts.values())
    for at, body in columns.bodies.items():
        if at in ranged:
            number, offset = content_place(body)
            run, message = first_run + number, columns.messages[at]
            text, tokens = columns.texts[run], slice(text_start[run], text_start[run + 1])
            of_text = np.full(len(text), np.nan, dtype=np.float32)
            of_text[offset : offset + len(message.content)] = char_weights(message)
            places = spelled_places(text, flat[tokens].tolist(), tokenizer)
            if places is None:
                row = int(np.searchsorted(columns.first_message, at, side="right")) - 1
                number = at - int(columns.first_message[row] + columns.added[row])
                raise vague(columns.records[row], number, *REWRITES)
            weights.set(tokens, token_weights(by_byte(text, of_text), places))
        first_run += counts[at]
    return weights


def _message_numbers(first_message: Index, added: Index) -> NDArray[np.uint32]:
    """Return the index of each message in its record, or `NO_MESSAGE` for a system message that the format adds."""
    counts = np.diff(first_message)
    number = np.arange(first_message[-1], dtype=np.int64) - np.repeat(first_message[:-1] + added, counts)
    return number.astype(np.uint32)
