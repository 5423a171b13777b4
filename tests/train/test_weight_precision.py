from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from model_fixtures import VOCAB, conversation, inputs, packed, small_gpt
from safetensors.torch import load_file, save_file

from chatmill.errors import DataError, UsageError
from chatmill.train import half_weights, memory
from chatmill.train.config import LoraSizes
from chatmill.train.distributed import World
from chatmill.train.generation import generate
from chatmill.train.load_model import open_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoConfig, AutoModelForCausalLM

BATCH = packed([[conversation(length, seed=length) for length in row] for row in ((5, 9), (3, 7))], 16)
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    # Tied embeddings are scaled in the dtype of their weight.
    "gemma3_text": COMMON | {"head_dim": 8},
    # Weights outside nn.Linear: Conv1D, experts, and weights that other modules read directly.
    "gpt2": GPT2 | {"bos_token_id": 1, "eos_token_id": 2},
    "mixtral": COMMON | {"num_local_experts": 2},
    "mamba": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "phi3": COMMON,
}


def folder_of(name: str, dtype: torch.dtype, folder: Path) -> Path:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **ARCHITECTURES[name]))
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) / 8)
    lm.to(dtype).save_pretrained(folder)
    return folder


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval().logits(BATCH.x, BATCH.positions, BATCH.segments)


def dtypes_of(model) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("llama", torch.float16),
        ("gemma3_text", torch.bfloat16),
        ("gpt2", torch.float16),
        ("mixtral", torch.bfloat16),
        ("mamba", torch.bfloat16),
    ],
)
def test_half_precision_weights_give_the_logits_and_answers_of_float32(name, dtype, tmp_path):
    folder = folder_of(name, dtype, tmp_path)
    exact, stored = open_model(folder), open_model(folder, weights="stored")
    assert torch.equal(logits_of(stored), logits_of(exact))
    assert stored.separates == exact.separates
    prompts = [[1, 2, 3], [4]]
    assert generate(stored, prompts, max_tokens=3, end_ids=[]) == generate(exact, prompts, max_tokens=3, end_ids=[])
    # If weights and computation are bfloat16, the hidden states are rounded to bfloat16 too.
    rough = logits_of(open_model(folder, weights="stored", compute=torch.bfloat16))
    wanted = logits_of(open_model(folder, compute=torch.bfloat16))
    assert (rough - wanted).abs().max() <= (0 if dtype is torch.float16 else 0.5) * wanted.abs().max()


def test_linear_layers_and_embeddings_stay_half_and_vectors_become_float32(tmp_path):
    folder = folder_of("llama", torch.bfloat16, tmp_path)
    for name, dtype in dtypes_of(open_model(folder, weights="stored")).items():
        assert dtype == (torch.float32 if "norm" in name else torch.bfloat16), name
    for weights in ("stored", "bfloat16"):
        half = open_model(folder, weights=weights, compute=torch.bfloat16)
        assert set(dtypes_of(half).values()) == {torch.bfloat16}
    assert set(dtypes_of(open_model(folder)).values()) == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_loaded_model_does_not_change_with_its_files(dtype, tmp_path):
    folder = folder_of("llama", dtype, tmp_path)
    for weights in ("stored", "float32"):
        model = open_model(folder, weights=weights, compute=torch.bfloat16)
        before = logits_of(model)
        path = folder / "model.safetensors"
        data = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(len(data) // 2)
            file.write(bytes(len(data) - len(data) // 2))
        assert torch.equal(logits_of(model), before)
        path.write_bytes(data)


def test_each_weight_of_a_mixed_precision_folder_keeps_its_dtype(tmp_path):
    folder = folder_of("llama", torch.bfloat16, tmp_path)
    path = folder / "model.safetensors"
    wide = ("norm.weight", "layers.1.mlp.up_proj.weight")
    tensors = {
        name: tensor.float() + 1e-4 if name.endswith(wide) else tensor for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    stored = open_model(folder, weights="stored", compute=torch.bfloat16)
    for name, tensor in stored.lm.state_dict().items():
        # If a weight has a wider dtype in one layer, it is loaded with this dtype in all layers.
        assert tensor.dtype == (torch.float32 if name.endswith(("norm.weight", "up_proj.weight")) else torch.bfloat16)
        assert torch.equal(tensor.float(), tensors[name].float())
    assert torch.equal(logits_of(open_model(folder, weights="stored")), logits_of(open_model(folder)))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters_on_a_half_precision_base_train_in_float32(name, tmp_path):
    folder = folder_of(name, torch.bfloat16, tmp_path / "base")
    given, results = inputs(BATCH), []
    for weights, checkpointed in (("float32", False), ("stored", False), ("stored", True)):
        model = open_model(folder, weights=weights).with_lora(LoraSizes(r=4), folder).eval()
        assert {tensor.dtype for tensor in model.trained_state().values()} == {torch.float32}
        torch.manual_seed(1)
        with torch.no_grad():
            for tensor in model.trained_state().values():
                tensor.normal_(std=0.1)
        if checkpointed:
            model.train()
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            model.checkpoint_blocks()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        results.append(torch.autograd.grad(model(*given).total, trained))
    for gradients in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients, results[0], strict=True))
    (tmp_path / "saved").mkdir()
    model.save(tmp_path / "saved")
    again = open_model(tmp_path / "saved")
    assert all(torch.equal(again.trained_state()[name], tensor) for name, tensor in model.trained_state().items())
    assert torch.bfloat16 in dtypes_of(again).values()


def test_bfloat16_weights_can_be_trained_and_their_gradients_are_bfloat16(tmp_path):
    folder = folder_of("llama", torch.float32, tmp_path)
    model = open_model(folder, weights="bfloat16")
    # The reference has the same weights, rounded to bfloat16 but stored as float32.
    exact = open_model(folder)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    given = inputs(BATCH)
    ours = torch.autograd.grad(model(*given).total, list(model.parameters()))
    theirs = torch.autograd.grad(exact(*given).total, list(exact.parameters()))
    for parameter, a, b in zip(model.parameters(), ours, theirs, strict=True):
        assert a.dtype == parameter.dtype
        # Gradients of repeated tokens are summed in bfloat16.
        assert torch.allclose(a.float(), b, rtol=1e-2, atol=1e-2 * float(b.abs().max()))


def test_a_chatmill_gpt_loads_in_the_dtype_of_its_file(tmp_path):
    model = small_gpt()
    model.save(tmp_path, {name: tensor.bfloat16() for name, tensor in model.state_dict().items()})
    exact, stored = open_model(tmp_path), open_model(tmp_path, weights="stored")
    assert set(dtypes_of(exact).values()) == {torch.float32}
    assert set(dtypes_of(stored).values()) == {torch.bfloat16}
    assert torch.equal(logits_of(stored), logits_of(exact))
    assert generate(stored, [[1, 2]], max_tokens=3, end_ids=[]) == generate(exact, [[1, 2]], max_tokens=3, end_ids=[])
    with pytest.raises(UsageError, match="which nf4 quantization requires"):
        open_model(tmp_path, weights="nf4")


def test_fsdp_refuses_layers_with_weights_of_several_dtypes(tmp_path, monkeypatch):
    """With float32 computation, the norm weights are float32, but FSDP requires one dtype per layer."""
    model = open_model(folder_of("llama", torch.float32, tmp_path), weights="bfloat16")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match="the weights of a layer are bfloat16 and float32, which FSDP cannot shard"):
        World(0, 1, torch.device("cpu")).distribute(model, sharded=True, compute=None)


@pytest.mark.parametrize("own", [True, False])
def test_the_memory_check_counts_bytes_of_the_dtype(own, tmp_path, monkeypatch):
    if own:
        model = small_gpt()
        model.save(tmp_path, {name: tensor.bfloat16() for name, tensor in model.state_dict().items()})
    else:
        model = open_model(folder_of("llama", torch.bfloat16, tmp_path))
    size = model.num_parameters
    monkeypatch.setattr(memory, "available_memory", lambda: 3 * size)
    assert open_model(tmp_path, weights="stored").num_parameters == size
    with pytest.raises(DataError, match="of memory"):
        open_model(tmp_path)


def test_tied_weights_are_saved_once(tmp_path):
    base = folder_of("gemma3_text", torch.bfloat16, tmp_path / "base")
    (tmp_path / "saved").mkdir()
    open_model(base).save(tmp_path / "saved")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "saved"))
    assert {name: tensor.dtype for name, tensor in after.items()} == {n: t.dtype for n, t in before.items()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_half_weights_are_cast_in_parts_for_small_inputs(monkeypatch, rows, bias):
    torch.manual_seed(rows)
    layer = half_weights.HalfLinear(24, 50, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, rows, 24)
    expected = torch.nn.functional.linear(x, layer.weight.float(), None if layer.bias is None else layer.bias.float())
    casts = []
    split = torch.Tensor.split
    monkeypatch.setattr(torch.Tensor, "split", lambda self, size: casts.append(size) or split(self, size))
    monkeypatch.setattr(half_weights, "CAST_VALUES", 7 * 24 + 5)
    torch.testing.assert_close(layer(x), expected)
    assert casts == ([7] if rows < 25 else [])
