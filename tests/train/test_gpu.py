"""What a GPU computes, held against the CPU; left out where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_fixtures import SIZES, VOCAB, conversation, inputs, packed, small_gpt

from chatmill.train.attention import attend, block_mask, dense_mask, segment_start
from chatmill.train.generation import generate
from chatmill.train.loss import LMHead, TrainedPositions, entropy, weighted_loss
from chatmill.train.model import Inputs

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    # The compiler warns of its own innards.
    pytest.mark.filterwarnings("ignore"),
]

CHATS = [conversation(length, seed=length) for length in (150, 9, 260, 31, 7, 90)]
ROWS = [CHATS[:3], CHATS[3:]]
WIDER = replace(SIZES, head_dim=32, max_positions=512)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm())


def test_the_kernel_of_cross_entropy_is_the_plain_function():
    from chatmill.train.entropy_kernel import entropy_in_place

    torch.manual_seed(0)
    for dtype, scale, cap in ((torch.float32, 1.0, None), (torch.float32, 0.3, 5.0), (torch.bfloat16, 2.0, 30.0)):
        logits = (torch.randn(70, 9001, device="cuda") * 4).to(dtype)
        ids, weights = torch.randint(0, 9001, (70,), device="cuda"), torch.rand(70, device="cuda")
        plain = logits.float().clone()
        wanted = entropy(plain, ids, weights, scale, cap)
        found = entropy_in_place(logits, ids, weights, scale, cap)
        assert torch.allclose(found, wanted, atol=1e-4)
        assert far(logits, plain) < (1e-5 if dtype == torch.float32 else 5e-3)


def test_attention_in_blocks_is_attention_under_the_plain_mask():
    torch.manual_seed(0)
    segments = packed(ROWS, 500).segments.cuda()
    start = segment_start(segments)
    q = torch.randn(2, 500, 4, 32, device="cuda", requires_grad=True)
    k, v = (torch.randn(2, 500, 2, 32, device="cuda", requires_grad=True) for _ in "kv")
    towards = torch.randn(2, 500, 4, 32, device="cuda")
    ours, theirs = attend(q, k, v, block_mask(start)), attend(q, k, v, dense_mask(start))
    assert far(ours, theirs) < 2e-3
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v), towards) for out in (ours, theirs)), strict=True):
        assert far(a, b) < 5e-3


def test_loss_of_the_compiled_model_in_bfloat16_is_near_that_of_the_cpu_in_float32():
    exact, rough = small_gpt(WIDER), small_gpt(WIDER).cuda()
    rough.compute = torch.bfloat16
    rough.compile_blocks()
    batch = packed(ROWS, 500)
    wanted, found = exact(*inputs(batch)).total, rough(*Inputs.of(batch, "cuda")).total
    assert abs(found.item() / wanted.item() - 1) < 0.02
    wanted.backward()
    found.backward()
    for a, b in zip(rough.parameters(), exact.parameters(), strict=True):
        assert a.grad is not None and a.grad.dtype == torch.float32 and far(a.grad, b.grad) < 0.2


@pytest.mark.parametrize("sizes", [WIDER, SIZES], ids=["blocks", "heads too narrow for blocks"])
def test_other_conversations_never_change_a_logit_there_either(sizes):
    model = small_gpt(sizes).cuda()
    model.compute = torch.bfloat16
    batch = packed(ROWS, 500).each(lambda tensor: tensor.cuda())
    mine = batch.segments == 1
    changed = torch.where(mine, batch.x, (batch.x + 7) % VOCAB)
    with torch.no_grad():
        before, after = (model.logits(x, batch.positions, batch.segments) for x in (batch.x, changed))
    assert torch.equal(before[mine], after[mine])
    assert not torch.equal(before[~mine], after[~mine])


def test_the_loss_of_many_positions_is_that_of_the_cpu():
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 3000, 64), torch.randn(5003, 64) / 8
    targets = TrainedPositions.of(torch.randint(0, 5003, (1, 3000)), torch.rand(1, 3000))
    found = []
    for device in ("cpu", "cuda"):
        h, w = (part.clone().to(device).requires_grad_() for part in (hidden, weight))
        losses = weighted_loss(h, LMHead(w), targets.to(device))
        losses.total.backward()
        found.append((losses.total, losses.tokens, h.grad, w.grad))
    assert all(far(gpu, cpu) < 1e-3 for cpu, gpu in zip(*found, strict=True))


def test_answers_are_those_of_the_cpu():
    prompts = [[1, 2, 3], [4], [5, 6, 7, 1, 2, 3, 1]]
    here = generate(small_gpt(SIZES), prompts, max_tokens=12, end_ids=[0])
    assert generate(small_gpt(SIZES).cuda(), prompts, max_tokens=12, end_ids=[0]) == here


def test_a_transformers_model_has_the_losses_of_the_cpu():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from chatmill.train.hf import HFModel

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    torch.manual_seed(0)
    model = HFModel(Qwen3ForCausalLM(config))
    batch = packed(ROWS, 512)
    wanted = model(*inputs(batch)).tokens
    model.cuda()
    assert far(model(*Inputs.of(batch, "cuda")).tokens, wanted) < 2e-3
    model.compute = torch.bfloat16
    losses = model(*Inputs.of(batch, "cuda"))
    assert model.lm.config._attn_implementation == "chatmill_flex" and far(losses.tokens, wanted) < 2e-2
    losses.total.backward()
    assert all(weight.grad is not None for weight in model.parameters())
