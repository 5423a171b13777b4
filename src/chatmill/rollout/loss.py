"""The loss on rollout targets.

The loss on text tokens is cross entropy. Coordinate tokens represent positions on an axis; their loss has three terms:

    soft         cross entropy to a Gaussian around the true position, over the coordinate tokens
    wasserstein  Wasserstein-1 distance to the same Gaussian, on an axis of length 1
    outside      -log of the total probability of all coordinate tokens

Losses are sums, not means, so the result does not depend on how rows are packed or split into batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from chatmill.errors import UsageError
from chatmill.train.loss import LMHead, Losses, TrainedPositions, trained_states


@dataclass(frozen=True)
class TermWeights:
    """The weight of each loss term, and the standard deviation of the Gaussian."""

    text: float = 1.0
    soft: float = 1.0
    wasserstein: float = 1.0
    outside: float = 1.0
    sigma: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0) or (field.name == "sigma" and value == 0):
                right = "a number above 0" if field.name == "sigma" else "a number of at least 0"
                raise UsageError(f"{field.name} is {value}; expected {right}")


class TermLosses(NamedTuple):
    """The total loss, the loss at each position, and the sum of each loss term."""

    total: Tensor
    """The weighted sum over all positions and terms."""
    tokens: Tensor
    """The loss at each position, detached from the graph."""
    terms: Tensor
    """The sum of each term over all positions, without term weights; detached from the graph."""


TERMS = ("text", "soft", "wasserstein", "outside")


class Axis(NamedTuple):
    """The ids of the coordinate tokens in order, and the position of each token id on the axis (-1 for text tokens)."""

    ids: Tensor
    places: Tensor

    @classmethod
    def of(cls, coordinate_ids: list[int], vocab_size: int, device: torch.device | str = "cpu") -> Axis:
        """Create an axis; `vocab_size` is the model's vocabulary size, which may exceed the tokenizer's."""
        ids = torch.tensor(coordinate_ids, dtype=torch.long)
        places = torch.full((vocab_size,), -1, dtype=torch.long)
        places[ids] = torch.arange(len(ids))
        return cls(ids.to(device), places.to(device))


def rollout_loss(
    logits: Tensor, ids: Tensor, weights: Tensor, *, axis: Axis | None, term_weights: TermWeights
) -> TermLosses:
    """Compute the loss from logits of shape (positions, vocabulary); without `axis`, all targets are text tokens."""
    logits = logits.float()
    log_total = torch.logsumexp(logits, dim=1)
    places = torch.full_like(ids, -1) if axis is None else axis.places[ids]
    each = torch.zeros(len(TERMS), len(ids), device=logits.device)
    each[0] = (log_total - logits.gather(1, ids[:, None]).squeeze(1)) * (places < 0)
    chosen = (places >= 0).nonzero().squeeze(1)
    if axis is not None and len(chosen):
        axis_logits = logits[chosen][:, axis.ids]
        log_inside = torch.logsumexp(axis_logits, dim=1)
        logprobs = axis_logits - log_inside[:, None]
        wanted = gaussian(places[chosen], len(axis.ids), term_weights.sigma)
        # In one dimension, Wasserstein-1 is the integral of the absolute difference of the cumulative distributions.
        distance = (logprobs.exp() - wanted).cumsum(1)[:, :-1].abs().sum(1) / (len(axis.ids) - 1)
        each[1:, chosen] = torch.stack([-(wanted * logprobs).sum(1), distance, log_total[chosen] - log_inside])
    tokens = torch.tensor([getattr(term_weights, name) for name in TERMS], device=logits.device) @ each
    return TermLosses((tokens * weights).sum(), tokens.detach(), (each.detach() * weights).sum(1))


class RolloutLoss:
    """The loss function for rollout targets; it also sums each loss term over a step."""

    def __init__(self, axis: Axis | None, weights: TermWeights) -> None:
        self._axis, self._weights = axis, weights
        self._sums: Tensor | None = None

    def __call__(self, hidden: Tensor, head: LMHead, targets: TrainedPositions) -> Losses:
        logits = head.logits(trained_states(hidden, targets))
        losses = rollout_loss(logits, targets.ids, targets.weights, axis=self._axis, term_weights=self._weights)
        self._sums = losses.terms if self._sums is None else self._sums + losses.terms
        return Losses(losses.total, losses.tokens)

    def take_terms(self) -> dict[str, float]:
        """Return the sum of each loss term since the last call."""
        sums, self._sums = self._sums, None
        return dict(zip(TERMS, [0.0] * len(TERMS) if sums is None else sums.tolist(), strict=True))


def gaussian(places: Tensor, size: int, sigma: float) -> Tensor:
    """Return a discrete Gaussian around each position, normalized over the axis."""
    along = torch.arange(size, device=places.device)
    heights = torch.exp(-0.5 * ((along - places[:, None]) / sigma) ** 2)
    return heights / heights.sum(1, keepdim=True)
