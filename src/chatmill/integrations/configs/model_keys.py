"""Convert the config keys of other trainers for adapters, quantization, precision, activation checkpointing and
sharding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from chatmill.integrations.configs.report import IS_OFF, OFF, TheirKeys, Translation

NF4 = "chatmill uses NF4 with double quantization"
HEADS = ("lm_head", "embed_out", "output")
"""Names of output heads, which cannot have adapters in chatmill."""


@dataclass(frozen=True)
class LoraNames:
    """The names and defaults of the LoRA keys in the configs of a trainer."""

    rank: str = "lora_r"
    dropout: str = "lora_dropout"
    targets: str = "lora_target_modules"
    saved: str = "lora_modules_to_save"
    rslora: str = "use_rslora"
    separator: str | None = None
    """Separator between module names in a string; None if names are given as a list."""
    all_linear: str = "all-linear"
    """The trainer's name for all linear layers."""
    default_rank: int = 16
    default_alpha: float | None = 32.0
    """Default LoRA alpha; None means twice the rank."""
    default_dropout: float = 0.0


def take_lora(translation: Translation, keys: TheirKeys, names: LoraNames, *, used: bool, all_linear: str = "") -> None:
    """Convert the LoRA keys. `all_linear` is the name of the trainer's switch for all linear layers; empty if the
    trainer has no such switch.
    """
    rank, alpha = keys.integer(names.rank, least=1, most=2**20), keys.number("lora_alpha")
    dropout, targets = keys.number(names.dropout, most=1), keys.texts(names.targets, separator=names.separator)
    rslora = keys.switch(names.rslora)
    linear = keys.switch(all_linear) if all_linear else None
    if not used:
        given = {names.rank: rank, "lora_alpha": alpha, names.dropout: dropout, names.targets: targets}
        for name, value in {**given, names.rslora: rslora, all_linear: linear}.items():
            if value is not None:
                translation.default(
                    keys.path(name), value, note="the run does not train adapters, so this key has no effect"
                )
        return
    sizes: dict[str, Any] = {"r": rank or names.default_rank}
    scale = alpha if alpha is not None else names.default_alpha
    scale = float(2 * sizes["r"] if scale is None else scale)
    sizes |= {"alpha": scale * math.sqrt(sizes["r"]) if rslora else scale}
    sizes |= {"dropout": float(names.default_dropout if dropout is None else dropout)}
    sizes["targets"], left_out = _targets(targets, names, linear=bool(linear))
    # Set the whole `lora` table here; the code below only reports on the keys.
    translation.train["lora"] = sizes
    assumed = []
    for name, value, part in (
        (names.rank, rank, "r"),
        ("lora_alpha", alpha, "alpha"),
        (names.dropout, dropout, "dropout"),
    ):
        if value is None:
            assumed.append(f"{part} {sizes[part]:g}")
        else:
            translation.take(keys.path(name), value, other={f"lora.{part}": sizes[part]})
    if rslora is not None:
        note = "chatmill multiplies alpha by the square root of r instead; the scale is the same" if rslora else IS_OFF
        translation.default(keys.path(names.rslora), rslora, note=note)
    if targets is not None:
        note = f"chatmill does not support adapters on the output head ({', '.join(left_out)})" if left_out else ""
        translation.take(keys.path(names.targets), targets, other={"lora.targets": sizes["targets"]}, note=note)
    if linear is not None:
        if linear:
            translation.take(keys.path(all_linear), linear, other={"lora.targets": sizes["targets"]})
        else:
            translation.default(keys.path(all_linear), linear, note=IS_OFF)
    if targets is None and not linear:
        assumed.append(f"targets {sizes['targets']} (peft's default for Llama and Qwen)")
    if assumed:
        translation.assume(f"{translation.trainer} uses these LoRA settings by default: {', '.join(assumed)}")
    origins = f"{names.rank}, lora_alpha, {names.dropout}, {names.targets}"
    translation.origins["lora"] = origins


def _targets(targets: list[str] | None, names: LoraNames, *, linear: bool) -> tuple[Any, list[str]]:
    """Return the target modules that chatmill supports, and the names of output heads, which it does not support."""
    if linear or targets in ([names.all_linear], ["all-linear"]):
        return "all-linear", []
    if targets is None:
        return ["q_proj", "v_proj"], []
    left_out = [name for name in targets if name in HEADS]
    kept = [name for name in targets if name not in HEADS]
    if not kept:
        return "all-linear", left_out
    # Treat a single name that contains a special character as a regular expression, like peft.
    is_expression = len(kept) == 1 and any(character in kept[0] for character in "\\*+|()[]^$")
    return (kept[0] if is_expression else kept), left_out


def take_four_bits(translation: Translation, keys: TheirKeys, name: str, *, lora: bool) -> None:
    """Convert the key that enables 4-bit weights, which chatmill supports only with adapters."""
    value = keys.switch(name)
    if value is None:
        return
    if not value and translation.train.get("quantize") == "nf4":
        translation.none(keys.path(name), value, "adapter qlora always uses 4-bit weights")
    elif not value:
        translation.take(keys.path(name), value, train={"quantize": "none"})
    elif not lora:
        translation.none(
            keys.path(name),
            value,
            "chatmill quantizes weights only with adapters, because 4-bit weights cannot be trained",
        )
    else:
        translation.take(keys.path(name), value, train={"quantize": "nf4"}, note=NF4)


def take_eight_bits(translation: Translation, keys: TheirKeys, name: str = "load_in_8bit") -> None:
    value = keys.switch(name)
    if value:
        note = "chatmill loads the base model in its stored precision, which takes about twice the memory"
        translation.none(keys.path(name), value, note)
    elif value is not None:
        translation.default(keys.path(name), value, note=IS_OFF)


def take_precision(translation: Translation, keys: TheirKeys, *, bf16: str = "bf16", fp16: str = "fp16") -> None:
    """Convert the keys for bfloat16 and float16 computation; chatmill does not support float16."""
    brain, half = keys.pop(bf16), keys.pop(fp16)
    if brain is not None:
        if brain in (True, "true", "full"):
            translation.take(keys.path(bf16), brain, train={"dtype": "bfloat16"})
        elif brain == "auto" or half in (True, "true"):
            translation.take(keys.path(bf16), brain, train={"dtype": "auto"})
        elif brain is False or brain == "false":
            translation.take(keys.path(bf16), brain, train={"dtype": "float32"})
        else:
            translation.faults.append(f"{keys.path(bf16)} is {brain!r}; expected true, false or auto")
            translation.none(keys.path(bf16), brain, "chatmill does not understand this value")
    if half is not None:
        if half in (True, "true"):
            note = "chatmill does not support float16, and uses bfloat16 on a GPU"
            translation.none(keys.path(fp16), half, note)
        else:
            translation.default(keys.path(fp16), half, note=IS_OFF)


def take_checkpointing(translation: Translation, keys: TheirKeys, *, default: bool) -> None:
    """Convert the keys for gradient checkpointing and for offloading activations to host memory."""
    value = keys.pop("gradient_checkpointing")
    if value is None:
        if default and "activation_checkpointing" not in translation.train:
            translation.assume(
                f"{translation.trainer} uses this value by default", train={"activation_checkpointing": True}
            )
    elif isinstance(value, bool):
        taken = {"activation_checkpointing": value}
        translation.take(keys.path("gradient_checkpointing"), value, train=taken)
    elif isinstance(value, str):
        note = "chatmill keeps layer inputs in host memory" + (", not on disk" if "disk" in value else "")
        taken = {"activation_offload": True}
        translation.take(keys.path("gradient_checkpointing"), value, train=taken, note=note)
    else:
        translation.faults.append(f"{keys.path('gradient_checkpointing')} is {value!r}; expected true or false")
        translation.none(keys.path("gradient_checkpointing"), value, "chatmill does not understand this value")
    offload = keys.pop("activation_offloading")
    if offload is not None and offload not in OFF:
        translation.take(keys.path("activation_offloading"), offload, train={"activation_offload": True})
    elif offload is not None:
        translation.default(keys.path("activation_offloading"), offload, note=IS_OFF)


def take_sharding(translation: Translation, keys: TheirKeys) -> None:
    """Convert the keys for FSDP and DeepSpeed ZeRO-3 to `parallel: fsdp`; chatmill has no counterpart to other ZeRO
    stages.
    """
    for name in ("fsdp", "fsdp_config", "deepspeed"):
        value = keys.pop(name)
        if value is None:
            continue
        if value in OFF:
            translation.default(keys.path(name), value, note=IS_OFF)
        elif name == "deepspeed" and not _is_stage_3(value):
            note = "chatmill does not support ZeRO-1 or ZeRO-2; set parallel to fsdp to shard the optimizer state"
            translation.none(keys.path(name), value, note)
        elif translation.train.get("quantize", "none") != "none":
            translation.none(
                keys.path(name), value, "chatmill cannot shard 4-bit weights, so each rank keeps all weights"
            )
        elif translation.train.get("optimizer") in ("adafactor", "muon"):
            note = f"{translation.train['optimizer']} needs whole matrices, so each rank keeps the whole model"
            translation.none(keys.path(name), value, note)
        else:
            note = "chatmill chooses how to wrap layers, and does not offload parameters"
            translation.take(keys.path(name), value, train={"parallel": "fsdp"}, note=note)


def _is_stage_3(value: Any) -> bool:
    if isinstance(value, dict):
        zero = value.get("zero_optimization")
        return isinstance(zero, dict) and zero.get("stage") == 3
    name = str(value).rsplit("/", 1)[-1].lower()
    return "zero3" in name or "z3" in name or "stage3" in name
