"""Answers from a model, greedy or sampled.

A sampled token depends on its row's key (seed, step, row) and its place in the answer, never on what else is in the
batch, so an answer can be drawn again by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chatmill.errors import DataError
from chatmill.train.model import CausalModel, DecodingCache

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 takes the most likely one."""

    temperature: float = 0.0
    top_k: int = 0
    """Draw from this many tokens only; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens that have this much probability together."""
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
    """An answer to each prompt: its ids, the end token included if the answer came to one.

    Prompt i has row `first_row` + i as its key. Answers end at `max_tokens`, or where the model's positions do.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(prompts), batch_size):
        group = prompts[start : start + batch_size]
        for tokens in generate_steps(
            model,
            group,
            max_tokens=max_tokens,
            end_ids=end_ids,
            sampling=sampling or Sampling(),
            first_row=first_row + start,
        ):
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
    """The next token of every row that goes on, step by step; all prompts are one batch."""
    # Prompts that are too long themselves are told of below.
    max_tokens = min(max_tokens, max(1, model.max_positions - min(map(len, prompts))))
    rows = np.arange(len(prompts))
    draws = np.stack([_draws(sampling, first_row + row, max_tokens) for row in rows.tolist()])
    left = np.array([min(max_tokens, model.max_positions - len(prompt)) for prompt in prompts])
    ends = list(end_ids)
    with generating(model):
        logits, cache = prefill(model, prompts, max_tokens)
        for at in range(max_tokens):
            tokens = choose(logits, sampling, draws[rows, at])
            chosen = tokens.cpu().numpy()
            yield dict(zip(rows.tolist(), chosen.tolist(), strict=True))
            goes_on = np.flatnonzero(~np.isin(chosen, ends) & (left[rows] > at + 1))
            if not len(goes_on):
                return
            if len(goes_on) < len(rows):
                rows = rows[goes_on]
                kept = torch.from_numpy(goes_on).to(logits.device)
                cache.take(kept)
                tokens = tokens[kept]
            logits = model.step(tokens, cache)


def choose(logits: Tensor, sampling: Sampling, draws: NDArray[np.float64]) -> Tensor:
    """One token a row from logits (rows, vocabulary) and a draw from [0, 1) a row."""
    if sampling.temperature == 0:
        return logits.argmax(dim=1)
    exact = logits.double()
    # Below the largest, which stays finite however small the temperature is.
    below = (exact - exact.amax(dim=1, keepdim=True)) / sampling.temperature
    ordered, ids = below.sort(dim=1, descending=True, stable=True)
    if sampling.top_k:
        ordered, ids = ordered[:, : sampling.top_k], ids[:, : sampling.top_k]
    mass = ordered.softmax(dim=1)
    reach = mass.cumsum(dim=1)
    if sampling.top_p < 1:
        # A token is in as long as those before it have less than top_p; the first always is.
        mass = torch.where(reach - mass < sampling.top_p, mass, 0)
        mass[:, 0] = ordered.softmax(dim=1)[:, 0]
        reach = mass.cumsum(dim=1)
    wanted = torch.from_numpy(draws).to(reach.device)[:, None] * reach[:, -1:]
    # Rounding may bring a draw to the very end; the last token with any mass is meant then.
    last = (mass > 0).sum(dim=1, keepdim=True) - 1
    place = torch.minimum(torch.searchsorted(reach, wanted, right=True), last)
    return ids.gather(1, place).squeeze(1)


def _draws(sampling: Sampling, row: int, count: int) -> NDArray[np.float64]:
    """The draws of one row, one for each place in its answer."""
    key = np.random.SeedSequence((sampling.seed, sampling.step, row))
    return np.random.Generator(np.random.Philox(key)).random(count)


def prefill(model: CausalModel, prompts: Prompts, room: int) -> tuple[Tensor, DecodingCache]:
    """Logits after each prompt, and a cache with room for so many tokens more."""
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths) < 1:
        raise DataError(f"prompt {lengths.index(0)} is empty; an answer needs at least one token to follow")
    if max(lengths) >= model.max_positions:
        number = int(np.argmax(lengths))
        most = model.max_positions
        raise DataError(f"prompt {number} has {lengths[number]} tokens; it and its answer have {most} positions")
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    return model.prefill(ids.to(model.device), torch.tensor(lengths, device=model.device), room)


@contextmanager
def generating(model: CausalModel) -> Iterator[None]:
    """No gradients, no dropout and nothing compiled, for as long as answers are made."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), _uncompiled(model):
            yield
    finally:
        model.train(training)


def _uncompiled(model: CausalModel) -> AbstractContextManager[Any]:
    """Layers that were compiled for training run as they are: answers have another shape with every token."""
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
