"""Prompts of rollouts as rows: the same ids in generation and in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from chatmill.errors import DataError
from chatmill.fit import GatherPlan, gather
from chatmill.format import ChatFormat, TurnRenderer
from chatmill.format.compiled import END, OPEN
from chatmill.records import Record
from chatmill.rollout.target import one_row
from chatmill.rows import OWN_ID, SPAN, Index, Part, Role, Rows, Rule, concat
from chatmill.tokenizer import Tokenizer


def prompt_rows(records: Sequence[Record], format: ChatFormat, tokenizer: Tokenizer) -> Rows:
    """One row a record: its messages and the header of the answer, all of it context.

    The ids of a row are what `Renderer.prompt_ids` gives for its record.
    """
    renderer = TurnRenderer(format, tokenizer)
    rendered = renderer.render(records)
    opening = np.array(renderer.compiled.fixed("assistant", OPEN), dtype=np.uint32)
    ending = len(renderer.compiled.fixed("assistant", END))
    spans = np.zeros(1, dtype=SPAN)
    spans["length"], spans["target"] = len(opening), OWN_ID
    spans["role"], spans["part"] = Role.ASSISTANT, Part.OPEN
    count, here = len(rendered), len(rendered.ids)
    start = np.stack([rendered.row_start[:-1], np.full(count, here)], axis=1)
    stop = np.stack([rendered.row_start[1:] - ending, np.full(count, here + len(opening))], axis=1)
    rows = gather(rendered, _two_pieces_a_row(start, stop), one_row(opening, spans))
    rows.spans["message"][rows.first_span[1:] - 1] = [len(record.messages) for record in records]
    rows.spans["weight"], rows.spans["rule"] = 0, Rule.PROMPT
    return rows


def _two_pieces_a_row(start: Index, stop: Index) -> GatherPlan:
    """Rows of two pieces, (rows, 2), each with the origin of the row of the same number."""
    numbers = np.arange(len(start) + 1, dtype=np.int64)
    return GatherPlan(
        start=start.ravel(), stop=stop.ravel(), first_piece=2 * numbers, origin=numbers[:-1], first_segment=numbers
    )


def join_prompts(prompts: Rows, answers: Sequence[Rows]) -> Rows:
    """Each prompt followed by its answer, as one conversation with the origin of the prompt."""
    if len(prompts) != len(answers):
        raise DataError(f"{len(prompts)} prompts and {len(answers)} answers; expected one answer a prompt")
    source = concat([prompts, *answers])
    count = len(prompts)
    both = np.stack([np.arange(count), np.arange(count) + count], axis=1)
    rows = gather(source, _two_pieces_a_row(source.row_start[:-1][both], source.row_start[1:][both]))
    # The answer is the message whose header ends the prompt.
    opened = prompts.spans["message"][prompts.first_span[1:] - 1]
    of_answer = rows.spans["rule"] != Rule.PROMPT
    rows.spans["message"] = np.where(of_answer, np.repeat(opened, np.diff(rows.first_span)), rows.spans["message"])
    return rows


def check_prompts(
    rows: Rows, prompts: Sequence[Sequence[int]], where: Callable[[int], str] = lambda row: f"row {row}"
) -> None:
    """Raise unless every row starts with the prompt it was generated from and trains none of it."""
    mask = rows.mask()
    for row, (start, prompt) in enumerate(zip(rows.row_start[:-1].tolist(), prompts, strict=True)):
        stop = start + len(prompt)
        if rows.ids[start:stop].tolist() != list(prompt):
            raise DataError(
                f"{where(row)}: training would use another prompt than generation did; "
                "use the format, the tokenizer and the messages that it was generated with"
            )
        if mask[start:stop].any():
            token = int(mask[start:stop].argmax())
            raise DataError(f"{where(row)}: token {token} of the prompt is trained; only the answer may be")
