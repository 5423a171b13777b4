"""Train with the libraries that benchmarks/train.py compares with chatmill, with their fastest settings.

The libraries are transformers with FlexAttention, Liger kernels, fused AdamW, peft and bitsandbytes. Position ids mark
the boundaries of conversations in packed rows. As in chatmill, gradients are clipped. The batches are chatmill's, and
are on the device before training starts.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from train_data import Trial, real_tokens
from train_models import qwen3, trained_precision


def run(trial: Trial, measured_from: Any) -> dict[str, Any]:
    """Train, and return the measurements of the timed steps. `measured_from` is called after the model is created."""
    line, device = trial.line, trial.device
    lm, module = make_model(trial)
    if (made := trained_precision(module)) != line.precision.weights:
        raise RuntimeError(f"the trained weights are {made}; expected {line.precision.weights}")
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(parameters, line.optimizer, device)
    inputs = [prepared(batch, trial) for batch in trial.batches(timed=False)]
    counts = [(int(real_tokens(b).sum()), int(b.loss_mask.sum())) for b in trial.batches(timed=True)]
    if line.packed and device == "cuda":
        check_separate(lm, inputs[0]["position_ids"])
    measured_from()
    losses: list[Tensor] = []
    began = 0.0
    for number, batch in enumerate(inputs):
        if number == trial.warmup:
            began = synchronized(device)
        with cast(trial):
            loss = module(**batch, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    seconds = synchronized(device) - began
    return {
        "seconds": seconds,
        "steps": len(counts),
        "tokens": sum(tokens for tokens, _ in counts),
        "trained": sum(trained for _, trained in counts),
        "wait": None,
        "losses": [float(loss) for loss in losses],
    }


def prepared(batch: Any, trial: Trial) -> dict[str, Tensor]:
    real = real_tokens(batch)
    longest = trial.block_size if trial.line.packed else int(real.sum(dim=1).max())
    # The model shifts the labels to the left by one, so y is shifted to the right here.
    labels = torch.full_like(batch.y, -100)
    labels[:, 1:] = batch.y[:, :-1]
    inputs = {"input_ids": batch.x, "labels": labels}
    inputs |= {"position_ids": batch.positions.long()} if trial.line.packed else {"attention_mask": real}
    return {name: part[:, :longest].to(trial.device) for name, part in inputs.items()}


def make_model(trial: Trial) -> tuple[Any, Any]:
    """Return the transformers model and the module to call, which is the model or its peft wrapper."""
    line, device = trial.line, trial.device
    flex = line.side == "peer" and device == "cuda"
    lm = qwen3(
        trial.shape,
        weights=line.precision.base or line.precision.weights,
        block_size=trial.block_size,
        device=device,
        attention=flex_attention() if flex else "sdpa",
    )
    # Liger's kernels need Triton, which needs a GPU.
    if line.liger and device == "cuda":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        parts = line.liger == "all"
        apply_liger_kernel_to_qwen3(rope=parts, rms_norm=parts, swiglu=parts, model=lm)
    module = lm
    if line.precision.base:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        module = get_peft_model(lm, lora)
        for each in module.modules():
            if hasattr(each, "cast_input_dtype_enabled") and device == "cuda":
                # Autocast already casts the input of an adapter; without this setting, peft would first copy it to
                # float32.
                each.cast_input_dtype_enabled = False
    module.train()
    if line.checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    if line.compiled and device == "cuda":
        for layer in lm.model.layers:
            layer.compile(dynamic=False)
    return lm, module


def make_optimizer(parameters: list[nn.Parameter], name: str, device: str) -> Any:
    if name == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, lr=1e-5)
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def flex_attention() -> str:
    """Register an attention function that casts queries and keys to the dtype of the values before it calls
    FlexAttention, because a float32 norm may have upcast them. Return the name of the function.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.masking_utils import flex_attention_mask

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        return flex_attention_forward(module, q.to(v.dtype), k.to(v.dtype), v, *args, **kwargs)

    AttentionInterface.register("flex_cast", attention)
    AttentionMaskInterface.register("flex_cast", flex_attention_mask)
    return "flex_cast"


def check_separate(lm: Any, positions: Tensor) -> None:
    """Raise an error unless the attention mask is a BlockMask that separates conversations."""
    from torch.nn.attention.flex_attention import BlockMask
    from transformers.masking_utils import create_causal_mask

    if "flex" not in lm.config._attn_implementation:
        return
    embedded = torch.empty((*positions.shape, 1), device=positions.device)
    mask = create_causal_mask(lm.config, embedded, None, None, position_ids=positions)
    if not isinstance(mask, BlockMask):
        raise RuntimeError(f"the attention mask is a {type(mask).__name__}; expected a BlockMask")
    row, start = (positions[:, 1:] == 0).nonzero()[0].tolist()
    key, query = torch.tensor(start, device=positions.device), torch.tensor(start + 1, device=positions.device)
    if bool(mask.mask_mod(torch.tensor(row, device=positions.device), key * 0, query, key)):
        raise RuntimeError("a token attends to another conversation")


def cast(trial: Trial) -> AbstractContextManager[Any]:
    """Return an autocast context if the trained weights are float32, as Trainer does with bf16=True."""
    if trial.line.precision.weights == "float32" and trial.device == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()


def synchronized(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
