from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fixtures import VOCAB, conversation, gradients, inputs, packed, small_gpt
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from chatmill.train import offload
from chatmill.train.hf import HFModel
from chatmill.train.offload import ActivationOffload, SavedInput

CHATS = [conversation(length, seed=length) for length in (6, 11, 9)]
COUNTS = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 64}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Enable activation offloading on the CPU, so that the tests run without a GPU."""
    monkeypatch.setattr(ActivationOffload.__init__, "__kwdefaults__", {"device_types": ("cpu",)})


@pytest.fixture
def copies(monkeypatch) -> list[str]:
    done: list[str] = []
    copy = SavedInput._copy

    def copied(self, target, source):
        done.append("to the host" if target is self._host else "to the device")
        return copy(self, target, source)

    monkeypatch.setattr(SavedInput, "_copy", copied)
    return done


def gpt2() -> HFModel:
    """Return a model with dropout; the dropout masks must be the same in the forward pass and in the recomputation."""
    torch.manual_seed(0)
    return HFModel(GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **COUNTS)).train())


@pytest.mark.parametrize("make", [small_gpt, partial(small_gpt, compute=torch.bfloat16), gpt2])
def test_losses_and_gradients_equal_those_of_activation_checkpointing(make, copies):
    batch = inputs(packed([CHATS], 30))
    results = []
    for keep in (False, True):
        model = make().train()
        model.checkpoint_blocks(offload=keep)
        torch.manual_seed(7)
        losses = [model(*batch).total for _ in range(2)]
        results.append([*losses, *gradients(model, sum(losses))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert copies.count("to the host") == 2 * len(model.blocks())
    # The input of the last layer is still on the device when the backward pass starts, so it is not copied back.
    assert copies.count("to the device") == 2 * len(model.blocks()) - 1


def test_autocast_is_restored_when_a_block_is_recomputed(copies):
    batch = inputs(packed([CHATS], 30))
    results = []
    for keep in (False, True):
        model = gpt2()
        model.compute = torch.bfloat16
        model.checkpoint_blocks(offload=keep)
        torch.manual_seed(7)
        results.append(gradients(model, model(*batch).total))
    assert copies and all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_blocks_are_offloaded_too(copies):
    batch = inputs(packed([CHATS], 30))
    results = []
    for keep in (False, True):
        model = small_gpt()
        model.checkpoint_blocks(offload=keep)
        for block in model.blocks():
            block.compile(dynamic=False, backend="aot_eager")
        results.append(gradients(model, model(*batch).total))
    assert copies.count("to the host") == len(model.blocks())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    depth=st.integers(1, 5),
    two=st.booleans(),
    twice=st.booleans(),
)
def test_offload_gives_the_gradients_of_checkpointing_for_any_blocks(sizes, depth, two, twice):
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
    keep = ActivationOffload(device_types=("cpu",))

    def run(way, size):
        generator = torch.Generator().manual_seed(size)
        a, b = (torch.randn(size, 4, generator=generator, requires_grad=True) for _ in range(2))
        x, y = a * 1, b * 1
        for layer in layers:
            x, y = way(lambda x, y, layer=layer: (torch.tanh(layer(x) + y), y * x), x, y if two else y.detach())
        loss = (x * y).sum()
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
        return [a.grad, b.grad, *(p.grad.clone() for p in layers.parameters())]

    for size in sizes:
        wanted = run(partial(checkpoint, use_reentrant=False), size)
        layers.zero_grad(set_to_none=True)
        got = run(keep.checkpoint, size)
        layers.zero_grad(set_to_none=True)
        assert all(torch.equal(p, q) if p is not None else q is None for p, q in zip(got, wanted, strict=True))


def test_host_buffers_are_reused_and_none_leaks(monkeypatch):
    made = []
    monkeypatch.setattr(offload, "check_memory", lambda size, *_, **__: made.append(size))
    keep = ActivationOffload()
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(rows):
        x = torch.ones(rows, 4, requires_grad=True) * 1
        for layer in layers:
            x = keep.checkpoint(layer, x)
        return x.sum()

    for rows in (2, 2, 1, 2):
        forward(rows).backward()
    # A graph that is deleted without a backward pass releases its buffers, and the next graph reuses them.
    forward(2)
    forward(2).backward()
    gc.collect()
    assert made == [2 * 4 * 4] * 3
    assert sorted(buffer.nbytes for buffer in keep._free) == made
    forward(5).backward()
    assert made[3:] == [5 * 4 * 4] * 3 and len(keep._free) == 3


def test_nothing_is_offloaded_without_gradients(copies):
    model = small_gpt()
    model.checkpoint_blocks(offload=True)
    with torch.no_grad():
        model(*inputs(packed([CHATS], 30)))
    assert copies == []


def test_at_most_one_prefetched_input_is_on_the_device(monkeypatch):
    made, start = [], SavedInput.__init__

    def remember(self, *args):
        start(self, *args)
        made.append(self)

    def waiting() -> list[int]:
        return [index for index, saved in enumerate(made) if saved._tensor is not None]

    monkeypatch.setattr(SavedInput, "__init__", remember)
    keep, seen = ActivationOffload(), []
    layers = [nn.Linear(4, 4) for _ in range(4)]
    x = torch.ones(2, 4, requires_grad=True) * 1
    for layer in layers:
        x = keep.checkpoint(lambda x, layer=layer: (seen.append(waiting()), layer(x).sin())[1], x)
    assert waiting() == [3]
    seen.clear()
    x.sum().backward()
    # While a layer is recomputed, the input of the layer before it is already being copied back.
    assert seen == [[2], [1], [0], []]
