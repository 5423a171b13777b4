"""Test the conversation boundaries and gradients in flash.py, with plain attention in place of the FlashAttention 4
kernels.
"""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from model_fixtures import SIZES, conversation, inputs, packed, small_gpt

from chatmill.train import attention, flash, flash_heads, hf, rotary
from chatmill.train.attention import attend, dense_mask, segment_start
from chatmill.train.flash import Bounds, bounds_of, remember_bounds
from chatmill.train.hf import HFModel
from chatmill.train.hf_attention import FLASH_TYPES
from chatmill.train.rotary import rotate, rotations

CHATS = [conversation(length, seed=length) for length in (15, 9, 26, 3, 7, 1)]
BATCH = packed([CHATS[:3], CHATS[3:]], 53)


def probabilities(q, k, scale):
    """Return the causal attention probabilities of one conversation, with shape (heads, queries, keys)."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return scores.masked_fill(~torch.ones(len(q), len(k), dtype=torch.bool).tril(), -torch.inf).softmax(-1)


def each_conversation(bounds, q, k, v):
    times = q.shape[1] // k.shape[1]
    for start, stop in itertools.pairwise(bounds.tolist()):
        here = slice(start, stop)
        yield here, q[here], *(part[here].repeat_interleave(times, dim=1) for part in (k, v))


def plain_forward(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, return_lse
):
    assert causal and return_lse and cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    for here, one_q, one_k, one_v in each_conversation(cu_seqlens_q, q, k, v):
        out[here] = torch.einsum("hqk,khd->qhd", probabilities(one_q, one_k, softmax_scale), one_v)
    return out, out.new_zeros((q.shape[1], q.shape[0])), None


def plain_backward(q, k, v, out, grad, lse, *, cu_seqlens_q, softmax_scale, dq, dk, dv, deterministic, **lengths):
    for here, one_q, one_k, one_v in each_conversation(cu_seqlens_q, q, k, v):
        p = probabilities(one_q, one_k, softmax_scale)
        dp = torch.einsum("qhd,khd->hqk", grad[here], one_v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * softmax_scale
        dq[here] = torch.einsum("hqk,khd->qhd", ds, one_k)
        of_k, of_v = torch.einsum("hqk,qhd->khd", ds, one_q), torch.einsum("hqk,qhd->khd", p, grad[here])
        for to, found in ((dk, of_k), (dv, of_v)):
            to[here] = found.unflatten(1, (k.shape[1], -1)).sum(2)


@pytest.fixture
def on_any_device(monkeypatch):
    monkeypatch.setattr(flash, "_kernels", lambda: (plain_forward, plain_backward))
    monkeypatch.setattr(attention, "is_usable", lambda *given: True)
    monkeypatch.setattr(hf, "is_usable", lambda *given: True)


rows_ = st.lists(st.lists(st.integers(1, 23), min_size=1, max_size=8), min_size=1, max_size=3)


@given(rows_, st.integers(1, 70))
def test_the_bounds_are_the_ends_of_the_segments_padded_to_a_power_of_two(lengths, size):
    rows = [
        ([number for number, length in enumerate(row) for _ in range(length)] + [99] * size)[:size] for row in lengths
    ]
    at, longest = bounds_of(torch.tensor(rows))
    flat = [(row, segment) for row, segments in enumerate(rows) for segment in segments]
    starts = [place for place, pair in enumerate(flat) if place == 0 or flat[place - 1] != pair]
    assert at.dtype == torch.int32 and longest == size
    assert at.tolist() == starts + [len(flat)] * (len(at) - len(starts))
    assert len(at) == 129 and len(starts) < len(at)


def test_more_segments_than_the_smallest_size_get_more_bounds():
    at, _ = bounds_of(torch.arange(300).expand(2, -1))
    assert at.tolist() == [*range(600), *[600] * (1025 - 600)]


def test_remembered_bounds_are_used_instead_of_the_tensor():
    segments, host = torch.zeros(1, 6, dtype=torch.int32), torch.tensor([[0, 0, 1, 1, 1, 2]])
    remember_bounds(segments, host)
    assert bounds_of(segments).at[:4].tolist() == [0, 2, 5, 6]


def test_attention_and_its_gradients_are_those_of_the_dense_mask(on_any_device):
    torch.manual_seed(0)
    q = torch.randn(2, 53, 4, 8, requires_grad=True)
    k, v = (torch.randn(2, 53, 2, 8, requires_grad=True) for _ in "kv")
    # In the model, the values are a non-contiguous slice of the joint projection.
    v = torch.cat([v, v], dim=-2)[:, :, 2:]
    masks = [bounds_of(BATCH.segments), dense_mask(segment_start(BATCH.segments))]
    assert isinstance(masks[0], Bounds)
    towards = torch.randn(2, 53, 4, 8)
    ours, theirs = (attend(q, k, v, mask) for mask in masks)
    assert torch.allclose(ours, theirs, atol=1e-6)
    grads = (torch.autograd.grad(out, (q, k, v), towards) for out in (ours, theirs))
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def plain_rotated(qkv, q_weight, k_weight, cos, sin, heads, eps):
    size = cos.shape[-1]
    q, k, _ = qkv.unflatten(-1, (-1, size)).split([*heads, heads[1]], dim=-2)
    if q_weight is not None:
        q, k = F.rms_norm(q, (size,), q_weight, eps), F.rms_norm(k, (size,), k_weight, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def plain_rotated_backward(grads, qkv, q_weight, k_weight, cos, sin, eps):
    """Compute the gradients of the joint projection and the norm weights with autograd."""
    dq, dk, dv = grads[0], grads[1].sum(0), grads[2].sum(0)
    given = [part if part is None else part.detach().requires_grad_() for part in (qkv, q_weight, k_weight)]
    with torch.enable_grad():
        q, k = plain_rotated(*given, cos, sin, [dq.shape[2], dk.shape[2]], eps)
        v = given[0].unflatten(-1, (-1, cos.shape[-1]))[:, :, -dv.shape[2] :]
        found = torch.autograd.grad([q, k, v], [part for part in given if part is not None], [dq, dk, dv])
    return found[0], torch.stack(found[1:]) if q_weight is not None else qkv.new_empty(2, cos.shape[-1])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (5, 1)])
def test_attention_over_a_joint_projection_and_its_gradients_equal_those_of_its_heads(
    on_any_device, monkeypatch, heads, norm
):
    monkeypatch.setattr(flash_heads, "rotated", plain_rotated)
    monkeypatch.setattr(rotary, "rotated_backward", plain_rotated_backward)
    torch.manual_seed(0)
    counts = [heads[0], heads[1], heads[1]]
    cos, sin = rotations(BATCH.positions, 8, 1e4)
    given = [torch.randn(2, 53, sum(counts) * 8), *(torch.rand(8) for _ in range(2 * norm))]
    for part in given:
        part.requires_grad_()
    weights = tuple(given[1:]) or None
    found = flash_heads.flash_heads(given[0], weights, cos, sin, counts, 1e-6, bounds_of(BATCH.segments))
    q, k = plain_rotated(given[0], *(weights or (None, None)), cos, sin, counts[:2], 1e-6)
    v = given[0].unflatten(-1, (-1, 8))[:, :, -heads[1] :]
    wanted = attend(q, k, v, dense_mask(segment_start(BATCH.segments)))
    assert torch.allclose(found, wanted, atol=1e-6)
    towards = torch.randn_like(wanted)
    for a, b in zip(*(torch.autograd.grad(out, given, towards) for out in (found, wanted)), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


# torch.compile causes warnings in its own code.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gpt_has_the_same_loss_and_gradients(on_any_device, monkeypatch, compiled):
    found = small_gpt(SIZES)
    if compiled:
        for block in found.blocks():
            block.compile(dynamic=False, backend="aot_eager")
    losses = [found(*inputs(BATCH)).total]
    monkeypatch.setattr(attention, "is_usable", lambda *given: False)
    wanted = small_gpt(SIZES)
    losses.append(wanted(*inputs(BATCH)).total)
    assert torch.allclose(*losses, rtol=1e-6)
    for loss in losses:
        loss.backward()
    for a, b in zip(found.parameters(), wanted.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-4, rtol=1e-4)


def tiny_lm(kind, **more):
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | {"sliding_window": None} | more))
    # Random weights are so small that attention would hardly change the result.
    with torch.no_grad():
        for weight in lm.parameters():
            weight.mul_(4) if weight.ndim > 1 else None
    return lm


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", FLASH_TYPES)
def test_every_listed_architecture_has_the_same_states_and_gradients(on_any_device, monkeypatch, kind, checkpointing):
    model = HFModel(tiny_lm(kind))
    if checkpointing:
        model.train()
        model.checkpoint_blocks()
    results, towards = [], torch.randn(*BATCH.x.shape, 64)
    for usable in (True, False):
        monkeypatch.setattr(hf, "is_usable", lambda *given, usable=usable: usable)
        assert model.uses_flash() is usable
        model.zero_grad(set_to_none=True)
        states = model.hidden(BATCH.x, BATCH.positions, BATCH.segments)
        assert model.lm.config._attn_implementation == ("chatmill_packed" if usable else "sdpa")
        (states * towards).sum().backward()
        results.append([states.detach(), *(weight.grad for weight in model.lm.base_model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-4 * float(b.abs().max()), rtol=1e-3)


def test_models_with_sliding_windows_or_dropout_do_not_use_it(on_any_device):
    assert HFModel(tiny_lm("mistral")).uses_flash()
    assert not HFModel(tiny_lm("mistral", sliding_window=16)).uses_flash()
    assert not HFModel(tiny_lm("qwen3", use_sliding_window=True, sliding_window=16, max_window_layers=1)).uses_flash()
    assert not HFModel(tiny_lm("llama", attention_dropout=0.1)).uses_flash()
    assert not HFModel(tiny_lm("gemma2", sliding_window=16)).uses_flash()


def test_without_the_package_or_a_gpu_it_is_not_used():
    flash._kernels.cache_clear()
    assert flash._kernels() is None
    assert not flash.is_usable(torch.device("cpu"), 64, torch.bfloat16)


def test_a_package_that_does_not_import_is_reported_once(monkeypatch):
    monkeypatch.setattr(flash, "version", lambda name: "4.0.0")
    monkeypatch.setattr(flash, "import_module", lambda name: object())
    flash._kernels.cache_clear()
    with pytest.warns(UserWarning, match="flash-attn-4 4.0.0 cannot be used .*_flash"):
        assert flash._kernels() is None
    assert flash._kernels() is None
    flash._kernels.cache_clear()
