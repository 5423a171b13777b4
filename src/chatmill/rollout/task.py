"""Render prompts, true answers and the targets of rollouts as rows of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from chatmill.errors import DataError, one_line
from chatmill.fit import GatherPlan, gather
from chatmill.format import TEMPLATE, TemplateRenderer, TurnRenderer, load_format, open_renderer, resolve_format
from chatmill.format.chat_format import END, OPEN
from chatmill.records import Record, record_key
from chatmill.rollout.files import GroundTruth, Rollout
from chatmill.rollout.match import GATE
from chatmill.rollout.schema import Detection, Fields, Schema
from chatmill.rollout.target import Border, Target, build_answer, build_target
from chatmill.rollout.trained_parts import EVEN, PartWeights, one_row
from chatmill.rollout.vocabulary import COORDINATES, vocabulary_of
from chatmill.rows import OWN_ID, SPAN, Index, Part, Role, Rows, Rule, concat
from chatmill.tokenizer import Tokenizer, open_tokenizer


@dataclass(frozen=True)
class Task:
    """The renderer and the answer schema of a rollout task."""

    renderer: TurnRenderer | TemplateRenderer
    schema: Schema
    add_tokens: bool

    @property
    def tokenizer(self) -> Tokenizer:
        return self.renderer.tokenizer

    @property
    def eos_id(self) -> int:
        return self.tokenizer.special_token_ids()[self.renderer.eot]


def open_task(
    tokenizer: str,
    format: str | None,
    *,
    fields: tuple[str, ...] | None = None,
    gate: float = GATE,
    add_tokens: bool = False,
) -> Task:
    """Open the renderer and the answer schema of a rollout task.

    `fields` are the fields of each object in an answer, by default a description and a box or polygon. The default
    format is the chat template in the tokenizer's folder, or chatml if the folder has none. Boxes and polygons require
    coordinate tokens.
    """
    schema: Schema = Detection(gate) if fields is None else Fields(fields)
    if (name := resolve_format(format, tokenizer)) == TEMPLATE:
        task = Task(open_renderer(TEMPLATE, tokenizer, add_tokens=add_tokens), schema, add_tokens)
        if schema.uses_coordinates:
            _ = vocabulary_of(task.tokenizer).coordinate_ids
        return task
    chosen = load_format(name)
    besides = COORDINATES if schema.uses_coordinates else ()
    opened = open_tokenizer(tokenizer, control=chosen.tokens, besides=besides, add_tokens=add_tokens)
    return Task(TurnRenderer(chosen, opened), schema, add_tokens)


def task_prompts(truths: Sequence[GroundTruth], task: Task) -> Rows:
    """Return the prompt of each record as a row; the origin of the row contains the key of the record."""
    prompts = prompt_rows([truth.record for truth in truths], task.renderer)
    keys = b"".join(record_key(truth.record) for truth in truths)
    prompts.origins["key"] = np.frombuffer(keys, dtype="<u8").reshape(-1, 2)
    return prompts


def prompt_lists(prompts: Rows) -> list[list[int]]:
    """Return the token ids of each prompt as a list."""
    return [prompts.ids[start:stop].tolist() for start, stop in pairwise(prompts.row_start.tolist())]


# Prompt rows, which have the same ids in generation and training.


def prompt_rows(records: Sequence[Record], renderer: TurnRenderer | TemplateRenderer) -> Rows:
    """Return one row per record, with its messages and the generation prompt; all tokens have weight 0.

    The token ids of a row equal the result of `Renderer.prompt_ids` for its record.
    """
    if isinstance(renderer, TurnRenderer):
        rows = _turn_prompts(records, renderer)
    else:
        rows = concat([renderer.prompt_row(record) for record in records])
    rows.spans["message"][rows.first_span[1:] - 1] = [len(record.messages) for record in records]
    rows.spans["weight"], rows.spans["rule"] = 0, Rule.PROMPT
    return rows


def _turn_prompts(records: Sequence[Record], renderer: TurnRenderer) -> Rows:
    rendered = renderer.render(records)
    opening = np.array(renderer.compiled.fixed("assistant", OPEN), dtype=np.uint32)
    ending = len(renderer.compiled.fixed("assistant", END))
    spans = np.zeros(1, dtype=SPAN)
    spans["length"], spans["target"] = len(opening), OWN_ID
    spans["role"], spans["part"] = Role.ASSISTANT, Part.OPEN
    count, here = len(rendered), len(rendered.ids)
    start = np.stack([rendered.row_start[:-1], np.full(count, here)], axis=1)
    stop = np.stack([rendered.row_start[1:] - ending, np.full(count, here + len(opening))], axis=1)
    return gather(rendered, _two_pieces_a_row(start, stop), one_row(opening, spans))


def _two_pieces_a_row(start: Index, stop: Index) -> GatherPlan:
    numbers = np.arange(len(start) + 1, dtype=np.int64)
    return GatherPlan(
        start=start.ravel(), stop=stop.ravel(), first_piece=2 * numbers, origin=numbers[:-1], first_segment=numbers
    )


def join_prompts(prompts: Rows, answers: Sequence[Rows]) -> Rows:
    """Join each prompt and its answer into one row, which has the origin of the prompt."""
    if len(prompts) != len(answers):
        raise DataError(f"{len(prompts)} prompts and {len(answers)} answers; expected one answer per prompt")
    source = concat([prompts, *answers])
    count = len(prompts)
    both = np.stack([np.arange(count), np.arange(count) + count], axis=1)
    rows = gather(source, _two_pieces_a_row(source.row_start[:-1][both], source.row_start[1:][both]))
    # The header at the end of the prompt belongs to the answer's message.
    opened = prompts.spans["message"][prompts.first_span[1:] - 1]
    of_answer = rows.spans["rule"] != Rule.PROMPT
    rows.spans["message"] = np.where(of_answer, np.repeat(opened, np.diff(rows.first_span)), rows.spans["message"])
    return rows


def check_prompts(
    rows: Rows, prompts: Sequence[Sequence[int]], where: Callable[[int], str] = lambda row: f"row {row}"
) -> None:
    """Raise `DataError` if a row does not start with its prompt, or if its loss mask includes prompt tokens."""
    mask = rows.mask()
    for row, (start, prompt) in enumerate(zip(rows.row_start[:-1].tolist(), prompts, strict=True)):
        stop = start + len(prompt)
        if rows.ids[start:stop].tolist() != list(prompt):
            raise DataError(
                f"{where(row)}: the prompt for training differs from the prompt for generation; "
                "use the same format, tokenizer and messages"
            )
        if mask[start:stop].any():
            token = int(mask[start:stop].argmax())
            raise DataError(
                f"{where(row)}: the loss mask includes token {token} of the prompt; expected only tokens of answers"
            )


@dataclass
class Health:
    """Counts of rollouts, objects and tokens, which show the quality of the rollouts."""

    rollouts: int = 0
    valid: int = 0
    """Number of valid objects in the rollouts."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of entries that are not valid objects, by reason."""
    truncated: int = 0
    """Number of rollouts that ended before the answer was complete."""
    fallback: Counter[str] = field(default_factory=Counter)
    """Number of rollouts that were dropped as a whole, by reason."""
    broken: int = 0
    """Number of targets that are not valid JSON, because of an invalid entry of the rollout."""
    matched: int = 0
    missed: int = 0
    """Number of missed true objects, which were appended."""
    false_positives: int = 0
    gated: int = 0
    """Number of pairs whose overlap is too small for a match."""
    slots: int = 0
    too_long: int = 0
    """Number of prompts and targets that exceed the model's maximum sequence length and were skipped."""
    as_text: int = 0
    """Number of answers that a server returned as text."""
    retokenized: int = 0
    """Number of text answers whose token count differs from the server's count."""
    rollout_tokens: int = 0
    kept_tokens: int = 0
    target_tokens: int = 0
    trained_tokens: int = 0

    def add(self, target: Target, rollout_tokens: int) -> None:
        self.rollouts += 1
        self.valid += len(target.valid_objects)
        self.dropped.update(target.dropped)
        self.truncated += target.truncated
        if target.fallback is not None:
            self.fallback[target.fallback] += 1
        self.broken += not target.target_is_json
        self.matched += len(target.matched)
        self.missed += len(target.missed)
        self.false_positives += len(target.valid_objects) - len(target.matched)
        self.gated += target.gated
        self.slots += target.slots
        self.rollout_tokens += rollout_tokens
        self.kept_tokens += target.kept
        self.target_tokens += len(target.ids)
        self.trained_tokens += int(target.rows.mask().sum())

    def merge(self, other: Health) -> None:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, mine + value)

    def to_json(self) -> dict[str, Any]:
        """Return all counts as a dict."""
        return {
            name: dict(sorted(value.items())) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }


# Build rows for many records.


def target_rows(
    pairs: Sequence[tuple[GroundTruth, Rollout]],
    task: Task,
    health: Health,
    *,
    train_values: bool = True,
    train_cut: bool = False,
    border: Border = "shorter",
    weights: PartWeights = EVEN,
) -> Rows:
    """Return one row per rollout, with its prompt and its target, and add the counts of the rollouts to `health`."""
    prompts = task_prompts([truth for truth, _ in pairs], task)
    made = []
    for truth, rollout in pairs:
        with _faults_of(truth):
            target = build_target(
                rollout.response_token_ids,
                truth.objects,
                tokenizer=task.tokenizer,
                schema=task.schema,
                eos_id=task.eos_id,
                train_values=train_values,
                train_cut=train_cut,
                border=border,
                weights=weights,
            )
        health.add(target, len(rollout.response_token_ids))
        made.append(target.rows)
    rows = join_prompts(prompts, made)
    rendered = prompt_lists(prompts)
    generated = [rollout.prompt_token_ids or rendered[row] for row, (_, rollout) in enumerate(pairs)]
    check_prompts(rows, generated, lambda row: _place(pairs[row][0]))
    return rows


def answer_rows(truths: Sequence[GroundTruth], task: Task, *, train_values: bool = True) -> Rows:
    """Return one row per record, with its prompt and its true answer."""
    options: dict[str, Any] = {"tokenizer": task.tokenizer, "schema": task.schema, "eos_id": task.eos_id}
    made = []
    for truth in truths:
        with _faults_of(truth):
            made.append(build_answer(truth.objects, train_values=train_values, **options))
    return join_prompts(task_prompts(truths, task), made)


@contextmanager
def _faults_of(truth: GroundTruth) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"{_place(truth)}: {error}") from None


def _place(truth: GroundTruth) -> str:
    record = truth.record
    return f"{record.file}:{record.line} (id={one_line(record.id or '')})"
