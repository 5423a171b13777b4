from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_weight_precision import folder_of

from chatmill.errors import DataError
from chatmill.train import merge_adapters, open_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

IDS = torch.tensor([[1, 5, 9, 3, 7, 2, 4]])
PLACES = torch.arange(7)[None], torch.zeros(1, 7, dtype=torch.int32)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

pytestmark = pytest.mark.filterwarnings("ignore")


def lm_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def adapters_on(base: Path, *, targets: list[str] | None = None, **settings) -> Path:
    config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=targets or ["q_proj", "v_proj"], **settings)
    torch.manual_seed(3)
    model = get_peft_model(lm_of(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 8)
    model.save_pretrained(base.parent / "adapters")
    return base.parent / "adapters"


def logits_of_peft(base: Path, adapters: Path) -> torch.Tensor:
    with torch.no_grad():
        return PeftModel.from_pretrained(lm_of(base), str(adapters)).eval()(input_ids=IDS).logits


def is_close(logits: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((logits - wanted).abs().max() <= 1e-4 * wanted.abs().max())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        # If the input and output embeddings are tied, peft merges an adapter on one of them into both.
        ("gpt2", {"targets": ["c_attn", "wte"]}),
        ("gpt2", {"targets": ["lm_head"]}),
        ("gemma3_text", {"targets": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
        ("gemma3_text", {"trainable_token_indices": [3, 5]}),
        ("llama", {"modules_to_save": ["lm_head", "norm"], "use_rslora": True}),
        ("llama", {"targets": ["q_proj", "embed_tokens"], "use_dora": True, "rank_pattern": {"q_proj": 2}}),
    ],
)
def test_peft_adapters_merged_in_float32_give_the_logits_of_peft(name, settings, tmp_path):
    base = folder_of(name, torch.bfloat16, tmp_path / "base")
    adapters = adapters_on(base, **settings)
    merge_adapters(adapters, tmp_path / "merged", save_dtype="float32")
    with torch.no_grad():
        logits = lm_of(tmp_path / "merged").eval()(input_ids=IDS).logits
    assert is_close(logits, logits_of_peft(base, adapters))
    has_head = "lm_head.weight" in load_file(tmp_path / "merged" / "model.safetensors")
    tied = json.loads((tmp_path / "merged" / "config.json").read_text()).get("tie_word_embeddings")
    assert has_head == (tied is False)


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["embed_tokens", "norm"]},
        {"trainable_token_indices": [3, 5]},
        {"targets": ["q_proj", "embed_tokens"]},
    ],
)
def test_peft_adapters_on_a_bfloat16_base_are_not_rounded(settings, tmp_path):
    base = folder_of("llama", torch.bfloat16, tmp_path / "base")
    adapters = adapters_on(base, **settings)
    with torch.no_grad():
        logits = open_model(adapters).eval().logits(IDS, *PLACES)
    assert is_close(logits, logits_of_peft(base, adapters))


def test_unsupported_peft_adapters_are_refused_in_one_line(tmp_path):
    base = folder_of("llama", torch.bfloat16, tmp_path / "base")
    adapters = adapters_on(base)
    config, tensors = json.loads((adapters / CONFIG).read_text()), load_file(adapters / WEIGHTS)
    first = min(tensors)
    other_layer, embedding = first.replace("layers.0", "layers.9"), "base_model.model.model.embed_tokens.weight"
    shape = lm_of(base).get_input_embeddings().weight.shape
    for changes, added, says in [
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights is pissa, which changes the weights of the base"),
        ({"alora_invocation_tokens": [3]}, {}, "has alora_invocation_tokens; this variant of LoRA is not supported"),
        ({"use_new_kind": True}, {}, r"has use_new_kind, which peft \S+ does not know; upgrade peft"),
        ({}, {other_layer: tensors[first].clone()}, r"layers\.9\.\S+, which matches no adapter on this base model"),
        ({}, {embedding: torch.ones(shape)}, r"has \S+embed_tokens\.weight, which matches no adapter on this base"),
        ({}, {embedding: torch.ones(7, shape[1])}, "these adapters cannot be read .*: size mismatch for "),
        ({"r": 5}, {}, "these adapters cannot be read .*: size mismatch for "),
    ]:
        (adapters / CONFIG).write_text(json.dumps({**config, **changes}))
        save_file({**tensors, **added}, adapters / WEIGHTS)
        with pytest.raises(DataError, match=says) as caught:
            open_model(adapters)
        assert "\n" not in str(caught.value)
    (adapters / CONFIG).write_text(json.dumps({**config, "a_new_size": 16, "a_new_kind": None}))
    save_file(tensors, adapters / WEIGHTS)
    open_model(adapters)


def test_adapters_on_the_head_are_refused_until_they_are_merged(tmp_path):
    adapters = adapters_on(folder_of("llama", torch.bfloat16, tmp_path / "base"), targets=["lm_head"])
    with pytest.raises(DataError, match=r"the adapters change the output head.*run chatmill merge"):
        open_model(adapters)
    merge_adapters(adapters, tmp_path / "merged")
    open_model(tmp_path / "merged")
