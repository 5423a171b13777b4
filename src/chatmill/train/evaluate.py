"""Evaluation during training: the exact loss on a split, counting each trained token once, and sample answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from chatmill.errors import DataError, one_line
from chatmill.load.batch import Batch
from chatmill.load.loader import EpisodeLoader
from chatmill.load.source import DataSource
from chatmill.train.distributed import World
from chatmill.train.model import CausalModel, Inputs, eval_mode
from chatmill.train.score import EvalPrompt, ScoredAnswer, end_ids, eval_prompts, greedy_answers
from chatmill.train.step import unknown_id
from chatmill.train.trackers.interface import SampleAnswer

MAX_ANSWER = 256
"""Maximum length of an expected answer, in tokens; prompts with a longer expected answer are not used."""
MARGIN = 32
"""Generated answers are limited to the length of the longest expected answer plus this many tokens."""
SHOWN = 100
"""Maximum number of characters to show from an answer, and from the end of its prompt."""
PROMPT_TOKENS = 512
"""Number of tokens at the end of a prompt that are reported to trackers."""

TokenText = Callable[[Sequence[int]], str]
"""A function that decodes tokens to text that is safe to print."""


class Evaluation(NamedTuple):
    """The loss of a model on a split: over all sources and, in a mix, for each source."""

    loss: float | None
    """Weighted mean loss over the trained tokens; None if the split has no trained tokens."""
    trained: int
    """Number of trained tokens."""
    sources: Mapping[str, Evaluation] = {}
    """Evaluation of each source in a mix, by source name; sources without episodes in the split are left out."""

    @property
    def perplexity(self) -> float | None:
        return None if self.loss is None else math.exp(min(self.loss, 700))

    def __str__(self) -> str:
        if self.loss is None:
            return "val has no trained tokens"
        shown = f"val loss {self.loss:.4f}, perplexity {self.perplexity:.4g} over {self.trained:,} trained tokens"
        return f"{shown} ({losses_by_source(self.sources)})" if self.sources else shown

    def metrics(self) -> dict[str, float | None]:
        """Return the metrics to log, such as `val_loss`, and `val_loss/NAME` for each source of a mix."""
        values = {"val_loss": self.loss, "val_perplexity": self.perplexity, "val_trained": self.trained}
        for name, of_source in self.sources.items():
            values |= {f"val_loss/{name}": of_source.loss, f"val_trained/{name}": of_source.trained}
        return values

    def by_source(self, sources: Sequence[DataSource]) -> dict[str, Mapping[str, float | None] | None]:
        """Return the loss, perplexity and number of trained tokens of each source in a mix (None if not evaluated)."""
        parts = {
            name: {"loss": each.loss, "perplexity": each.perplexity, "trained": each.trained}
            for name, each in self.sources.items()
        }
        # Add the sources that are used only for validation, which `sources` does not contain.
        return {**{source.name: parts.get(source.name) for source in sources}, **parts} if parts else {}


def losses_by_source(sources: Mapping[str, Evaluation]) -> str:
    losses = ((name, each.loss) for name, each in sources.items())
    return ", ".join(f"{one_line(name)} {'-' if loss is None else f'{loss:.4f}'}" for name, loss in losses)


def evaluate(
    module: CausalModel, loader: EpisodeLoader, world: World, *, split: str = "val", batches: int | None = None
) -> Evaluation:
    """Compute the loss on a split, or on the first `batches` batches of each source. Batches are read in file order,
    and the loader's cursors do not move.

    Each source is evaluated separately. The total loss is the mean over the trained tokens of all sources, regardless
    of the mix weights. All ranks must call this function.
    """
    sources = loader.sources_of(split)
    totals = torch.zeros(len(sources), dtype=torch.float64, device=world.device)
    counts = [0.0] * (2 * len(sources))
    with eval_mode(module), torch.no_grad():
        for number, source in enumerate(sources):
            for batch in islice(loader.one_pass(split, source=source), batches):
                check_ids(batch, module, loader, world)
                for part in batch.split(loader.config.gradient_accumulation_steps):
                    inputs = Inputs.of(part, world.device)
                    totals[number] += module(*inputs).total
                    counts[2 * number] += inputs.targets.weight
                    counts[2 * number + 1] += inputs.targets.count
    if hasattr(module, "reshard"):
        # Reshard the root weights: without a backward pass, FSDP leaves them gathered, but the optimizer expects
        # shards.
        module.reshard()
    if world.size > 1:
        dist.all_reduce(totals)
    losses, counts = totals.tolist(), world.sums(counts)
    weights, trained = counts[0::2], counts[1::2]
    parts = {
        source.name: Evaluation(loss / weight if weight else None, int(count))
        for source, loss, weight, count in zip(sources, losses, weights, trained, strict=True)
    }
    mean = sum(losses) / sum(weights) if sum(weights) else None
    if mean is not None:
        # Use the loss of rank 0, so that all ranks make the same decision about early stopping.
        [mean] = world.sums([mean if world.is_first else 0.0])
    return Evaluation(mean, int(sum(trained)), parts if loader.config.mix is not None else {})


def val_notes(loader: EpisodeLoader) -> list[str]:
    """Return a note that lists the sources without episodes in the val split, if any."""
    evaluated = loader.sources_of("val")
    if not evaluated:
        return [f"{loader.dataset_dir} has no episodes in val; the run does not compute a val loss"]
    without = [one_line(source.name) for source in loader.sources if source not in evaluated]
    if not without:
        return []
    names = ", ".join(one_line(source.name) for source in evaluated)
    return [f"no episodes in val: {', '.join(without)}; val loss covers {names}"]


def check_ids(batch: Batch, model: CausalModel, loader: EpisodeLoader, world: World) -> None:
    """Raise `DataError` on all ranks if any rank's batch has an id outside the model's vocabulary."""
    fault = unknown_id(batch, model.vocab_size)
    if sum(world.sums([float(fault is not None)])):
        world.together(partial(raise_unknown, fault, loader))


def raise_unknown(fault: str | None, loader: EpisodeLoader) -> None:
    if fault is not None:
        place = loader.dataset_dir
        raise DataError(
            f"{place}: {fault}; the ids were in range when the run started, so the files have changed; "
            f"run chatmill verify {place} --full"
        )


class Samples:
    """Generates sample answers to `count` prompts from each source; the prompts are spread evenly over a split."""

    def __init__(self, sources: Sequence[DataSource], count: int, model: CausalModel, *, split: str = "val") -> None:
        self.end_ids = end_ids(sources)
        self._prompts = [
            prompt for source in sources for prompt in _spread(source, split, count, self.end_ids, model.max_positions)
        ]

    def answer(self, model: CausalModel) -> list[ScoredAnswer]:
        max_tokens = MARGIN + max((len(prompt.answer) for prompt in self._prompts), default=0)
        answers = greedy_answers(model, self._prompts, self.end_ids, max_tokens)
        return [ScoredAnswer(prompt, ids, "") for prompt, ids in zip(self._prompts, answers, strict=True)]

    def rates(self, answers: Sequence[ScoredAnswer]) -> Mapping[str, float]:
        """Return the fraction of answers that equal the expected answer, and the fraction that end with an end token.
        Return an empty mapping if there are no answers.
        """
        if not answers:
            return {}
        exact = sum(answer.exact for answer in answers) / len(answers)
        return {"val_exact_rate": exact, "val_stop_rate": sum(map(self._stopped, answers)) / len(answers)}

    def lines(self, answers: Sequence[ScoredAnswer], text: TokenText) -> list[str]:
        """Format each answer: the end of its prompt, the answer, and the expected answer if it differs."""
        lines = []
        for answer in answers:
            # A character takes at most four tokens, so the last 4 * SHOWN tokens of a prompt are enough.
            prompt = text(answer.prompt.prompt[-4 * SHOWN :])
            lines.append(f"  prompt    {prompt if len(prompt) <= SHOWN else '…' + prompt[-SHOWN:]}")
            ended = "" if self._stopped(answer) else f"  (no end token after {len(answer.ids):,} tokens)"
            lines.append(f"  answer    {_shortened(text(answer.ids))}{ended}")
            if not answer.exact:
                lines.append(f"  expected  {_shortened(text(answer.prompt.answer))}")
        return lines

    def texts(self, answers: Sequence[ScoredAnswer], text: TokenText) -> list[SampleAnswer]:
        return [
            SampleAnswer(text(answer.prompt.prompt[-PROMPT_TOKENS:]), text(answer.ids), text(answer.prompt.answer))
            for answer in answers
        ]

    def _stopped(self, answer: ScoredAnswer) -> bool:
        return answer.ids[-1] in self.end_ids


def _spread(source: DataSource, split: str, count: int, ends: Sequence[int], positions: int) -> Iterator[EvalPrompt]:
    """Divide a split into `count` equal parts; from each part, yield the first prompt that is short enough."""
    episodes = source.episodes(split)
    for start, stop in pairwise(len(episodes) * part // count for part in range(count + 1)):
        prompts = (each for number in range(start, stop) for each in eval_prompts(episodes.rows([number]), ends))
        short = (p for p in prompts if len(p.answer) <= MAX_ANSWER and len(p.prompt) + len(p.answer) <= positions)
        yield from islice(short, 1)


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
