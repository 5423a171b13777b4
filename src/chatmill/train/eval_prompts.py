"""Questions: the answers of stored conversations, each with the ids that stood before it in training.

Nothing is rendered anew. A model is asked with the very prompt it was trained behind, whatever format, template or
program wrote it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from chatmill.rows import NO_FILE, OWN_ID, Part, Role, Rows, Table


class EvalPrompt(NamedTuple):
    """What a model is to say after a prompt."""

    prompt: list[int]
    answer: list[int]
    """The ids that were trained, up to the end token, which is the last."""
    segment: int
    """The conversation, counted over the rows it was taken from."""


def questions(rows: Rows, ends: Collection[int], left_out: Counter[str] | None = None) -> Iterator[EvalPrompt]:
    """Every answer that is trained from its first token to an end token.

    segment   <usr> Hi <eot> <asst>   Hello <eot>
              prompt -------------    answer ----

    Others are counted in `left_out` by their reason: partly trained, unfinished, or with nothing before them.
    """
    reasons = left_out if left_out is not None else Counter()
    for segment in range(len(rows.origins)):
        first, last = rows.first_span[segment], rows.first_span[segment + 1]
        begin = int(rows.span_start[first])
        for one, other in _answers(rows.spans[first:last]):
            start, stop = int(rows.span_start[first + one]), int(rows.span_start[first + other])
            spans = rows.spans[first + one : first + other]
            answer = rows.ids[start:stop].tolist()
            size = next((at for at, id in enumerate(answer, 1) if id in ends), None)
            if not (spans["weight"] > 0).all() or (spans["target"] != OWN_ID).any():
                reasons["partly_trained"] += 1
            elif size is None:
                reasons["unfinished"] += 1
            elif start == begin:
                reasons["nothing_before"] += 1
            else:
                yield EvalPrompt(rows.ids[begin:start].tolist(), answer[:size], segment)


def _answers(spans: Table) -> Iterator[tuple[int, int]]:
    """Where the trained answers of a conversation lie among its spans: what an assistant says, without its opener.

    Where nobody is said to speak, in what other programs wrote, every trained span is one.
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
        said = of_turn[spans["part"][of_turn] != Part.OPEN]
        ending = trained[turn[trained] == number][-1]
        if len(said) and said[0] <= ending:
            yield int(said[0]), int(ending) + 1


class RowOrigin(NamedTuple):
    """Where a conversation came from."""

    source: str
    place: str
    """file:line, or nothing where that is not known."""


def origins(rows: Rows, unnamed: str) -> list[RowOrigin | None]:
    """The origin of each conversation; None for padding and for one without a token.

    Those that are not known are of the source `unnamed`.
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
