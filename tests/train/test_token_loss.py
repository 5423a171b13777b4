from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fixtures import conversation, gradients, inputs, packed, plain_loss, small_gpt

from chatmill.train import loss as loss_module
from chatmill.train.loss import LMHead, Losses, TrainedPositions, by_segment, entropy, weighted_loss

CHATS = [conversation(length, seed=length) for length in (3, 9, 14, 2, 7, 11, 5, 8)]
ROWS = [CHATS[:2], CHATS[2:3], CHATS[3:5], CHATS[5:]]


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor], *, to: float = 1e-6) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=to) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def model():
    return small_gpt()


def test_loss_and_gradients_equal_cross_entropy_on_full_logits(model):
    batch = packed(ROWS, 26)
    ours = model(*inputs(batch))
    theirs, weight = plain_loss(model, batch)
    assert inputs(batch).targets.weight == pytest.approx(weight)
    assert ours.total.item() / weight == pytest.approx(theirs.item() / weight, abs=1e-5)
    assert close(gradients(model, ours.total / weight), gradients(model, theirs / weight))


def test_loss_depends_on_the_weights(model):
    batch = packed(ROWS, 26)
    flat = batch._replace(weights=batch.loss_mask.float())
    assert abs(model(*inputs(batch)).total.item() - model(*inputs(flat)).total.item()) > 1


def test_loss_does_not_depend_on_packing_and_order(model):
    apart = packed([[chat] for chat in CHATS], 15)
    turned = packed([[*CHATS[::-1][:4]], [*CHATS[::-1][4:]]], 60)
    losses = [model(*inputs(batch)).total for batch in (packed(ROWS, 26), packed([CHATS], 64), apart, turned)]
    assert [loss.item() for loss in losses] == pytest.approx([losses[0].item()] * 4, rel=1e-5)
    wanted = gradients(model, losses[0])
    assert all(close(gradients(model, loss), wanted, to=1e-4) for loss in losses[1:])


def test_loss_depends_on_segment_borders(model):
    batch = packed(ROWS, 26)
    borderless = batch._replace(segments=torch.zeros_like(batch.segments))
    assert abs(model(*inputs(batch)).total.item() - model(*inputs(borderless)).total.item()) > 0.1


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_accumulated_gradients_equal_those_of_the_whole_batch(model, parts):
    batch = packed(ROWS, 26)
    whole = gradients(model, model(*inputs(batch)).total / inputs(batch).targets.weight)
    weight = sum(inputs(part).targets.weight for part in batch.split(parts))
    pieces = [gradients(model, model(*inputs(part)).total / weight) for part in batch.split(parts)]
    assert close([sum(gradient) for gradient in zip(*pieces, strict=True)], whole)


def test_a_batch_without_trained_tokens_has_zero_loss_and_gradients(model):
    ids, weights = CHATS[1]
    batch = packed([[(ids, [0.0] * len(weights))]], 12)
    losses = model(*inputs(batch))
    assert losses.total.item() == 0 and inputs(batch).targets.count == 0
    assert all(bool((gradient == 0).all()) for gradient in gradients(model, losses.total))


def test_evaluation_gives_the_same_loss_and_keeps_no_graph(model):
    given_ = inputs(packed(ROWS, 26))
    trained = model(*given_)
    with torch.no_grad():
        evaluated = model(*given_)
    assert torch.equal(trained.total, evaluated.total) and torch.equal(trained.tokens, evaluated.tokens)
    assert not evaluated.total.requires_grad


def test_targets_are_the_trained_positions_padded_with_weight_zero():
    y = torch.tensor([[-100, 7, -100], [5, -100, 9]])
    weights = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.5]])
    targets = TrainedPositions.of(y, weights, multiple=4)
    assert targets.index.tolist() == [1, 3, 5, 0] and targets.ids.tolist() == [7, 5, 9, 0]
    assert targets.weights.tolist() == [2.0, 1.0, 0.5, 0.0]
    assert (targets.count, targets.weight) == (3, 3.5)


def test_losses_by_conversation_equal_those_of_single_conversations(model):
    batch = packed(ROWS, 26)
    given_ = inputs(batch)
    with torch.no_grad():
        total, weight = by_segment(model(*given_), given_.targets, given_.segments, 4)
        for row, chats in enumerate(ROWS):
            for segment, chat in enumerate(chats):
                alone, mass = plain_loss(model, packed([[chat]], len(chat[0])))
                assert total[row, segment].item() == pytest.approx(alone.item(), rel=1e-4, abs=1e-5)
                assert weight[row, segment].item() == mass
    assert weight[1].tolist()[1:] == [0, 0, 0]


HEADS = st.tuples(st.booleans(), st.sampled_from([1.0, 0.25, 3.0]), st.sampled_from([None, 2.0, 30.0]))


@given(st.integers(1, 300), HEADS, st.sampled_from([1, 4 * 37 * 128, 1 << 31]))
@settings(max_examples=25)
def test_every_kind_of_head_has_the_loss_and_gradients_of_full_logits(count, head, logit_bytes):
    biased, scale, cap = head
    generator = torch.Generator().manual_seed(count)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((1, count, 8), (37, 8), (37,))
    )
    ids = torch.randint(0, 37, (count,), generator=generator)
    weights = torch.rand(count, generator=generator)
    targets = TrainedPositions.of(ids[None], weights[None])

    z = (hidden[0] @ weight.T + (bias if biased else 0)) * scale
    z = z if cap is None else cap * torch.tanh(z / cap)
    theirs = (F.cross_entropy(z, ids, reduction="none") * weights).sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "LOGIT_BYTES", logit_bytes)
        ours = weighted_loss(hidden, LMHead(weight, bias if biased else None, scale, cap), targets).total
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    leaves = [hidden, weight, bias] if biased else [hidden, weight]
    assert close(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), to=1e-3)


def test_a_frozen_head_has_no_gradient():
    hidden = torch.randn(1, 5, 8, requires_grad=True)
    weight = torch.randn(11, 8)
    targets = TrainedPositions.of(torch.arange(5)[None], torch.ones(1, 5))
    weighted_loss(hidden, LMHead(weight), targets).total.backward()
    assert hidden.grad is not None and weight.grad is None


def test_only_one_chunk_of_logits_is_materialized_at_a_time(monkeypatch):
    monkeypatch.setattr(loss_module, "LOGIT_BYTES", 4 * 37 * 128)
    seen = []
    monkeypatch.setattr(
        loss_module, "entropy", lambda logits, *rest: seen.append(len(logits)) or entropy(logits, *rest)
    )
    targets = TrainedPositions.of(torch.zeros(1, 1000, dtype=torch.long), torch.ones(1, 1000))
    result = weighted_loss(torch.randn(1, 1000, 8), LMHead(torch.randn(37, 8)), targets)
    assert isinstance(result, Losses) and seen == [128] * 8


def test_extreme_logits_have_finite_losses():
    logits = torch.tensor([[1000.0, 0.0, -1000.0]] * 2)
    losses = entropy(logits, torch.tensor([0, 2]), torch.ones(2), 1.0, None)
    assert losses.tolist() == [0.0, 2000.0]
    assert all(math.isfinite(value) for value in logits.flatten().tolist())
