from __future__ import annotations

import json
import shutil
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from model_fixtures import conversation, inputs, packed, save_qwen, small_gpt
from test_weight_precision import folder_of
from train_fixtures import curve, trained

from chatmill.cli.main import main
from chatmill.errors import DataError, UsageError
from chatmill.train import merge_adapters
from chatmill.train.checkpoint import list_checkpoints
from chatmill.train.config import LoraSizes, TrainConfig
from chatmill.train.hf import HFModel
from chatmill.train.load_model import open_model, open_ready

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import bitsandbytes as bnb
    import peft  # noqa: F401

CHATS = [conversation(length, seed=length) for length in (5, 9, 3, 7)]
BATCH = packed([CHATS[:2], CHATS[2:]], 16)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}
NF4 = {"lora": {"r": 4, "dropout": 0.2}, "quantize": "nf4"}


@pytest.fixture
def base(tmp_path):
    return save_qwen(tmp_path / "base", **SIZES)


def quantized_linear(lm) -> dict[str, bnb.nn.Linear4bit]:
    return {name: module for name, module in lm.named_modules() if isinstance(module, bnb.nn.Linear4bit)}


def dequantized(folder, lm) -> HFModel:
    plain = HFModel.load(folder)
    for name, module in quantized_linear(lm).items():
        weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        plain.lm.get_submodule(name).weight.data = weight.float()
    return plain


def test_adapters_on_4_bit_layers_compute_what_peft_does(base):
    model = adapted(HFModel.load(base, weights="nf4"), alpha=7.0)
    layers = [module for module in model.lm.modules() if type(module).__name__ == "AdaptedLinear"]
    assert len(layers) == 2 * 7

    def outcome() -> list[torch.Tensor]:
        model.zero_grad()
        logits = model.logits(BATCH.x, BATCH.positions, BATCH.segments)
        logits.square().sum().backward()
        return [logits.detach(), *(weight.grad for weight in model.parameters() if weight.requires_grad)]

    ours = outcome()
    for layer in layers:
        layer.__class__ = type(layer).__bases__[0]
    for mine, theirs in zip(ours, outcome(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval().logits(BATCH.x, BATCH.positions, BATCH.segments)


def adapted(model, **sizes) -> HFModel:
    torch.manual_seed(1)
    model = model.with_lora(LoraSizes(r=4, **sizes), model.source).train()
    for name, parameter in model.named_parameters():
        # In new adapters, lora_B is zero, which would make the gradients of lora_A zero.
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_logits_and_gradients_equal_those_of_dequantized_weights(base):
    model = open_model(base, weights="nf4")
    plain = dequantized(base, model.lm)
    assert torch.equal(logits_of(model), logits_of(plain))
    assert not torch.allclose(logits_of(model), logits_of(open_model(base)), atol=1e-3)
    given, results = inputs(BATCH), []
    for each in (adapted(model), adapted(plain)):
        trained_weights = [weight for weight in each.parameters() if weight.requires_grad]
        results.append(torch.autograd.grad(each(*given).total, trained_weights))
    assert len(results[0]) == 2 * len(quantized_linear(model.lm))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_linear_layers_are_4_bit_and_all_others_keep_their_dtype(base):
    lm = open_model(base, weights="nf4").lm
    linear = quantized_linear(lm)
    assert len(linear) == 2 * 7 and lm.get_output_embeddings() not in linear.values()
    for module in linear.values():
        count, state = module.in_features * module.out_features, module.weight.quant_state
        assert (module.weight.dtype, module.weight.nbytes, module.weight.requires_grad) == (
            torch.uint8,
            count // 2,
            False,
        )
        assert (state.absmax.dtype, state.absmax.numel()) == (torch.uint8, count // 64)
        assert state.state2.absmax.numel() == -(-count // 64 // 256)
    stored = open_model(base, weights="stored").lm.state_dict()
    others = {name: tensor for name, tensor in lm.state_dict().items() if name in stored and name[:-7] not in linear}
    assert others and all(torch.equal(stored[name], tensor) for name, tensor in others.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_bases_are_quantized_from_their_stored_weights(tmp_path, dtype):
    from transformers import AutoModelForCausalLM

    folder = save_qwen(tmp_path / "base", **SIZES)
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    model = open_model(folder, weights="nf4")
    assert model.separates and model.lm.get_input_embeddings().weight.dtype == dtype
    stored = open_model(folder, weights="stored").lm
    for name, module in quantized_linear(model.lm).items():
        weight = stored.get_submodule(name).weight
        packed_weight, _ = bnb.functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
        assert torch.equal(packed_weight, module.weight.data)
    rough = open_model(folder, weights="nf4", compute=torch.bfloat16)
    assert rough.separates
    assert torch.nn.functional.cosine_similarity(logits_of(rough).flatten(), logits_of(model).flatten(), dim=0) > 0.999


def test_no_dequantized_weight_is_kept_for_the_backward_pass(base):
    model = adapted(open_model(base, weights="nf4"))
    shapes = {(module.out_features, module.in_features) for module in quantized_linear(model.lm).values()}
    shapes |= {shape[::-1] for shape in shapes}
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.hidden(*inputs(packed([CHATS[:2], CHATS[2:]], 19))[:3])
    assert any(tensor.dtype == torch.uint8 for tensor in kept)
    assert not [tensor for tensor in kept if tuple(tensor.shape) in shapes]


def test_offloaded_4_bit_layers_have_the_same_gradients(base):
    results = []
    for offload in (None, False, True):
        model = adapted(open_model(base, weights="nf4"))
        if offload is not None:
            model.checkpoint_blocks(offload=offload)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        results.append(torch.autograd.grad(model(*inputs(BATCH)).total, weights))
    for plain, *others in zip(*results, strict=True):
        assert all(torch.equal(plain, other) for other in others)


def test_a_qlora_run_resumes_bitwise_exactly(sums_data, tmp_path):
    base = save_qwen(tmp_path / "base", vocab_size=300, max_position_embeddings=64, attention_dropout=0.1, **SIZES)
    settings = {"init_from_model": str(base), "save_interval": 3, "keep_checkpoints": 9, "learning_rate": 1e-2, **NF4}
    whole = trained(sums_data, tmp_path, name="whole", **settings)
    losses = [loss for _, loss, *_ in curve(whole.folder)]
    assert losses[-1] < losses[0] - 0.5
    shutil.copytree(whole.folder, tmp_path / "parts")
    for path in list_checkpoints(tmp_path / "parts")[1:]:
        shutil.rmtree(path)
    parts = trained(sums_data, tmp_path, name="parts", resume="auto", **settings)
    assert curve(parts.folder) == curve(whole.folder)
    for name in ("state-00000-of-00001.safetensors", "model/adapter_model.safetensors"):
        assert (parts.checkpoint / name).read_bytes() == (whole.checkpoint / name).read_bytes()
    with pytest.raises(UsageError, match='quantize was "nf4", but is now "none"'):
        trained(sums_data, tmp_path, name="parts", resume="auto", **{**settings, "quantize": "none"})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora": None}, "quantize is nf4 and lora is not set"),
        ({"parallel": "fsdp"}, "quantize is nf4 and parallel is fsdp, which cannot shard 4-bit weights; use ddp"),
        ({"quantize": "int3"}, "quantize"),
    ],
)
def test_invalid_quantize_configs_are_refused(changes, says):
    with pytest.raises(UsageError, match=says) as caught:
        TrainConfig.from_mapping({"init_from_model": "base", **NF4, **changes})
    assert "\n" not in str(caught.value)


def test_models_that_cannot_be_quantized_are_refused_in_one_line(base, tmp_path, monkeypatch):
    (tmp_path / "gpt").mkdir()
    small_gpt().save(tmp_path / "gpt")
    with pytest.raises(UsageError, match="is not a Hugging Face model, which nf4 quantization requires"):
        open_model(tmp_path / "gpt", weights="nf4")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("chatmill.train.hf_load.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"nf4 weights require bitsandbytes; pip install 'chatmill\[qlora\]'"):
        open_model(base, weights="nf4")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="has a quantization_config, so the model is already quantized"):
        open_model(base, weights="nf4")


def test_models_that_cannot_compute_with_4_bit_layers_are_refused_in_one_line(tmp_path):
    folder_of("mamba", torch.bfloat16, tmp_path)
    with pytest.raises(
        DataError, match="this architecture cannot compute with 4-bit linear layers; set quantize to none"
    ) as caught:
        open_model(tmp_path, weights="nf4")
    assert "\n" not in str(caught.value)


def test_saved_adapters_load_the_base_they_were_trained_on(base, tmp_path):
    folder = tmp_path / "adapters"
    folder.mkdir()
    model = adapted(open_model(base, weights="nf4"))
    model.save(folder)
    wanted = logits_of(model)
    assert torch.equal(logits_of(open_ready(folder, "cpu")), wanted)
    assert torch.equal(logits_of(open_model(folder)), wanted)
    original = open_ready(folder, "cpu", base="original")
    assert not quantized_linear(original.lm) and not torch.allclose(logits_of(original), wanted, atol=1e-3)
    with pytest.raises(UsageError, match="is not an adapter folder, but --base is original; remove the option"):
        open_ready(base, "cpu", base="original")
    (folder / "base.json").write_text('{"weights": "int3"}')
    with pytest.raises(DataError, match='weights is "int3"; expected stored or nf4'):
        open_model(folder)


def saved_adapters(model, folder) -> Path:
    folder.mkdir()
    model.save(folder)
    return folder


def plain_logits(folder) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(input_ids=ids).logits


def trained_logits(model) -> torch.Tensor:
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        return model.eval().lm(input_ids=ids).logits


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_adapters_are_merged_into_the_dequantized_weights(tmp_path, name):
    base = tmp_path / "base"
    if name == "qwen3":
        save_qwen(base, **SIZES)
    else:
        from transformers import GPT2Config, GPT2LMHeadModel

        GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=64)).save_pretrained(base)
    targets = ["q_proj", "down_proj"] if name == "qwen3" else ["c_attn"]
    model = adapted(open_model(base, weights="nf4"), targets=targets)
    adapters, wanted = saved_adapters(model, tmp_path / "adapters"), trained_logits(model)
    merged = merge_adapters(adapters, tmp_path / "merged")
    assert merged.difference is None and "quantization_config" not in (tmp_path / "merged/config.json").read_text()
    torch.testing.assert_close(plain_logits(tmp_path / "merged"), wanted, rtol=1e-4, atol=1e-4)
    original = merge_adapters(adapters, tmp_path / "original", base="original")
    (adapters / "base.json").unlink()
    merge_adapters(adapters, tmp_path / "plain")
    assert torch.equal(plain_logits(tmp_path / "original"), plain_logits(tmp_path / "plain"))
    difference = original.difference
    assert difference is not None and 0 < difference.mean < difference.max and 0 < difference.same_top <= 1
    manifest = json.loads((tmp_path / "original/chatmill_merge.json").read_text())
    assert manifest["difference"] == asdict(difference)


def test_merge_reports_the_logit_difference_of_both_models(base, tmp_path, monkeypatch, capsys):
    model = adapted(open_model(base, weights="nf4"))
    adapters = saved_adapters(model, tmp_path / "adapters")
    names = [str(adapters), "-o", str(tmp_path / "out"), "--base", "original", "--json"]
    monkeypatch.setattr(sys, "argv", ["chatmill", "merge", *names])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    printed = json.loads(capsys.readouterr().out)["difference"]
    x = torch.randint(model.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    places = torch.arange(64).expand_as(x), torch.zeros(4, 64, dtype=torch.int32)
    with torch.no_grad():
        a, b = (each.eval().logits(x, *places) for each in (open_model(tmp_path / "out"), model))
    same = (a.argmax(-1) == b.argmax(-1)).float().mean().item()
    assert printed == pytest.approx(
        {"max": (a - b).abs().max().item(), "mean": (a - b).abs().mean().item(), "same_top": same}
    )
