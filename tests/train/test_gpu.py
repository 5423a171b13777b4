from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from model_fixtures import SIZES, VOCAB, conversation, inputs, packed, save_qwen, small_gpt
from torch._inductor.async_compile import shutdown_compile_workers

from chatmill.train import flash
from chatmill.train.attention import attend, block_mask, dense_mask, segment_start
from chatmill.train.config import LoraSizes
from chatmill.train.flash import HEAD_SIZES, bounds_of, is_usable
from chatmill.train.flash_heads import flash_heads
from chatmill.train.generation import generate
from chatmill.train.load_model import open_model
from chatmill.train.loss import LMHead, TrainedPositions, entropy, weighted_loss
from chatmill.train.model import Inputs
from chatmill.train.rotary import rotate, rotations, split_heads

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is available"),
    # torch.compile causes warnings in its own code.
    pytest.mark.filterwarnings("ignore"),
]

CHATS = [conversation(length, seed=length) for length in (150, 9, 260, 31, 7, 90)]
ROWS = [CHATS[:3], CHATS[3:]]
WIDER = replace(SIZES, head_dim=32, max_positions=512)


@pytest.fixture(scope="module", autouse=True)
def compile_workers():
    """Stop the processes in which torch.compile compiles, which otherwise run until pytest exits."""
    yield
    shutdown_compile_workers()


@pytest.mark.parametrize("compiled", [False, True])
def test_offloaded_activations_give_the_same_gradients_and_free_the_gpu(compiled, monkeypatch):
    # FlashAttention adds up gradients in varying order unless deterministic algorithms are on.
    monkeypatch.setattr(flash, "are_deterministic_algorithms_enabled", lambda: True)
    batch = Inputs.of(packed(ROWS, 512), "cuda")
    peaks, results = [], []
    for offload in (False, True):
        model = small_gpt(replace(WIDER, n_layer=12, n_embd=512), compute=torch.bfloat16).cuda()
        model.checkpoint_blocks(offload=offload)
        if compiled:
            model.compile_blocks()
        # The first call compiles, and the second reuses host buffers.
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            hidden = model.hidden(*batch[:3])
            peaks.append(torch.cuda.memory_allocated() - start)
            hidden.float().square().sum().backward()
        results.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    # Between forward and backward, the GPU keeps the inputs of 12 layers or, with offloading, of only a few.
    one = hidden.nbytes
    assert peaks[1] >= 12 * one and peaks[3] < 6 * one


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "size"), [((6, 2, 2), 32), ((3, 3, 3), 24), ((16, 8, 8), 128)])
def test_the_rotary_kernel_equals_norm_followed_by_rotation(heads, size, norm):
    torch.manual_seed(0)
    cos, sin = rotations(torch.randint(0, 500, (2, 333), device="cuda"), size, 1e4)
    qkv = torch.randn(2, 333, sum(heads) * size, device="cuda", requires_grad=True)
    weights = tuple(torch.rand(size, device="cuda", requires_grad=True) for _ in "qk") if norm else None

    q, k, v = qkv.unflatten(-1, (-1, size)).split(heads, dim=-2)
    if weights:
        q, k = (F.rms_norm(part, (size,), weight, 1e-6) for part, weight in zip((q, k), weights, strict=True))
    wanted = rotate(q, cos, sin), rotate(k, cos, sin), v
    found = split_heads(qkv, weights, cos, sin, list(heads), 1e-6)
    assert max(map(far, found, wanted)) < 1e-6
    towards = [torch.randn_like(part) for part in wanted]
    inputs_of = [qkv, *(weights or ())]
    grads = (torch.autograd.grad(outputs, inputs_of, towards) for outputs in (found, wanted))
    assert max(map(far, *grads)) < 1e-6


def test_the_cross_entropy_kernel_equals_the_plain_function():
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


def test_flex_attention_equals_attention_with_the_dense_mask():
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


@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (7, 1)])
def test_flash_attention_equals_attention_with_the_dense_mask(heads, size):
    if not is_usable(torch.device("cuda"), size, torch.bfloat16):
        pytest.skip("needs flash-attn-4 and a Hopper GPU")
    torch.manual_seed(0)
    segments = packed(ROWS, 500).segments.cuda()
    parts = [torch.randn(2, 500, count, size, device="cuda") for count in (heads[0], heads[1], heads[1])]
    towards = torch.randn_like(parts[0])
    results = []
    for mask, dtype in ((bounds_of(segments), torch.bfloat16), (dense_mask(segment_start(segments)), torch.float32)):
        given = [part.to(dtype).requires_grad_() for part in parts]
        out = attend(*given, mask)
        results.append([out, *torch.autograd.grad(out, given, towards.to(dtype))])
    assert all(far(a, b) < 6e-3 for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (7, 1)])
def test_flash_attention_over_a_joint_projection_equals_its_parts(heads):
    if not is_usable(torch.device("cuda"), 128, torch.bfloat16):
        pytest.skip("needs flash-attn-4 and a Hopper GPU")
    torch.manual_seed(0)
    counts = [heads[0], heads[1], heads[1]]
    batch = packed(ROWS, 500)
    segments = batch.segments.cuda()
    cos, sin = rotations(batch.positions.cuda(), 128, 1e4)
    qkv = torch.randn(2, 500, sum(counts) * 128, device="cuda")
    weights = [torch.rand(128, device="cuda") for _ in "qk"]
    towards = torch.randn(2, 500, heads[0], 128, device="cuda")
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        given = [part.clone().requires_grad_() for part in (qkv.to(dtype), *weights)]
        if dtype == torch.bfloat16:
            out = flash_heads(given[0], (given[1], given[2]), cos, sin, counts, 1e-6, bounds_of(segments))
        else:
            q, k, v = given[0].unflatten(-1, (-1, 128)).split(counts, dim=-2)
            q, k = (F.rms_norm(part, (128,), weight, 1e-6) for part, weight in zip((q, k), given[1:], strict=True))
            out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, dense_mask(segment_start(segments)))
        results.append([out, *torch.autograd.grad(out, given, towards.to(dtype))])
    assert all(far(a, b) < 1e-2 for a, b in zip(*results, strict=True))


def test_the_compiled_bfloat16_loss_is_close_to_the_float32_loss_of_the_cpu():
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
def test_other_conversations_never_change_a_logit_on_the_gpu(sizes):
    model = small_gpt(sizes).cuda()
    model.compute = torch.bfloat16
    batch = packed(ROWS, 500).each(lambda tensor: tensor.cuda())
    mine = batch.segments == 1
    changed = torch.where(mine, batch.x, (batch.x + 7) % VOCAB)
    with torch.no_grad():
        before, after = (model.logits(x, batch.positions, batch.segments) for x in (batch.x, changed))
    assert torch.equal(before[mine], after[mine])
    assert not torch.equal(before[~mine], after[~mine])


def test_the_loss_of_many_positions_equals_that_of_the_cpu():
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


def test_answers_equal_those_of_the_cpu():
    prompts = [[1, 2, 3], [4], [5, 6, 7, 1, 2, 3, 1]]
    here = generate(small_gpt(SIZES), prompts, max_tokens=12, end_ids=[0])
    assert generate(small_gpt(SIZES).cuda(), prompts, max_tokens=12, end_ids=[0]) == here


def test_losses_of_a_transformers_model_equal_those_of_the_cpu():
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
    name = "chatmill_packed" if is_usable(model.device, 32, torch.bfloat16) else "chatmill_flex"
    assert model.lm.config._attn_implementation == name and far(losses.tokens, wanted) < 2e-2
    losses.total.backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_on_a_half_precision_model_match_the_float32_losses_of_the_cpu(dtype, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_qwen(tmp_path / "base", hidden_size=64, intermediate_size=96, head_dim=32)
    path = folder / "model.safetensors"
    narrow = {name: (tensor * 4).to(dtype) for name, tensor in load_file(path).items()}
    save_file(narrow, path, metadata={"format": "pt"})
    batch, results = packed(ROWS, 512), []
    for device, compute in (("cpu", None), ("cuda", torch.bfloat16)):
        model = open_model(folder, weights="stored", compute=compute).with_lora(LoraSizes(r=4), folder).to(device)
        torch.manual_seed(1)
        with torch.no_grad():
            for tensor in model.trained_state().values():
                tensor.copy_(torch.randn(tensor.shape) / 4)
        if device == "cuda":
            kinds = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
            assert kinds == ({dtype} if dtype is torch.bfloat16 else {dtype, torch.float32})
            model.compile_blocks()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        losses = model.train()(*Inputs.of(batch, device))
        results.append((losses.tokens, torch.autograd.grad(losses.total, trained)))
        assert {gradient.dtype for gradient in results[-1][1]} == {torch.float32}
    assert far(results[1][0], results[0][0]) < 5e-2
    sizes = [torch.stack([gradient.norm().cpu() for gradient in gradients]) for _, gradients in results]
    assert far(sizes[1], sizes[0]) < 0.2


def test_a_4_bit_base_gives_the_same_results_as_on_the_cpu(tmp_path):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    folder = save_qwen(tmp_path / "base", hidden_size=128, intermediate_size=256, max_position_embeddings=512)
    results = []
    for device, compute in (("cpu", None), ("cuda", None), ("cuda", torch.bfloat16)):
        torch.manual_seed(1)
        model = open_model(folder, weights="nf4", compute=compute).with_lora(LoraSizes(r=4), folder).to(device)
        batch = Inputs.of(packed(ROWS, 512), device)
        losses = model(*batch)
        losses.total.backward()
        results.append((losses.tokens, [weight.grad for weight in model.parameters() if weight.grad is not None]))
    (right, gradients), *others = results
    for (tokens, found), most in zip(others, (1e-3, 3e-2), strict=True):
        assert far(tokens, right) < most
        assert all(far(a, b) < 10 * most for a, b in zip(found, gradients, strict=True) if b.any())


@pytest.mark.parametrize("eight_bit", [True, False])
def test_the_compiled_step_of_low_precision_adamw_equals_the_eager_one(eight_bit):
    from chatmill.train.low_precision import LowPrecisionAdamW

    ends = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        shapes = ((96, 256), (64, 512), (80, 1408), (50, 128), (33,), (70, 70))
        weights = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
        numbers = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        optimizer = LowPrecisionAdamW(weights, **numbers, eight_bit=eight_bit)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator).to(device)
            optimizer.step()
        ends.append(weights)
    # A value between two int8 codes may be rounded to either code. The GPU and the CPU use different random numbers to
    # round bfloat16 moments.
    assert all(far(gpu.detach(), cpu.detach()) < 1e-3 for cpu, gpu in zip(*ends, strict=True))


def test_stochastic_rounding_on_a_gpu_preserves_the_mean_and_depends_on_the_seed():
    from chatmill.train.low_precision import LowPrecisionAdamW

    ends = []
    for seed in (1, 1, 2):
        weight = torch.nn.Parameter(torch.ones(512, 2048, dtype=torch.bfloat16, device="cuda"))
        optimizer = LowPrecisionAdamW([weight], lr=1e-4, betas=(0.9, 0.95), eps=1e-8, eight_bit=True)
        weight.grad = torch.ones_like(weight)
        torch.manual_seed(seed)
        optimizer.step()
        ends.append(weight.detach().float())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])
    # The next bfloat16 below 1 is 1 - 1/256, so 2.6% of the weights are rounded to it.
    assert abs(float(ends[0].mean()) - (1 - 1e-4)) < 1e-5


def test_float8_products_are_close_to_bfloat16():
    if find_spec("torchao") is None or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs torchao and a GPU with float8 matrix products")
    from chatmill.train.float8 import use_float8

    batch = Inputs.of(packed(ROWS, 512), "cuda")
    results = []
    for is_float8 in (False, True):
        model = small_gpt(WIDER, compute=torch.bfloat16).cuda()
        if is_float8:
            use_float8(model)
            model.checkpoint_blocks()
            model.compile_blocks()
        losses = model(*batch)
        losses.total.backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        results.append((losses.total.detach() / batch.targets.weight, gradient))
    (exact, gradient), (rounded, other) = results
    assert 0 < abs(float(rounded - exact)) < 0.05
    assert torch.nn.functional.cosine_similarity(gradient, other, dim=0) > 0.9
