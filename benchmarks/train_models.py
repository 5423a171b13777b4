"""Create the models of benchmarks/train.py with random weights, on the training device, in the requested precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from chatmill.train.config import GPTSizes
from chatmill.train.gpt import GPT
from chatmill.train.model import usable_precision

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "nf4": torch.bfloat16}


def own_gpt(shape: dict[str, Any], *, weights: str, block_size: int, device: str) -> GPT:
    compute = torch.bfloat16 if device == "cuda" else None
    with torch.device(device):
        torch.manual_seed(0)
        return GPT(GPTSizes(**{"max_positions": block_size, **shape}), compute=compute).to(DTYPES[weights])


def qwen3(shape: dict[str, Any], *, weights: str, block_size: int, device: str, attention: str = "sdpa") -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    usable_precision(torch.bfloat16)
    config = Qwen3Config(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["n_embd"],
        intermediate_size=shape["n_ffn"],
        num_hidden_layers=shape["n_layer"],
        num_attention_heads=shape["n_head"],
        num_key_value_heads=shape["n_kv_head"],
        head_dim=shape["head_dim"],
        tie_word_embeddings=shape.get("tie_weights", True),
        max_position_embeddings=block_size,
        use_cache=False,
    )
    with torch.device(device):
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config, dtype=DTYPES[weights], attn_implementation=attention)
    if weights == "nf4":
        quantize(lm, device)
    return lm


def quantize(lm: Any, device: str) -> None:
    """Replace all linear layers except the LM head with 4-bit layers from bitsandbytes."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for layer in lm.model.layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is not nn.Linear:
                    continue
                new = Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    compress_statistics=True,
                    quant_type="nf4",
                    device="meta",
                )
                new.weight = Params4bit(
                    child.weight.detach().to("cpu" if device == "cpu" else device),
                    requires_grad=False,
                    compress_statistics=True,
                    quant_type="nf4",
                    module=new,
                )
                setattr(parent, name, new.to(device))
    # peft checks `is_loaded_in_4bit`.
    lm.is_loaded_in_4bit = True


def trained_precision(model: nn.Module) -> str:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim > 1]
    kinds = {str(parameter.dtype).removeprefix("torch.") for parameter in trained}
    if len(kinds) != 1:
        raise RuntimeError(f"the trained weights are {sorted(kinds)}; expected one dtype")
    return kinds.pop()
