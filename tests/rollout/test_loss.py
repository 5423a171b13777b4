from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from rollout_fixtures import EOS, Toy, box, thing

from chatmill.errors import UsageError
from chatmill.fit import pack
from chatmill.load import collate
from chatmill.load.batch import IGNORE_INDEX
from chatmill.rollout.loss import TERMS, Axis, TermWeights, rollout_loss
from chatmill.rollout.target import build_target
from chatmill.rollout.vocabulary import vocabulary_of
from chatmill.rows import concat

torch.set_num_threads(1)
VOCABULARY, PLACES, FIRST = 40, 12, 20


def reference(logits, ids, weights, terms):
    sums = dict.fromkeys(("text", "soft", "wasserstein", "outside"), 0.0)
    for row, id, weight in zip(logits.astype(np.float64), ids, weights, strict=True):
        p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        if not FIRST <= id < FIRST + PLACES:
            sums["text"] += weight * -math.log(p[id])
            continue
        inside = p[FIRST : FIRST + PLACES]
        q = inside / inside.sum()
        g = np.array([math.exp(-((k - (id - FIRST)) ** 2) / (2 * terms.sigma**2)) for k in range(PLACES)])
        g /= g.sum()
        sums["soft"] += weight * -sum(g[k] * math.log(q[k]) for k in range(PLACES))
        # Earth mover's distance in one dimension: carry the surplus from each bin to the next.
        carried = moved = 0.0
        for k in range(PLACES - 1):
            carried += q[k] - g[k]
            moved += abs(carried)
        sums["wasserstein"] += weight * moved / (PLACES - 1)
        sums["outside"] += weight * -math.log(inside.sum())
    return sums, sum(getattr(terms, name) * value for name, value in sums.items())


@pytest.mark.parametrize("terms", [TermWeights(), TermWeights(0.5, 2.0, 3.0, 0.25, 0.7), TermWeights(soft=0, sigma=9)])
def test_every_term_equals_its_definition(terms):
    draw = np.random.default_rng(3)
    logits = draw.normal(0, 3, (30, VOCABULARY)).astype(np.float32)
    ids = draw.integers(0, VOCABULARY, 30)
    weights = draw.choice([0, 0.5, 1], 30).astype(np.float32)
    found = rollout_loss(
        torch.tensor(logits),
        torch.tensor(ids),
        torch.tensor(weights),
        axis=Axis.of(list(range(FIRST, FIRST + PLACES)), VOCABULARY),
        term_weights=terms,
    )
    sums, total = reference(logits, ids, weights, terms)
    assert found.terms.tolist() == pytest.approx([sums[name] for name in TERMS], rel=1e-5)
    assert found.total.item() == pytest.approx(total, rel=1e-5)
    alone = [reference(logits[at : at + 1], ids[at : at + 1], [1.0], terms)[1] for at in range(30)]
    assert found.tokens.tolist() == pytest.approx(alone, rel=1e-4)


def test_wasserstein_of_two_point_masses_is_their_distance():
    axis = Axis.of(list(range(1000)), 1000)
    logits = torch.full((1, 1000), -1e4)
    logits[0, 300] = 0
    found = rollout_loss(logits, torch.tensor([50]), torch.ones(1), axis=axis, term_weights=TermWeights(sigma=1e-3))
    assert found.terms[TERMS.index("wasserstein")].item() == pytest.approx(250 / 999, rel=1e-5)


def test_without_an_axis_every_token_has_the_text_loss():
    logits = torch.randn(5, VOCABULARY)
    ids = torch.randint(0, VOCABULARY, (5,))
    found = rollout_loss(logits, ids, torch.ones(5), axis=None, term_weights=TermWeights())
    assert found.total.item() == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, ids, reduction="sum")), rel=1e-5
    )


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_gradients_are_finite_and_descend_to_the_true_coordinate(scale):
    axis = Axis.of(list(range(FIRST, FIRST + PLACES)), VOCABULARY)
    logits = (scale * torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0))).requires_grad_()
    ids = torch.tensor([1, 2, FIRST, FIRST + 5, FIRST + PLACES - 1, 3])
    rollout_loss(logits, ids, torch.ones(6), axis=axis, term_weights=TermWeights()).total.backward()
    assert torch.isfinite(logits.grad).all()
    steps = torch.zeros(6, VOCABULARY, requires_grad=True)
    for _ in range(400):
        (gradient,) = torch.autograd.grad(
            rollout_loss(steps, ids, torch.ones(6), axis=axis, term_weights=TermWeights(sigma=0.5)).total, steps
        )
        steps = (steps - gradient).detach().requires_grad_()
    assert steps.argmax(1).tolist() == ids.tolist()


def test_zero_weights_give_zero_loss():
    axis = Axis.of(list(range(FIRST, FIRST + PLACES)), VOCABULARY)
    logits = torch.randn(4, VOCABULARY, requires_grad=True)
    found = rollout_loss(
        logits, torch.tensor([1, 2, FIRST, FIRST]), torch.zeros(4), axis=axis, term_weights=TermWeights()
    )
    found.total.backward()
    assert found.total.item() == 0
    assert not logits.grad.any()


@pytest.mark.parametrize("wrong", [{"soft": -1}, {"sigma": 0}, {"text": math.nan}, {"outside": math.inf}])
def test_invalid_term_weights_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        TermWeights(**wrong)


class OneLayer(torch.nn.Module):
    def __init__(self, vocab_size, width=8, longest=600):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.position = torch.nn.Embedding(vocab_size, width), torch.nn.Embedding(longest, width)
        self.qkv, self.head = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, vocab_size)
        self.calls = 0

    def forward(self, x, positions, segments):
        self.calls += 1
        h = self.token(x) + self.position(positions)
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        seen = torch.tril(segments[:, :, None] == segments[:, None, :])
        return self.head(h + torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen))


def loss_of(rows, model, axis):
    """Return the rollout loss of the model. Labels are shifted: each position of y contains the target of the next
    token.
    """
    batch = collate(rows, pad_token_id=EOS)
    mask = batch.y != IGNORE_INDEX
    logits = model(*(torch.as_tensor(part) for part in (batch.x, batch.positions, batch.segments)))
    flat = torch.as_tensor(mask).flatten()
    return rollout_loss(
        logits.flatten(0, 1)[flat],
        torch.as_tensor(batch.y).flatten()[flat],
        torch.as_tensor(batch.weights).flatten()[flat],
        axis=axis,
        term_weights=TermWeights(),
    )


def test_the_loss_of_packed_targets_is_the_sum_over_separate_rows():
    toy = Toy()
    truth = [thing("cat", 10, 20, 300, 400), thing("dog", 500, 500, 700, 800)]
    texts = [f"{{{box(1, 'cat', 12, 20, 310, 390)}}}", "", f"{{{box(4, 'x', 1, 1, 2, 2)}, ", '{"object_1": {']
    targets = [build_target(toy.rollout(text), truth, tokenizer=toy).rows for text in texts]
    rows = concat(targets)
    model = OneLayer(toy.vocab_size)
    axis = Axis.of(vocabulary_of(toy).coordinate_ids, toy.vocab_size)
    alone = [loss_of(rows[at : at + 1], model, axis) for at in range(len(rows))]
    packed = pack(rows, 560)
    assert len(packed) < len(rows)
    model.calls = 0
    together = loss_of(packed, model, axis)
    assert model.calls == 1
    assert together.total.item() == pytest.approx(sum(loss.total.item() for loss in alone), rel=1e-5)
    terms = torch.stack([loss.terms for loss in alone]).sum(0).tolist()
    assert together.terms.tolist() == pytest.approx(terms, rel=1e-5)
    assert min(terms) > 0
