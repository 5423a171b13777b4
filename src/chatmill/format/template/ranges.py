"""Apply `train_ranges` with a chat template: map characters of the message content to the rendered text, and then to
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chatmill.format.template.answers.derived import DerivedAnswers
from chatmill.format.template.layout import TokenLayout
from chatmill.format.template.tracing.trace import fill_slots
from chatmill.format.train_ranges import (
    CharWeights,
    TokenPlaces,
    TokenWeights,
    by_byte,
    char_weights,
    spelled_places,
    token_weights,
    vague,
)
from chatmill.records import Record
from chatmill.rows import Ids, offsets
from chatmill.tokenizer.control_encoder import ControlEncoder

LEAVE_OUT = "remove train_ranges, or use a template that renders the content unchanged"


def rendered_weights(record: Record, derived: DerivedAnswers) -> CharWeights | None:
    """Return the weight of each character of the rendered text, or None if no answer has `train_ranges`.

    Raise `RecordError` if the template changes or drops a character in a range. Only whitespace at the start and end of
    the content may be dropped.
    """
    answers = {answer.message for answer in derived.answers}
    by_message = {at: char_weights(record.messages[at]) for at in answers if record.messages[at].train_ranges}
    if not by_message:
        return None
    written = {at: np.zeros(len(weights), dtype=bool) for at, weights in by_message.items()}
    out = np.full(len(derived.rendering.text), np.nan, dtype=np.float32)
    place = 0
    for piece in derived.rendering.pieces:
        source = piece.source
        if source is not None and source.path == ("content",) and source.message in by_message:
            number, start, stop = source.message, piece.start, piece.start + len(piece.text)
            if start < 0 or record.messages[number].content[start:stop] != piece.text:
                raise vague(record, number, "the chat template changes the content", LEAVE_OUT)
            out[place : place + len(piece.text)] = by_message[number][start:stop]
            written[number][start:stop] = True
        place += len(piece.text)
    for number, weights in by_message.items():
        lost = _lost(record.messages[number].content, ~np.isnan(weights) & ~written[number])
        if lost is not None:
            raise vague(record, number, f"the chat template drops character {lost} of the content", LEAVE_OUT)
    return out


def _lost(content: str, missing: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int | None:
    """Return the index of the first missing character, ignoring whitespace at the start and end of the content."""
    trimmed = np.ones(len(content), dtype=bool)
    trimmed[len(content) - len(content.lstrip()) : len(content.rstrip())] = False
    lost = np.flatnonzero(missing & ~trimmed)
    return int(lost[0]) if len(lost) else None


def section_weights(
    weights: CharWeights, layout: TokenLayout, slots: Sequence[str], ids: Ids, encoder: ControlEncoder
) -> TokenWeights | None:
    """Return the token weights of a row that was encoded section by section, or None if its tokens cannot be mapped to
    its text.
    """
    starts = offsets(np.array([len(fill_slots(text, slots)) for text in layout.texts]))
    out = TokenWeights.none(len(ids))
    at = 0
    for cell, (token, section) in enumerate(zip(layout.tokens, layout.section.tolist(), strict=True)):
        if section < 0:
            size = int(layout.lengths[cell])
            if token is not None:
                whole = TokenPlaces(starts[cell : cell + 1], starts[cell + 1 : cell + 2])
                out.set(slice(at, at + size), token_weights(weights, whole))
            at += size
        elif cell == layout.sections[section].first_cell:
            text, before, after, first, _ = layout.sections[section]
            filled, stripped = encoder.strip(fill_slots(text, slots), before, after)
            encoded = encoder.tokenizer.encode(filled)
            if ids[at : at + len(encoded)].tolist() != encoded:
                return None
            begin = int(starts[first]) + stripped
            of_text = weights[begin : begin + len(filled)]
            if not np.isnan(of_text).all():
                places = spelled_places(filled, encoded, encoder.tokenizer)
                if places is None:
                    return None
                out.set(slice(at, at + len(encoded)), token_weights(by_byte(filled, of_text), places))
            at += len(encoded)
    return out if at == len(ids) else None


def whole_weights(
    weights: CharWeights, texts: Sequence[str], is_control: Sequence[bool], ids: Ids, encoder: ControlEncoder
) -> TokenWeights | None:
    """Return the token weights of a row that was encoded as a whole, or None if the `tokenizers` library returns other
    token ids.
    """
    whole, begin, end = encoder.whole_places(texts, is_control)
    return token_weights(weights, TokenPlaces(begin, end)) if whole.tolist() == ids.tolist() else None
