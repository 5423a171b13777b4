"""Task: conversations that ask for objects, and rows of prompts, targets and true answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from chatmill.errors import DataError, one_line
from chatmill.format import ChatFormat, load_format
from chatmill.records import record_key
from chatmill.rollout.files import GroundTruth, Rollout
from chatmill.rollout.health import Health
from chatmill.rollout.match import GATE
from chatmill.rollout.prompt import check_prompts, join_prompts, prompt_rows
from chatmill.rollout.schema import Detection, Fields, Schema
from chatmill.rollout.target import build_answer, build_target
from chatmill.rollout.vocabulary import COORDINATES
from chatmill.rows import Rows
from chatmill.tokenizer import Tokenizer, open_tokenizer


@dataclass(frozen=True)
class Task:
    """The chat format, tokenizer and schema of answers."""

    format: ChatFormat
    tokenizer: Tokenizer
    schema: Schema
    add_tokens: bool

    @property
    def eos_id(self) -> int:
        return self.tokenizer.special_token_ids()[self.format.eot]


def open_task(
    tokenizer: str, format: str, *, fields: tuple[str, ...] | None = None, gate: float = GATE, add_tokens: bool = False
) -> Task:
    """A task whose entries have these fields, or, without them, a description and a box or polygon."""
    schema: Schema = Detection(gate) if fields is None else Fields(fields)
    chosen = load_format(format)
    besides = COORDINATES if schema.uses_coordinates else ()
    opened = open_tokenizer(tokenizer, control=chosen.tokens, besides=besides, add_tokens=add_tokens)
    return Task(chosen, opened, schema, add_tokens)


def task_prompts(truths: Sequence[GroundTruth], task: Task) -> Rows:
    """The prompt of each record, with the record's key as its origin."""
    prompts = prompt_rows([truth.record for truth in truths], task.format, task.tokenizer)
    keys = b"".join(record_key(truth.record) for truth in truths)
    prompts.origins["key"] = np.frombuffer(keys, dtype="<u8").reshape(-1, 2)
    return prompts


def prompt_lists(prompts: Rows) -> list[list[int]]:
    """The ids of each prompt, as generators take them."""
    return [prompts.ids[start:stop].tolist() for start, stop in pairwise(prompts.row_start.tolist())]


def target_rows(
    pairs: Sequence[tuple[GroundTruth, Rollout]],
    task: Task,
    health: Health,
    *,
    train_values: bool = True,
    train_cut: bool = False,
) -> Rows:
    """Prompts with their targets; every rollout is counted in `health`."""
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
            )
        health.add(target, len(rollout.response_token_ids))
        made.append(target.rows)
    rows = join_prompts(prompts, made)
    rendered = prompt_lists(prompts)
    generated = [rollout.prompt_token_ids or rendered[row] for row, (_, rollout) in enumerate(pairs)]
    check_prompts(rows, generated, lambda row: _place(pairs[row][0]))
    return rows


def answer_rows(truths: Sequence[GroundTruth], task: Task) -> Rows:
    """Prompts with the true answers."""
    made = []
    for truth in truths:
        with _faults_of(truth):
            made.append(build_answer(truth.objects, tokenizer=task.tokenizer, schema=task.schema, eos_id=task.eos_id))
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
