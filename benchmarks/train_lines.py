"""The models and configurations of benchmarks/train.py. A configuration is one way to train one model.

The name of a configuration starts with its model, so `--only 4b` selects all configurations of the 4B model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

QWEN = {"head_dim": 128, "n_kv_head": 8, "rope_theta": 1e6, "qk_norm": True, "vocab_size": 151936}
MODELS: dict[str, dict[str, Any]] = {
    "150m": {"n_layer": 18, "n_embd": 768, "n_head": 6, "n_kv_head": 2, "n_ffn": 2048, "vocab_size": 50304},
    "0.6b": {**QWEN, "n_layer": 28, "n_embd": 1024, "n_head": 16, "n_ffn": 3072},
    "1.7b": {**QWEN, "n_layer": 28, "n_embd": 2048, "n_head": 16, "n_ffn": 6144},
    "4b": {**QWEN, "n_layer": 36, "n_embd": 2560, "n_head": 32, "n_ffn": 9728},
    "8b": {**QWEN, "n_layer": 36, "n_embd": 4096, "n_head": 32, "n_ffn": 12288, "tie_weights": False},
}
"""Shapes of Qwen3 models, and of configs/sft1/150M.json, as keys of chatmill's config."""
SMALL = {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_kv_head": 2, "head_dim": 16, "n_ffn": 128, "vocab_size": 512}
STEP_S = {"150m": 0.1, "0.6b": 0.3, "1.7b": 0.7, "4b": 1.9, "8b": 2.6}
"""Approximate seconds per step on an H200, used only for time estimates."""
SETUP_S = 22
"""Approximate seconds until the end of the first step, with compiled kernels in the cache."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of trained weights, gradients, optimizer state and matrix products."""

    weights: str
    gradients: str
    state: str
    compute: str = "bfloat16"
    base: str = ""
    """Dtype of the frozen weights, if adapters are trained."""

    def __str__(self) -> str:
        parts = [self.weights, self.gradients, self.state, self.compute]
        names = {"float32": "fp32", "bfloat16": "bf16", "float8": "fp8"}
        shown = "/".join(names.get(part, part) for part in parts)
        return f"{names.get(self.base, self.base)} + {shown}" if self.base else shown


MASTERS = Precision("float32", "float32", "float32")
HALF = Precision("bfloat16", "bfloat16", "bfloat16")
STATE8 = Precision("bfloat16", "bfloat16", "int8")
FLOAT8 = replace(MASTERS, compute="float8")
LORA = replace(MASTERS, base="bfloat16")
QLORA = replace(MASTERS, base="nf4")


@dataclass(frozen=True, kw_only=True)
class TrainLine:
    name: str
    what: str
    side: Literal["chatmill", "peer", "usual"]
    """`usual` is the setup of most scripts, which is much slower than the peer's best setup."""
    model: str
    precision: Precision
    own: bool = False
    """Whether to use chatmill's built-in GPT instead of transformers' Qwen3."""
    optimizer: str = "adamw"
    fp8: bool = False
    checkpointing: bool = False
    offload: bool = False
    compiled: bool = False
    """Whether the peer compiles each layer."""
    liger: Literal["", "loss", "all"] = ""
    """Which Liger kernels the peer uses: none, only the fused loss, or all."""
    packed: bool = True
    rows: int = 8
    warmup: int = 3
    steps: int = 8

    @property
    def estimate(self) -> float:
        """Return the approximate run time on an H200 in seconds."""
        slower = 1.0 if self.side == "chatmill" else 2.2 if self.side == "usual" else 1.4
        return SETUP_S + (self.warmup + self.steps) * STEP_S[self.model] * slower

    @property
    def can_warm(self) -> bool:
        """Whether the configuration compiles kernels; the `usual` setups do not."""
        return self.side != "usual"


OWN, HF = "built-in GPT", "transformers' Qwen3"


def ours(model: str, *, own: bool, of: Precision, then: str, title: str = "", **more: Any) -> TrainLine:
    name = f"{model}-{'own' if own else 'hf'}-{then}"
    what = f"chatmill, {OWN if own else HF}, {title or then}"
    return TrainLine(name=name, what=what, side="chatmill", model=model, own=own, precision=of, **more)


def peers(model: str, *, of: Precision, then: str, title: str, **more: Any) -> Iterator[TrainLine]:
    """Yield the fastest setup with transformers, without and with torch.compile. With torch.compile, the fused loss is
    the only Liger kernel.
    """
    plain = TrainLine(
        name=f"{model}-peer-{then}",
        what=f"transformers, Liger kernels, FlexAttention, {title}",
        side="peer",
        model=model,
        precision=of,
        liger="all",
        **more,
    )
    yield plain
    compiled = f"transformers, Liger's fused loss, FlexAttention, compiled, {title}"
    yield replace(plain, name=f"{plain.name}-compiled", what=compiled, liger="loss", compiled=True)


def full(model: str, **more: Any) -> Iterator[TrainLine]:
    """Yield the configurations for full fine-tuning: chatmill with three optimizers, and transformers with bfloat16 and
    with float32 weights.
    """
    yield ours(model, own=True, of=MASTERS, then="adamw", title="adamw (float32 master weights)", **more)
    yield ours(model, own=True, of=HALF, then="adamw_bf16", optimizer="adamw_bf16", **more)
    yield from peers(model, of=HALF, then="bf16", title="bf16 weights, fused AdamW", **more)
    yield from peers(model, of=MASTERS, then="fp32", title="float32 master weights, autocast, fused AdamW", **more)
    yield ours(model, own=True, of=STATE8, then="adamw8bit", optimizer="adamw8bit", **more)
    yield ours(model, own=False, of=MASTERS, then="adamw", title="adamw (float32 master weights)", **more)
    yield ours(model, own=False, of=HALF, then="adamw_bf16", optimizer="adamw_bf16", **more)


def _lines() -> Iterator[TrainLine]:
    many: dict[str, Any] = {"warmup": 5, "steps": 25}
    some: dict[str, Any] = {"warmup": 4, "steps": 15}
    kept: dict[str, Any] = {"checkpointing": True}
    slow: dict[str, Any] = {"warmup": 2, "steps": 5}
    yield from full("0.6b", **many)
    yield ours("8b", own=False, of=LORA, then="lora", title="LoRA r=16", **kept)
    yield from peers("8b", of=LORA, then="lora", title="peft LoRA r=16", **kept, **slow)
    yield from full("4b", **kept)
    yield ours("4b", own=True, of=FLOAT8, then="fp8", title="adamw, fp8 matrix products", fp8=True, **kept)
    yield ours("8b", own=False, of=QLORA, then="qlora", title="QLoRA r=16", **kept)
    yield ours(
        "8b", own=False, of=QLORA, then="qlora-offload", title="QLoRA r=16, activation offloading", offload=True, **kept
    )
    yield from peers("8b", of=QLORA, then="qlora", title="bitsandbytes and peft QLoRA r=16", **kept, **slow)
    yield from full("1.7b", **some)
    yield ours("1.7b", own=True, of=FLOAT8, then="fp8", title="adamw, fp8 matrix products", fp8=True, **some)
    bits = replace(next(peers("4b", of=STATE8, then="8bit", title="bf16 weights, bitsandbytes' AdamW8bit", **kept)))
    yield replace(bits, optimizer="adamw8bit")
    yield ours("150m", own=True, of=MASTERS, then="adamw", title="adamw (float32 master weights)", **many)
    best = next(peers("0.6b", of=HALF, then="bf16", title="bf16 weights, fused AdamW", **many))
    yield replace(
        best, name="0.6b-peer-bf16-compiled-liger", what=best.what.replace("bf16", "compiled, bf16"), compiled=True
    )
    usual = TrainLine(
        name="0.6b-usual-packed",
        what="transformers, packed, SDPA, 4 rows, bf16 weights",
        side="usual",
        model="0.6b",
        precision=HALF,
        rows=4,
        warmup=2,
        steps=10,
    )
    yield usual
    padded = "transformers, padded to the longest conversation, 8 rows, bf16 weights"
    yield replace(usual, name="0.6b-usual-padded", what=padded, packed=False, rows=8)


TRAIN_LINES: dict[str, TrainLine] = {line.name: line for line in _lines()}
"""Configurations in the order of measurement, the most important first."""


def chosen(starts: list[str] | None) -> list[TrainLine]:
    """Return the configurations whose names start with one of these prefixes; without prefixes, return all."""
    if not starts:
        return list(TRAIN_LINES.values())
    named = [line for line in TRAIN_LINES.values() if line.name in starts]
    begin = [
        line for line in TRAIN_LINES.values() if any(line.name.startswith(s) for s in starts if s not in TRAIN_LINES)
    ]
    return [line for line in TRAIN_LINES.values() if line in named or line in begin]


def shape_of(line: TrainLine, *, small: bool, layers: int | None = None) -> dict[str, Any]:
    shape = {**MODELS[line.model]}
    if small:
        shape = {**SMALL, "tie_weights": shape.get("tie_weights", True), "qk_norm": shape.get("qk_norm", False)}
    # Models that are only compiled share one GPU, so they get a small vocabulary. The kernels do not depend on the
    # size of the vocabulary.
    few = {"n_layer": layers, "vocab_size": min(shape["vocab_size"], 50304)} if layers else {}
    return {**shape, **few}
