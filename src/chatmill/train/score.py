"""What a model makes of a dataset: the loss of its trained tokens and the answers it gives, source by source."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.load.config import LoadConfig
from chatmill.load.loader import EpisodeLoader
from chatmill.load.source import Source, open_sources
from chatmill.train.checkpoint import model_folder
from chatmill.train.evaluate import without_training
from chatmill.train.folder import open_model
from chatmill.train.generate import generate
from chatmill.train.loss import by_segment
from chatmill.train.port import CausalModel, Inputs
from chatmill.train.questions import Origin, Question, origins, questions
from chatmill.train.start import trained_with

BATCH_TOKENS = 1 << 13
"""Tokens of a batch that losses are computed of."""
ASKED = 64
"""Questions that are asked together."""


@dataclass
class Score:
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

    def add(self, other: Score) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Answer:
    """A question with what the model said to it."""

    question: Question
    said: list[int]
    place: str
    """Where the conversation came from."""

    @property
    def exact(self) -> bool:
        return self.said == self.question.answer


@dataclass
class Report:
    """The scores of all sources, and of all conversations together."""

    sources: dict[str, Score] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Answers that were not asked for, by reason."""
    cut: int = 0
    """Episodes longer than the model's positions, of which the last tokens were read."""

    @property
    def all(self) -> Score:
        total = Score()
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
) -> Report:
    """Losses and answers of a split; `limit` bounds the questions, chosen evenly over the split.

    `progress` is told of conversations that were read and questions that were answered.
    """
    source = open_source(dataset)
    report = Report()
    known: list[Origin | None] = []
    asked: list[Question] = []
    ends = [] if source.eot is None else [source.eot]
    episodes = source.episodes(split)
    first_segment = [0]
    for rows in episodes.sweep():
        found = questions(rows, ends, report.left_out)
        asked += [question._replace(segment=question.segment + len(known)) for question in found]
        known += origins(rows, source.path.name)
        first_segment += (rows.first_segment[1:] + first_segment[-1]).tolist()
    totals, weights, report.cut = segment_losses(model, source, split, np.array(first_segment), progress)
    for origin, total, weight in zip(known, totals.tolist(), weights.tolist(), strict=True):
        if origin is not None:
            report.sources.setdefault(origin.source, Score()).add(Score(1, total, weight))
    fitting = [q for q in asked if len(q.prompt) + len(q.answer) <= model.max_positions]
    report.left_out["too_long"] += len(asked) - len(fitting)
    chosen = fitting if limit is None else _evenly(fitting, limit)
    report.left_out["over_the_limit"] += len(fitting) - len(chosen)
    for question, said in zip(chosen, answers(model, chosen, ends, max_tokens, progress), strict=True):
        origin = known[question.segment]
        assert origin is not None
        answer = Answer(question, said, origin.place)
        one = Score(questions=1, exact=int(answer.exact), stopped=int(said[-1] in ends))
        report.sources[origin.source].add(one)
        report.answers.append(answer)
    report.left_out = +report.left_out
    return report


def open_source(dataset: str | Path) -> Source:
    """A dataset or a cache, to be read without a config."""
    opened, _ = open_sources(dataset, LoadConfig(pad_token_id=0))
    return opened[0]


def check_tokenizer(model: Path, source: Source) -> None:
    """Raise `DataError` for data whose ids mean something else to the model."""
    theirs, mine = trained_with(model_folder(model)).get("tokenizer_sha256"), source.tokenizer_sha256
    if theirs is not None and mine is not None and theirs != mine:
        raise DataError(
            f"{source.path}: was made with tokenizer {mine[:12]}…, the model {model} was trained with {theirs[:12]}…; "
            "prepare the data with the model's tokenizer"
        )


def segment_losses(
    model: CausalModel, source: Source, split: str, first_segment: NDArray[np.int64], progress: Callable[[int], None]
) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Σ weight · loss and Σ weight of every conversation of a split, and how many episodes had to be cut."""
    lengths = source.episodes(split).lengths
    longest = int(lengths.max(initial=2))
    block = min(longest - 1, model.max_positions)
    config = LoadConfig(
        block_size=block,
        batch_size=max(1, BATCH_TOKENS // block),
        use_loss_mask=source.has_mask,
        packing="bins",
        pad_token_id=0,
    )
    loader = EpisodeLoader(source.path, config, split=split)
    totals, weights = np.zeros(first_segment[-1]), np.zeros(first_segment[-1])
    with without_training(model):
        for batch in loader.one_pass(split):
            inputs = Inputs.of(batch, model.device)
            count = batch.episode_ids.shape[1]
            # One column more for padding, which has no episode.
            sums = by_segment(model(*inputs), inputs.targets, inputs.segments, count + 1)
            episodes = np.asarray(batch.episode_ids)
            real = episodes >= 0
            where = first_segment[episodes[real]] + _nth(episodes)[real]
            for out, values in zip((totals, weights), sums, strict=True):
                out[where] = values[:, :count].double().cpu().numpy()[real]
            progress(int(real.sum()))
    return totals, weights, int((lengths > block + 1).sum())


def _nth(episodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each segment of each row how many of the same episode stand before it; an episode's stand together.

    7 7 7 4 4 9  ->  0 1 2 0 1 0
    """
    places = np.arange(episodes.shape[1])
    begins = np.ones(episodes.shape, dtype=np.bool_)
    begins[:, 1:] = episodes[:, 1:] != episodes[:, :-1]
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


def answers(
    model: CausalModel,
    asked: Sequence[Question],
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


def _evenly(things: list[Question], count: int) -> list[Question]:
    if len(things) <= count:
        return things
    return [things[number * len(things) // count] for number in range(count)]
