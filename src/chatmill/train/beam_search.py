"""Beam search: the likeliest answer among those that a few beams find."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chatmill.train.generate import Prompts, generating, prefill
from chatmill.train.model import CausalModel


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
    """The best answer to each prompt, its end token included if it came to one.

    Answers are compared by log-likelihood / length ** length_penalty. A prompt is searched until none of its beams
    can beat the best answer that ended; beams cut off by `max_tokens` compete as they are.
    """
    answers: list[list[int]] = []
    with generating(model):
        for start in range(0, len(prompts), batch_size):
            group = prompts[start : start + batch_size]
            room = min(max_tokens, model.max_positions - max(map(len, group)))
            answers += _search(model, group, _Rules(beams, room, frozenset(end_ids), length_penalty))
    return answers


class _Rules(NamedTuple):
    beams: int
    max_tokens: int
    ends: frozenset[int]
    length_penalty: float

    def rank(self, score: float, length: int) -> float:
        return score / length**self.length_penalty

    def reachable(self, score: float, length: int) -> float:
        """The best rank that a beam of this score and length can still come to: scores only fall."""
        return max(self.rank(score, length + 1), self.rank(score, self.max_tokens))


class _Beam(NamedTuple):
    score: float
    """Log-likelihood."""
    ids: list[int]
    parent: int
    """Which beam of its prompt it came from."""


class _FinishedBeam(NamedTuple):
    rank: float
    ids: list[int]


def _search(model: CausalModel, prompts: Prompts, rules: _Rules) -> list[list[int]]:
    """Search for all prompts in one batch; a prompt leaves it when its answer is certain."""
    logits, cache = prefill(model, prompts, rules.max_tokens)
    device = logits.device
    best = [_FinishedBeam(-math.inf, [])] * len(prompts)
    # A prompt begins with one beam; the others are there for the shape of the batch and lose to everything.
    searched = {row: [_Beam(0.0, [], 0)] + [_Beam(-math.inf, [], 0)] * (rules.beams - 1) for row in range(len(prompts))}
    places = torch.arange(len(prompts), device=device).repeat_interleave(rules.beams)
    cache.take(places)
    logits = logits[places]
    for length in range(1, rules.max_tokens + 1):
        kept: dict[int, list[_Beam]] = {}
        parents: list[int] = []
        for at, (row, candidates) in enumerate(_candidates(logits, searched, rules).items()):
            for candidate in candidates[: rules.beams]:
                if candidate.ids[-1] in rules.ends:
                    best[row] = _better(best[row], candidate, rules)
            alive = [candidate for candidate in candidates if candidate.ids[-1] not in rules.ends][: rules.beams]
            if length == rules.max_tokens:
                for beam in alive:
                    best[row] = _better(best[row], beam, rules)
            elif rules.reachable(alive[0].score, length) > best[row].rank:
                kept[row] = alive
                parents += [at * rules.beams + beam.parent for beam in alive]
        if not kept:
            break
        searched = kept
        cache.take(torch.tensor(parents, device=device))
        tokens = [beam.ids[-1] for beams in kept.values() for beam in beams]
        logits = model.step(torch.tensor(tokens, device=device), cache)
    return [answer.ids for answer in best]


def _candidates(logits: Tensor, searched: dict[int, list[_Beam]], rules: _Rules) -> dict[int, list[_Beam]]:
    """The best continuations of each prompt's beams: enough for all beams to go on even if the others end."""
    scores = [[beam.score for beam in beams] for beams in searched.values()]
    likely = logits.double().log_softmax(dim=1).unflatten(0, (len(searched), rules.beams))
    likely = likely + torch.tensor(scores, dtype=torch.float64, device=logits.device)[:, :, None]
    top = likely.flatten(1).topk(min(rules.beams * (1 + len(rules.ends)), likely[0].numel()), dim=1)
    found: dict[int, list[_Beam]] = {}
    for (row, beams), values, places in zip(searched.items(), top.values.tolist(), top.indices.tolist(), strict=True):
        pairs = [divmod(place, likely.shape[2]) for place in places]
        found[row] = [
            _Beam(score, [*beams[parent].ids, token], parent)
            for score, (parent, token) in zip(values, pairs, strict=True)
        ]
    return found


def _better(best: _FinishedBeam, beam: _Beam, rules: _Rules) -> _FinishedBeam:
    rank = rules.rank(beam.score, len(beam.ids))
    return _FinishedBeam(rank, beam.ids) if rank > best.rank else best
