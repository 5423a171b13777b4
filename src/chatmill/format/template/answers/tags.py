"""Answers by tags: what a template encloses in `{% generation %}`, taken at its word."""

from __future__ import annotations

from collections.abc import Collection

from chatmill.format.template.answers.answer_spans import AnswerSpan
from chatmill.format.template.tracing.traced_template import NOBODY, Rendering


def answers_by_tags(full: Rendering, assistants: Collection[int]) -> list[AnswerSpan]:
    """The stretches between tags, each as an answer of the message it was written for."""
    turns: list[AnswerSpan] = []
    place = 0
    open_at: int | None = None
    message = NOBODY
    for piece, owner in zip(full.pieces, full.owners, strict=True):
        of = piece.source.message if piece.source is not None and piece.source.message in assistants else owner
        if open_at is not None and (not piece.tagged or (owner != NOBODY and message not in (NOBODY, owner))):
            turns.append(AnswerSpan(message, open_at, place, False))
            open_at, message = None, NOBODY
        if piece.tagged:
            open_at = place if open_at is None else open_at
            message = of if message == NOBODY else message
        place += len(piece.text)
    if open_at is not None:
        turns.append(AnswerSpan(message, open_at, place, False))
    last = max(assistants, default=NOBODY)
    return [turn if turn.message in assistants else turn._replace(message=last) for turn in turns]
