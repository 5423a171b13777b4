"""Evaluate a model on a dataset: compute the loss on trained tokens and compare generated answers, for each source.

A prompt consists of the stored token ids before a trained answer. Prompts are not rendered and tokenized again, so the
model gets exactly the same token ids as in training.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.fit import pack_lengths, truncate
from chatmill.ledger import Ledger
from chatmill.load.batch import collate
from chatmill.load.config import LoadConfig
from chatmill.load.source import DataSource, open_sources
from chatmill.remote.urls import Place, place
from chatmill.rows import NO_FILE, OWN_ID, Part, Role, Rows, Table
from chatmill.store.primer_cache import is_cache
from chatmill.store.read import is_dataset
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.generation import generate
from chatmill.train.loss import by_segment
from chatmill.train.model import CausalModel, Inputs, eval_mode
from chatmill.train.preflight import trained_with, unknown_ids

BATCH_TOKENS = 1 << 13
"""Number of tokens per batch when losses are computed."""
BATCH_PROMPTS = 64
"""Number of prompts per batch when answers are generated."""


class EvalPrompt(NamedTuple):
    """A prompt and its expected answer."""

    prompt: list[int]
    answer: list[int]
    """The token ids of the expected answer, up to and including the end token."""
    segment: int
    """Index of the conversation among all conversations of the rows."""


def eval_prompts(rows: Rows, end_ids: Collection[int], left_out: Counter[str] | None = None) -> Iterator[EvalPrompt]:
    """Yield a prompt for every answer that the loss mask includes from its first token to an end token.

    segment   <usr> Hi <eot> <asst>   Hello <eot>
              prompt -------------    answer ----

    `left_out` counts the skipped answers by reason: partly outside the loss mask, without an end token, or without a
    prompt.
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
    """Yield the index of the first span of each trained answer in a conversation, and the index after its last span. An
    answer is an assistant turn without its header.

    Data from other programs does not record roles; in this data, every trained span is an answer.
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
    """The source of a conversation, and its file and line."""

    source: str
    place: str
    """Location of the conversation as file:line; empty if unknown."""


def origins(rows: Rows, unnamed: str) -> list[RowOrigin | None]:
    """Return the source, file and line of each conversation; None for padding and for conversations without tokens.

    If the file of a conversation is unknown, its source is the value of `unnamed`.
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


@dataclass
class EvalScore:
    """Evaluation results for a set of conversations: counts, and sums of losses and loss weights."""

    conversations: int = 0
    loss_sum: float = 0.0
    weight: float = 0.0
    questions: int = 0
    exact: int = 0
    """Number of answers that are identical to the expected answer."""
    stopped: int = 0
    """Number of answers that reached an end token."""

    @property
    def loss(self) -> float:
        """Weighted mean loss over the trained tokens; NaN if there are no trained tokens."""
        return self.loss_sum / self.weight if self.weight else math.nan

    def add(self, other: EvalScore) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class ScoredAnswer:
    """A prompt with the answer that the model generated."""

    prompt: EvalPrompt
    ids: list[int]
    """The token ids of the generated answer."""
    place: str
    """Location of the conversation as file:line."""

    @property
    def exact(self) -> bool:
        return self.ids == self.prompt.answer


@dataclass
class EvalReport:
    """The evaluation results of each source, and the generated answers."""

    sources: dict[str, EvalScore] = field(default_factory=dict)
    answers: list[ScoredAnswer] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of trained answers that are not in the report, by reason."""
    cut: int = 0
    """Number of conversations that were truncated at the beginning, because they exceed the model's maximum sequence
    length.
    """
    empty_sources: list[str] = field(default_factory=list)
    """Sources without episodes in the split, if the data is a folder of caches."""

    @property
    def all(self) -> EvalScore:
        total = EvalScore()
        for score in self.sources.values():
            total.add(score)
        return total


def score_model(
    model: CausalModel,
    dataset: str | Place,
    *,
    split: str = "val",
    max_tokens: int = 256,
    limit: int | None = None,
    token_dtype: str | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> EvalReport:
    """Evaluate a model on a split of a dataset: compute losses, and generate answers with greedy decoding.

    `limit` is the maximum number of answers to generate; their prompts are spread evenly over the split. If `dataset`
    is a folder of caches, every cache is a source; `empty_sources` lists the caches that have no episodes in the split.
    See `open_dataset` for `token_dtype`. `progress` is called after each batch, with the number of conversations or
    prompts in the batch.
    """
    every = open_all(dataset, token_dtype)
    for fault in unknown_ids(place(dataset), every, model):
        raise DataError(fault)
    # If no source has episodes in the split, keep the first source, so that reading its split raises an error.
    sources = [source for source in every if split in source] or every[:1]
    report = EvalReport(empty_sources=[source.name for source in every if source not in sources])
    places: list[RowOrigin | None] = []
    prompts: list[EvalPrompt] = []
    ends = end_ids(sources)
    # Pad all batches to the longest row, so that all batches have the same shape and run the same kernels.
    longest = max(int(source.episodes(split).lengths.max()) for source in sources)
    block = min(max(2, longest) - 1, model.max_positions)
    for source, rows in ((each, rows) for each in sources for rows in each.episodes(split).sweep()):
        _check_ids(rows, source, model)
        new_prompts = eval_prompts(rows, ends, report.left_out)
        prompts += [prompt._replace(segment=prompt.segment + len(places)) for prompt in new_prompts]
        of_rows = origins(rows, source.path.name)
        if source.name:
            of_rows = [origin and origin._replace(source=source.name) for origin in of_rows]
        places += of_rows
        numbers = np.flatnonzero([origin is not None for origin in of_rows])
        conversations = replace(rows, first_segment=np.arange(len(of_rows) + 1)).take(numbers)
        report.cut += int((conversations.lengths > block + 1).sum())
        sums = conversation_losses(model, conversations, block, progress)
        for number, total, weight in zip(numbers.tolist(), *sums.tolist(), strict=True):
            report.sources.setdefault(of_rows[number].source, EvalScore()).add(EvalScore(1, total, weight))
    fitting = [prompt for prompt in prompts if len(prompt.prompt) + len(prompt.answer) <= model.max_positions]
    report.left_out["too_long"] += len(prompts) - len(fitting)
    count = len(fitting) if limit is None else min(limit, len(fitting))
    chosen = [fitting[number * len(fitting) // count] for number in range(count)]
    report.left_out["over_the_limit"] += len(fitting) - count
    for prompt, ids in zip(chosen, greedy_answers(model, chosen, ends, max_tokens, progress), strict=True):
        origin = places[prompt.segment]
        assert origin is not None
        answer = ScoredAnswer(prompt, ids, origin.place)
        one = EvalScore(questions=1, exact=int(answer.exact), stopped=int(ids[-1] in ends))
        report.sources[origin.source].add(one)
        report.answers.append(answer)
    report.left_out = +report.left_out
    return report


def _check_ids(rows: Rows, source: DataSource, model: CausalModel) -> None:
    largest = max(int(rows.ids.max(initial=0)), int(rows.spans["target"].max(initial=0)))
    if largest >= model.vocab_size:
        raise DataError(
            f"{source.path}: has the token id {largest}, but the model's vocabulary size is {model.vocab_size:,}; "
            f"the data no longer matches its metadata; run chatmill verify {source.path} --full"
        )


def open_all(dataset: str | Place, token_dtype: str | None = None) -> Sequence[DataSource]:
    """Open a dataset, a cache, or all caches in a folder. All caches must have the same tokenizer."""
    folder = place(dataset)
    inside = [path.name for path in folder.glob("[!.]*") if _is_source(path)] if isinstance(folder, Path) else []
    mix = dict.fromkeys(inside, 1.0) if inside and not _is_source(folder) else None
    return open_sources(dataset, LoadConfig(pad_token_id=0, mix_sft=mix, token_dtype=token_dtype), stored_mix=False)[0]


def _is_source(folder: Place) -> bool:
    return is_cache(folder) or is_dataset(folder)


def end_ids(sources: Sequence[DataSource]) -> list[int]:
    """Return the ids of the end-of-turn tokens of all sources; sources without an end-of-turn token are ignored."""
    return sorted({source.eot for source in sources if source.eot is not None})


def check_tokenizer(model: str | Place, source: DataSource) -> None:
    """Raise `DataError` if the model was trained with a different tokenizer than the one used to prepare the data."""
    theirs, mine = trained_with(model_folder(model)).get("tokenizer_sha256"), source.tokenizer_sha256
    if theirs is not None and mine is not None and theirs != mine:
        raise DataError(
            f"{source.path}: was prepared with tokenizer {mine[:12]}…, but the model {model} was trained with "
            f"{theirs[:12]}…; "
            "prepare the data with the model's tokenizer"
        )


def conversation_losses(
    model: CausalModel, rows: Rows, block_size: int, progress: Callable[[int], None]
) -> NDArray[np.float64]:
    """Return Σ weight · loss and Σ weight for every row, as an array of shape (2, rows).

    Each row contains one conversation. If a conversation has more than `block_size` + 1 tokens, only its last
    `block_size` + 1 tokens are kept.
    """
    kept = truncate(rows, block_size + 1, "tail", ledger=Ledger(), drop_untrained=False, min_tokens=0)
    bins = pack_lengths(kept.lengths, block_size + 1)
    size = max(1, BATCH_TOKENS // block_size)
    empty = np.repeat(bins.first[-1:], -len(bins) % size)
    packed = replace(kept.take(bins.order), first_segment=np.append(bins.first, empty))
    losses = np.zeros((2, len(rows)))
    with eval_mode(model), torch.no_grad():
        for start in range(0, len(packed), size):
            batch = collate(packed[start : start + size], pad_token_id=0, length=block_size + 1)
            inputs = Inputs.of(batch, model.device)
            count = batch.episode_ids.shape[1]
            # Add a column for padding, which does not belong to a conversation.
            sums = by_segment(model(*inputs), inputs.targets, inputs.segments, count + 1)
            where = bins.order[slice(*packed.first_segment[[start, start + size]])]
            for out, values in zip(losses, sums, strict=True):
                out[where] = values[:, :count].double().cpu().numpy()[batch.episode_ids >= 0]
            progress(len(where))
    return losses


def greedy_answers(
    model: CausalModel,
    prompts: Sequence[EvalPrompt],
    ends: Sequence[int],
    max_tokens: int,
    progress: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """Generate an answer to each prompt with greedy decoding; each batch contains prompts of similar length."""
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number].prompt))
    answers: dict[int, list[int]] = {}
    for start in range(0, len(order), BATCH_PROMPTS):
        group = order[start : start + BATCH_PROMPTS]
        ids = generate(model, [prompts[number].prompt for number in group], max_tokens=max_tokens, end_ids=ends)
        answers.update(zip(group, ids, strict=True))
        progress(len(group))
    return [answers[number] for number in range(len(prompts))]
