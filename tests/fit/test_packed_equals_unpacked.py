from __future__ import annotations

import numpy as np
import pytest
import torch
from plain_rows import build
from torch import nn

from chatmill.fit import pack
from chatmill.load import IGNORE_INDEX, collate
from chatmill.rows import Role, Rows, Rule

VOCABULARY, WIDTH, LONGEST, CAPACITY = 61, 16, 24, 40


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CAPACITY, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        h = self.token(x) + self.position(positions)
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        seen = torch.tril(segments[:, :, None] == segments[:, None, :])
        return self.head(h + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen))


def conversations(count: int) -> Rows:
    """Return random conversations, many of which have a trained first token, so that errors at segment boundaries
    change the loss.
    """
    draw = np.random.default_rng(5)
    plain = []
    for line in range(count):
        cuts = np.unique(np.append(draw.integers(1, LONGEST, 3), draw.integers(2, LONGEST)))
        spans = [
            (draw.integers(0, VOCABULARY, length).tolist(), Role.ASSISTANT, 0, draw.choice([0, 0.5, 1]), Rule.ROLE, -1)
            for length in np.diff(np.append(0, cuts))
        ]
        plain.append([(("a", line), spans)])
    return build(plain)


def padded(rows: Rows, values: np.ndarray, fill: int) -> np.ndarray:
    there = np.arange(rows.lengths.max()) < rows.lengths[:, None]
    out = np.full(there.shape, fill, dtype=values.dtype)
    out[there] = values
    return out


def token_losses(rows: Rows, *, ignoring: str = "") -> float:
    """Return the sum of the weighted token losses. `ignoring` disables one of the mechanisms that keep packed
    conversations separate.
    """
    ids = padded(rows, rows.ids.astype(np.int64), 0)
    positions = padded(rows, rows.positions(), 0)
    segments = padded(rows, rows.segments(), -1)
    weights = padded(rows, rows.weights(), 0)
    batch = collate(rows, pad_token_id=0)
    x, y = batch.x, batch.y
    if ignoring == "borders":
        y = np.where(weights[:, 1:] > 0, ids[:, 1:], IGNORE_INDEX)
    if ignoring == "segments":
        segments = np.minimum(segments, 0)
    if ignoring == "positions":
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    with torch.no_grad():
        logits = OneLayer()(*(torch.tensor(part) for part in (x, positions[:, :-1], segments[:, :-1])))
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.tensor(y).flatten(), ignore_index=IGNORE_INDEX, reduction="none"
        )
    assert logits.dtype == torch.float32
    return float((losses.double() * torch.tensor(weights[:, 1:]).flatten()).sum())


ROWS = conversations(50)
ONE_BY_ONE = sum(token_losses(ROWS[at : at + 1]) for at in range(len(ROWS)))


@pytest.mark.parametrize("seed", [None, 3])
def test_the_loss_of_packed_rows_is_the_sum_over_their_conversations(seed):
    packed = pack(ROWS, CAPACITY, seed=seed)
    assert len(packed) < len(ROWS) / 2
    assert token_losses(packed) == pytest.approx(ONE_BY_ONE, abs=1e-4, rel=0)


@pytest.mark.parametrize("ignored", ["segments", "positions", "borders"])
def test_without_segments_positions_or_borders_the_losses_differ(ignored):
    assert abs(token_losses(pack(ROWS, CAPACITY), ignoring=ignored) - ONE_BY_ONE) > 0.1
