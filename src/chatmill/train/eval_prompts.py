"""Evaluation prompts: the trained answers of stored conversations, each with the ids before it.

Nothing is rendered again. A model gets the exact prompt it was trained with, whatever format, template or program
wrote it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from chatmill.rows import NO_FILE, OWN_ID, Part, Role, Rows, Table


class EvalPrompt(NamedTuple):
    """A prompt and the answer expected after it."""

    prompt: list[int]
    answer: list[int]
    """The trained ids, up to and including the end token."""
    segment: int
    """The index of the conversation among those of the rows."""


def eval_prompts(rows: Rows, end_ids: Collection[int], left_out: Counter[str] | None = None) -> Iterator[EvalPrompt]:
    """A prompt for every answer that is trained from its first token to an end token.

    segment   <usr> Hi <eot> <asst>   Hello <eot>
              prompt -------------    answer ----

    Others are counted in `left_out` by reason: partly trained, unfinished, or with nothing before them.
    """
    reasons = left_out if left_out is not None else Counter()
    for segment in range(len(rows.origins)):
        first, last = rows.first_span[segment], rows.first_span[segment + 1]
        begin = int(rows.span_start[first])
        for first_span, last_span in _answers(rows.spans[first:last]):
            start, stop = (int(rows.span_start[first + span]) for span in (first_span, last_span))
            spans = rows.spans[first + first_span : first + last_span]
            answer = rows.ids[start:stop].tolist()
            size = next((at for at, id in enumerate(answer, 1) if id in end_ids), None)
            if not (spans["weight"] > 0).all() or (spans["target"] != OWN_ID).any():
                reasons["partly_trained"] += 1
            elif size is None:
                reasons["unfinished"] += 1
            elif start == begin:
                reasons["nothing_before"] += 1
            else:
                yield EvalPrompt(rows.ids[begin:start].tolist(), answer[:size], segment)


def _answers(spans: Table) -> Iterator[tuple[int, int]]:
    """The span ranges of a conversation's trained answers: assistant turns without their header.

    In data without roles, which other programs wrote, every trained span is an answer.
    """
    trained = np.flatnonzero(spans["weight"] > 0)
    if not len(trained):
        return
    known = spans["role"] != Role.NONE
    turn = np.zeros(len(spans), dtype=np.int64)
    changes = (spans["message"][1:] != spans["message"][:-1]) | (spans["role"][1:] != spans["role"][:-1])
    np.cumsum(changes | ~known[1:], out=turn[1:])
    for number in dict.fromkeys(turn[trained].tolist()):
        of_turn = np.flatnonzero(turn == number)
        if spans["role"][of_turn[0]] not in (Role.ASSISTANT, Role.NONE):
            continue
        body = of_turn[spans["part"][of_turn] != Part.OPEN]
        ending = trained[turn[trained] == number][-1]
        if len(body) and body[0] <= ending:
            yield int(body[0]), int(ending) + 1


class RowOrigin(NamedTuple):
    """Where a conversation came from."""

    source: str
    place: str
    """file:line, or empty if unknown."""


def origins(rows: Rows, unnamed: str) -> list[RowOrigin | None]:
    """The origin of each conversation; None for padding and for one without a token.

    Conversations of unknown origin get the source `unnamed`.
    """
    first, last = rows.first_span[:-1], rows.first_span[1:]
    nothing = first == last
    nothing[~nothing] = rows.spans["part"][first[~nothing]] == Part.PAD
    return [
        None
        if none
        else RowOrigin(unnamed, "")
        if file == NO_FILE
        else RowOrigin(rows.files[file].source, f"{rows.files[file].path}:{line}")
        for none, file, line in zip(
            nothing.tolist(), *(rows.origins[name].tolist() for name in ("file", "line")), strict=True
        )
    ]
