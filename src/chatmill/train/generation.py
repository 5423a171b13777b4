"""Generate answers: greedy decoding, sampling, and beam search.

The random draw for a token depends only on the seed, the step, the row and the token's position in the answer. An
answer can therefore be reproduced without generating the other answers of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chatmill.errors import DataError
from chatmill.train.model import CausalModel, DecodingCache, eval_mode

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing the next token. Temperature 0 is greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0
    """Sample only from the `top_k` most likely tokens; 0 disables the limit."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities add up to at least `top_p`."""
    seed: int = 0
    step: int = 0


def generate(
    model: CausalModel,
    prompts: Prompts,
    *,
    max_tokens: int,
    end_ids: Sequence[int],
    sampling: Sampling | None = None,
    first_row: int = 0,
    batch_size: int = 64,
) -> list[list[int]]:
    """Generate an answer to each prompt; return the token ids of each answer, including its end token if it has one.

    Prompt i uses the random draws of row `first_row` + i. Answers end at an end token, at `max_tokens`, or
    at the model's maximum sequence length.

    >>> import torch
    >>> from chatmill.train import GPT, GPTSizes
    >>> model = GPT(GPTSizes(vocab_size=8, n_layer=1, n_embd=16, n_head=2))
    >>> answers = generate(model, [[1, 2, 3], [4]], max_tokens=5, end_ids=[0])
    >>> len(answers)
    2
    """
    answers: list[list[int]] = [[] for _ in prompts]
    steps = partial(generate_steps, model, max_tokens=max_tokens, end_ids=end_ids, sampling=sampling or Sampling())
    for start in range(0, len(prompts), batch_size):
        for tokens in steps(prompts[start : start + batch_size], first_row=first_row + start):
            for row, token in tokens.items():
                answers[start + row].append(token)
    return answers


def generate_steps(
    model: CausalModel,
    prompts: Prompts,
    *,
    max_tokens: int,
    end_ids: Sequence[int],
    sampling: Sampling,
    first_row: int = 0,
) -> Iterator[dict[int, int]]:
    """Generate answers to all prompts in one batch; at each step, yield the next token of every unfinished row."""
    # If all prompts are too long, keep max_tokens at 1, because `prefill` raises the error.
    max_tokens = min(max_tokens, max(1, model.max_positions - min(map(len, prompts))))
    rows = np.arange(len(prompts))
    draws = np.stack([_draws(sampling, first_row + row, max_tokens) for row in rows.tolist()])
    limits = np.array([min(max_tokens, model.max_positions - len(prompt)) for prompt in prompts])
    with inference(model):
        logits, cache = prefill(model, prompts, max_tokens)
        for at in range(max_tokens):
            tokens = choose(logits, sampling, draws[rows, at])
            chosen = tokens.cpu().numpy()
            yield dict(zip(rows.tolist(), chosen.tolist(), strict=True))
            unfinished = np.flatnonzero(~np.isin(chosen, list(end_ids)) & (limits[rows] > at + 1))
            if not len(unfinished):
                return
            if len(unfinished) < len(rows):
                rows = rows[unfinished]
                kept = torch.from_numpy(unfinished).to(logits.device)
                cache.take(kept)
                tokens = tokens[kept]
            logits = model.step(tokens, cache)


def choose(logits: Tensor, sampling: Sampling, draws: NDArray[np.float64]) -> Tensor:
    """Choose one token per row from logits of shape (rows, vocabulary), with one uniform draw from [0, 1) per row."""
    if sampling.temperature == 0:
        return logits.argmax(dim=1)
    exact = logits.double()
    # Subtract the maximum first, so that the result is finite at any temperature.
    scaled = (exact - exact.amax(dim=1, keepdim=True)) / sampling.temperature
    ordered, ids = scaled.sort(dim=1, descending=True, stable=True)
    if sampling.top_k:
        ordered, ids = ordered[:, : sampling.top_k], ids[:, : sampling.top_k]
    probs = ordered.softmax(dim=1)
    cumulative = probs.cumsum(dim=1)
    if sampling.top_p < 1:
        # Keep a token if all more likely tokens have a total probability below top_p. The most likely token is always
        # kept.
        probs = torch.where(cumulative - probs < sampling.top_p, probs, 0)
        probs[:, 0] = ordered.softmax(dim=1)[:, 0]
        cumulative = probs.cumsum(dim=1)
    wanted = torch.from_numpy(draws).to(cumulative.device)[:, None] * cumulative[:, -1:]
    # If rounding moves a draw past the total probability, select the last token with nonzero probability.
    last = (probs > 0).sum(dim=1, keepdim=True) - 1
    place = torch.minimum(torch.searchsorted(cumulative, wanted, right=True), last)
    return ids.gather(1, place).squeeze(1)


def _draws(sampling: Sampling, row: int, count: int) -> NDArray[np.float64]:
    """Return the uniform random draws for one row, one per position in its answer."""
    key = np.random.SeedSequence((sampling.seed, sampling.step, row))
    return np.random.Generator(np.random.Philox(key)).random(count)


def prefill(model: CausalModel, prompts: Prompts, room: int) -> tuple[Tensor, DecodingCache]:
    """Run the prompts through the model. Return the next-token logits of each prompt, and a KV cache with space for
    `room` more tokens.
    """
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths) < 1:
        raise DataError(f"prompt {lengths.index(0)} is empty; expected at least one token")
    if max(lengths) >= model.max_positions:
        number = int(np.argmax(lengths))
        most = model.max_positions
        raise DataError(
            f"prompt {number} has {lengths[number]} tokens; the prompt and its answer can have at most {most}"
        )
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
            wrong = next(id for id in prompt if not 0 <= id < model.vocab_size)
            raise DataError(
                f"prompt {row} has the token id {wrong}; the model's vocabulary size is {model.vocab_size:,}"
            )
        ids[row, : len(prompt)] = torch.tensor(prompt)
    return model.prefill(ids.to(model.device), torch.tensor(lengths, device=model.device), room)


@contextmanager
def inference(model: CausalModel) -> Iterator[None]:
    """Disable gradients and dropout, and run compiled layers eagerly."""
    # Shapes change with every generated token, so layers compiled for training would be recompiled.
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with eval_mode(model), torch.inference_mode(), eager:
        yield


# Beam search.


def beam_search(
    model: CausalModel,
    prompts: Prompts,
    *,
    beams: int,
    max_tokens: int,
    end_ids: Sequence[int],
    length_penalty: float = 1.0,
    batch_size: int = 16,
) -> list[list[int]]:
    """Find the best answer to each prompt with beam search; return the token ids of each answer.

    Answers are ranked by log-likelihood / length ** length_penalty and include their end token, if they have one. The
    search for a prompt ends when none of its beams can beat the best finished answer. A beam that reaches `max_tokens`
    is also finished.
    """
    answers: list[list[int]] = []
    with inference(model):
        for start in range(0, len(prompts), batch_size):
            group = prompts[start : start + batch_size]
            room = min(max_tokens, model.max_positions - max(map(len, group)))
            answers += _search(model, group, beams, room, frozenset(end_ids), length_penalty)
    return answers


class _Beam(NamedTuple):
    score: float
    """Log-likelihood."""
    ids: list[int]
    parent: int
    """Index of the beam that this beam extends, among the beams of the same prompt."""


def _search(
    model: CausalModel, prompts: Prompts, beams: int, max_tokens: int, end_ids: frozenset[int], length_penalty: float
) -> list[list[int]]:
    """Search for all prompts in one batch; a prompt leaves the batch once its best answer is final."""
    logits, cache = prefill(model, prompts, max_tokens)
    device = logits.device
    best: list[tuple[float, list[int]]] = [(-math.inf, [])] * len(prompts)
    # A prompt starts with one beam; its other beams are placeholders that rank below all real beams.
    start = [_Beam(0.0, [], 0)] + [_Beam(-math.inf, [], 0)] * (beams - 1)
    active = dict.fromkeys(range(len(prompts)), start)
    places = torch.arange(len(prompts), device=device).repeat_interleave(beams)
    cache.take(places)
    logits = logits[places]
    for length in range(1, max_tokens + 1):
        kept: dict[int, list[_Beam]] = {}
        parents: list[int] = []
        for at, (row, candidates) in enumerate(_candidates(logits, active, beams * (1 + len(end_ids))).items()):
            alive = [beam for beam in candidates if beam.ids[-1] not in end_ids][:beams]
            finished = [beam for beam in candidates[:beams] if beam.ids[-1] in end_ids]
            if length == max_tokens:
                finished += alive
            ranked = [(beam.score / length**length_penalty, beam.ids) for beam in finished]
            best[row] = max([best[row], *ranked], key=itemgetter(0))
            # Log-likelihoods only decrease, so a beam reaches its best possible score at the next token or at
            # max_tokens.
            ends = (length + 1, max_tokens) if length < max_tokens else ()
            if any(alive[0].score / end**length_penalty > best[row][0] for end in ends):
                kept[row] = alive
                parents += [at * beams + beam.parent for beam in alive]
        if not kept:
            break
        active = kept
        cache.take(torch.tensor(parents, device=device))
        tokens = [beam.ids[-1] for alive in kept.values() for beam in alive]
        logits = model.step(torch.tensor(tokens, device=device), cache)
    return [ids for _, ids in best]


def _candidates(logits: Tensor, active: dict[int, list[_Beam]], count: int) -> dict[int, list[_Beam]]:
    """Extend the beams of each prompt by one token; return the `count` best extended beams of each prompt.

    `count` exceeds the number of beams, because some tokens end the answer.
    """
    scores = torch.tensor([[beam.score for beam in beams] for beams in active.values()], dtype=torch.float64)
    logprobs = logits.double().log_softmax(dim=1).unflatten(0, scores.shape) + scores.to(logits.device)[:, :, None]
    top = logprobs.flatten(1).topk(min(count, logprobs[0].numel()), dim=1)
    candidates: dict[int, list[_Beam]] = {}
    for (row, beams), values, places in zip(active.items(), top.values.tolist(), top.indices.tolist(), strict=True):
        pairs = [divmod(place, logprobs.shape[2]) for place in places]
        candidates[row] = [
            _Beam(score, [*beams[parent].ids, token], parent)
            for score, (parent, token) in zip(values, pairs, strict=True)
        ]
    return candidates
