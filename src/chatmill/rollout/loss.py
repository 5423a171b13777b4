"""Loss: one number from the logits of the trained positions, whatever they are trained on.

Text is trained by cross entropy. A coordinate is a place on an axis of 1000, where near is nearly right:

    soft         cross entropy toward a Gaussian around the true place, among coordinates
    wasserstein  how far probability must be carried to become that Gaussian; all of the axis is 1
    outside      -log of the probability that all coordinates have together

Sums are returned, not means, so that rows may be packed or cut into batches in any way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from chatmill.errors import UsageError


@dataclass(frozen=True)
class LossTerms:
    """How much each term counts, and how wide the Gaussian is, in places of the axis."""

    text: float = 1.0
    soft: float = 1.0
    wasserstein: float = 1.0
    outside: float = 1.0
    sigma: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0) or (field.name == "sigma" and value == 0):
                right = "a number over 0" if field.name == "sigma" else "a number from 0 on"
                raise UsageError(f"{field.name} is {value}; expected {right}")


class RolloutLoss(NamedTuple):
    """What the trained positions lose."""

    total: Tensor
    """Σ weight · (the terms as they count): the one number that is trained."""
    tokens: Tensor
    """What is lost at each position, by itself; carries no gradient."""
    terms: Tensor
    """Σ weight · text, soft, wasserstein and outside, each uncounted; carries no gradient."""


TERMS = ("text", "soft", "wasserstein", "outside")


class Axis(NamedTuple):
    """The coordinates of a vocabulary: their ids in order, and for every id its place, -1 for text."""

    ids: Tensor
    places: Tensor

    @classmethod
    def of(cls, coordinate_ids: list[int], vocab_size: int, device: torch.device | str = "cpu") -> Axis:
        """`vocab_size` is the model's: it may have more ids than the tokenizer."""
        ids = torch.tensor(coordinate_ids, dtype=torch.long)
        places = torch.full((vocab_size,), -1, dtype=torch.long)
        places[ids] = torch.arange(len(ids))
        return cls(ids.to(device), places.to(device))


def rollout_loss(logits: Tensor, ids: Tensor, weights: Tensor, *, axis: Axis | None, terms: LossTerms) -> RolloutLoss:
    """The loss of logits (positions, vocabulary) against the ids that should come there.

    A position whose id is a coordinate of the axis is trained as one; without an axis all are text.
    """
    logits = logits.float()
    everything = torch.logsumexp(logits, dim=1)
    places = torch.full_like(ids, -1) if axis is None else axis.places[ids]
    each = torch.zeros(len(TERMS), len(ids), device=logits.device)
    each[0] = (everything - logits.gather(1, ids[:, None]).squeeze(1)) * (places < 0)
    chosen = (places >= 0).nonzero().squeeze(1)
    if axis is not None and len(chosen):
        along = logits[chosen][:, axis.ids]
        inside = torch.logsumexp(along, dim=1)
        log_share = along - inside[:, None]
        wanted = gaussian(places[chosen], len(axis.ids), terms.sigma)
        # On a line, what must be carried past a point is the difference of what lies before it.
        carried = (log_share.exp() - wanted).cumsum(1)[:, :-1].abs().sum(1) / (len(axis.ids) - 1)
        of_coordinates = torch.stack([-(wanted * log_share).sum(1), carried, everything[chosen] - inside])
        each[1:, chosen] = of_coordinates
    counts = torch.tensor([getattr(terms, name) for name in TERMS], device=logits.device)
    tokens = counts @ each
    return RolloutLoss((tokens * weights).sum(), tokens.detach(), (each.detach() * weights).sum(1))


class LogitsHead(Protocol):
    def logits(self, hidden: Tensor) -> Tensor: ...


class Model(Protocol):
    """What is needed of a model: hidden states of a batch, and how logits come from them."""

    def hidden(self, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor: ...

    def head(self) -> LogitsHead: ...


class TargetPositions(Protocol):
    """The trained positions of a batch: where they are among all, what should come there, and how much it counts."""

    @property
    def index(self) -> Tensor: ...

    @property
    def ids(self) -> Tensor: ...

    @property
    def weights(self) -> Tensor: ...


class WithRolloutLoss(nn.Module):
    """A model that is called for the loss of rollout targets: one forward pass, the head where something counts."""

    def __init__(self, model: Model, axis: Axis | None, terms: LossTerms) -> None:
        super().__init__()
        self.model, self._axis, self._terms = model, axis, terms
        self._seen: Tensor | None = None

    def forward(self, x: Tensor, positions: Tensor, segments: Tensor, targets: TargetPositions) -> RolloutLoss:
        hidden = self.model.hidden(x, positions, segments)
        picked = hidden.reshape(-1, hidden.shape[-1]).index_select(0, targets.index)
        logits = self.model.head().logits(picked)
        loss = rollout_loss(logits, targets.ids, targets.weights, axis=self._axis, terms=self._terms)
        self._seen = loss.terms if self._seen is None else self._seen + loss.terms
        return loss

    def take_terms(self) -> dict[str, float]:
        """Σ weight · each term, over the passes since this was last asked."""
        seen, self._seen = self._seen, None
        return dict(zip(TERMS, [0.0] * len(TERMS) if seen is None else seen.tolist(), strict=True))


def gaussian(places: Tensor, size: int, sigma: float) -> Tensor:
    """A Gaussian around each place, over `size` places, that adds up to 1: (places, size)."""
    along = torch.arange(size, device=places.device)
    heights = torch.exp(-0.5 * ((along - places[:, None]) / sigma) ** 2)
    return heights / heights.sum(1, keepdim=True)
