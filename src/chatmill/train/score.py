"""What a model makes of a dataset: the loss of its trained tokens and the answers it gives, source by source."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.fit.packing import pack_lengths
from chatmill.fit.truncate import truncate
from chatmill.ledger import Ledger
from chatmill.load.config import LoadConfig
from chatmill.load.row_table import collate
from chatmill.load.source import DataSource, open_sources
from chatmill.rows import Rows
from chatmill.store.primer_cache import is_cache
from chatmill.store.read import is_dataset
from chatmill.train.checkpoint import model_folder
from chatmill.train.eval_prompts import EvalPrompt, RowOrigin, origins, questions
from chatmill.train.evaluate import without_training
from chatmill.train.generate import generate
from chatmill.train.load_model import open_model
from chatmill.train.loss import by_segment
from chatmill.train.model import CausalModel, Inputs
from chatmill.train.preflight import trained_with, unknown_ids

BATCH_TOKENS = 1 << 13
"""Tokens of a batch that losses are computed of."""
ASKED = 64
"""Questions that are asked together."""


@dataclass
class EvalScore:
    """Sums over some conversations."""

    conversations: int = 0
    loss_sum: float = 0.0
    weight: float = 0.0
    questions: int = 0
    exact: int = 0
    """Answers that are, to the last token, what was trained for."""
    stopped: int = 0
    """Answers that came to their end by themselves."""

    @property
    def loss(self) -> float:
        """The weighted mean over trained tokens; nan if there are none."""
        return self.loss_sum / self.weight if self.weight else math.nan

    def add(self, other: EvalScore) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class ScoredAnswer:
    """A question with what the model said to it."""

    question: EvalPrompt
    said: list[int]
    place: str
    """Where the conversation came from."""

    @property
    def exact(self) -> bool:
        return self.said == self.question.answer


@dataclass
class EvalReport:
    """The scores of all sources, and of all conversations together."""

    sources: dict[str, EvalScore] = field(default_factory=dict)
    answers: list[ScoredAnswer] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Answers that were not asked for, by reason."""
    cut: int = 0
    """Conversations longer than the model's positions, of which the last tokens were read."""

    @property
    def all(self) -> EvalScore:
        total = EvalScore()
        for score in self.sources.values():
            total.add(score)
        return total


def open_ready(path: str | Path, device: str = "auto") -> CausalModel:
    """The model of a folder, a checkpoint or a run, on its device and ready to answer."""
    chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    compute = torch.bfloat16 if chosen.type == "cuda" else None
    return open_model(model_folder(path), compute=compute).to(chosen).eval()


def score(
    model: CausalModel,
    dataset: str | Path,
    *,
    split: str = "val",
    max_tokens: int = 256,
    limit: int | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> EvalReport:
    """Losses and answers of a split; `limit` bounds the questions, chosen evenly over the split.

    In a folder of caches every cache is a source. `progress` is told of conversations that were read and questions
    that were answered.
    """
    sources = open_all(dataset)
    for fault in unknown_ids(Path(dataset), sources, model):
        raise DataError(fault)
    report = EvalReport()
    known: list[RowOrigin | None] = []
    asked: list[EvalPrompt] = []
    ends = end_ids(sources)
    # A row never needs more; of one shape all batches are computed by the same kernels.
    longest = max(int(source.episodes(split).lengths.max()) for source in sources)
    block = min(max(2, longest) - 1, model.max_positions)
    for source, rows in ((each, rows) for each in sources for rows in each.episodes(split).sweep()):
        found = questions(rows, ends, report.left_out)
        asked += [question._replace(segment=question.segment + len(known)) for question in found]
        of_rows = origins(rows, source.path.name)
        if source.name:
            of_rows = [origin and origin._replace(source=source.name) for origin in of_rows]
        known += of_rows
        talks = np.flatnonzero([origin is not None for origin in of_rows])
        apart = replace(rows, first_segment=np.arange(len(of_rows) + 1)).take(talks)
        report.cut += int((apart.lengths > block + 1).sum())
        sums = conversation_losses(model, apart, block, progress)
        for number, total, weight in zip(talks.tolist(), *sums.tolist(), strict=True):
            report.sources.setdefault(of_rows[number].source, EvalScore()).add(EvalScore(1, total, weight))
    fitting = [q for q in asked if len(q.prompt) + len(q.answer) <= model.max_positions]
    report.left_out["too_long"] += len(asked) - len(fitting)
    chosen = fitting if limit is None else _evenly(fitting, limit)
    report.left_out["over_the_limit"] += len(fitting) - len(chosen)
    for question, said in zip(chosen, answers(model, chosen, ends, max_tokens, progress), strict=True):
        origin = known[question.segment]
        assert origin is not None
        answer = ScoredAnswer(question, said, origin.place)
        one = EvalScore(questions=1, exact=int(answer.exact), stopped=int(said[-1] in ends))
        report.sources[origin.source].add(one)
        report.answers.append(answer)
    report.left_out = +report.left_out
    return report


def open_all(dataset: str | Path) -> Sequence[DataSource]:
    """A dataset, a cache, or all that lie in a folder, to be read without a config; all are of one tokenizer."""
    inside = [path.name for path in Path(dataset).glob("[!.]*") if _is_source(path)]
    mix = dict.fromkeys(inside, 1.0) if inside and not _is_source(Path(dataset)) else None
    return open_sources(dataset, LoadConfig(pad_token_id=0, mix_sft=mix))[0]


def _is_source(folder: Path) -> bool:
    return is_cache(folder) or is_dataset(folder)


def end_ids(sources: Sequence[DataSource]) -> list[int]:
    """The tokens that end a turn, as far as the sources say."""
    return sorted({source.eot for source in sources if source.eot is not None})


def check_tokenizer(model: Path, source: DataSource) -> None:
    """Raise `DataError` for data whose ids mean something else to the model."""
    theirs, mine = trained_with(model_folder(model)).get("tokenizer_sha256"), source.tokenizer_sha256
    if theirs is not None and mine is not None and theirs != mine:
        raise DataError(
            f"{source.path}: was made with tokenizer {mine[:12]}…, the model {model} was trained with {theirs[:12]}…; "
            "prepare the data with the model's tokenizer"
        )


def conversation_losses(
    model: CausalModel, rows: Rows, block_size: int, progress: Callable[[int], None]
) -> NDArray[np.float64]:
    """Σ weight · loss and Σ weight of every conversation, (2, rows); each row is one, of which the last tokens stay."""
    kept = truncate(rows, block_size + 1, "tail", ledger=Ledger(), drop_untrained=False, min_tokens=0)
    bins = pack_lengths(kept.lengths, block_size + 1)
    size = max(1, BATCH_TOKENS // block_size)
    empty = np.repeat(bins.first[-1:], -len(bins) % size)
    packed = replace(kept.take(bins.order), first_segment=np.append(bins.first, empty))
    found = np.zeros((2, len(rows)))
    with without_training(model):
        for start in range(0, len(packed), size):
            batch = collate(packed[start : start + size], pad_token_id=0, length=block_size + 1)
            inputs = Inputs.of(batch, model.device)
            count = batch.episode_ids.shape[1]
            # One column more for padding, which is no conversation.
            sums = by_segment(model(*inputs), inputs.targets, inputs.segments, count + 1)
            where = bins.order[slice(*packed.first_segment[[start, start + size]])]
            for out, values in zip(found, sums, strict=True):
                out[where] = values[:, :count].double().cpu().numpy()[batch.episode_ids >= 0]
            progress(len(where))
    return found


def answers(
    model: CausalModel,
    asked: Sequence[EvalPrompt],
    ends: Sequence[int],
    max_tokens: int,
    progress: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """What the model says to each question, greedily; those of like length are asked together."""
    order = sorted(range(len(asked)), key=lambda number: len(asked[number].prompt))
    said: dict[int, list[int]] = {}
    for start in range(0, len(order), ASKED):
        group = order[start : start + ASKED]
        prompts = [asked[number].prompt for number in group]
        said.update(zip(group, generate(model, prompts, max_tokens=max_tokens, end_ids=ends), strict=True))
        progress(len(group))
    return [said[number] for number in range(len(asked))]


def _evenly(things: list[EvalPrompt], count: int) -> list[EvalPrompt]:
    if len(things) <= count:
        return things
    return [things[number * len(things) // count] for number in range(count)]
