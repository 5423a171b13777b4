"""The configuration of a training run: what is loaded, the model, the optimizer, and what is written when.

    defaults  <  chatmill.toml  <  config file  <  POST_TRAINING and WARMUP_PCT  <  flags

Every key is also a flag of `train.py` and of `chatmill train`. Importing this module needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self

from chatmill.config import (
    BELOW_ONE,
    SHARE,
    Config,
    ValueCheck,
    flag_spellings,
    integer,
    key,
    keys_of,
    number,
    optional,
    required,
)
from chatmill.errors import DataError, UsageError
from chatmill.load.config import LoadConfig
from chatmill.store.primer_cache import CACHES

WARMUP = 0.03
"""The default share of a run that warms up."""
FIRST_FLAG = "use_loss_mask"
"""The flag that help lists first: without it, a run also trains user messages."""
POST_TRAINING = {"use_loss_mask": True, "epoch_drop_last": False}
"""What post_training sets: train what the mask marks, and all of one pass."""


def _are_targets(value: Any) -> bool:
    names = value if isinstance(value, list | tuple) else [value]
    return len(names) > 0 and all(isinstance(name, str) and name != "" for name in names)


# The model.


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """The keys that shape a new model."""

    vocab_size: int | None = key(None, "size of the vocabulary; null: that of the dataset", optional(integer(1)))
    n_layer: int = key(12, "number of layers", integer(1))
    n_embd: int = key(768, "width of the hidden states", integer(1))
    n_head: int = key(12, "number of query heads", integer(1))
    n_kv_head: int | None = key(None, "number of key and value heads; null: n_head", optional(integer(1)))
    head_dim: int | None = key(None, "width of a head; null: n_embd / n_head", optional(integer(1)))
    n_ffn: int | None = key(
        None,
        "width of the feed-forward layer; null: 8/3 of n_embd, rounded up to a multiple of 64",
        optional(integer(1)),
    )
    max_positions: int = key(4096, "longest conversation in tokens that the model can read", integer(1))
    rope_theta: float = key(10_000.0, "base of the rotary position embedding", number(1))
    norm_eps: float = key(1e-6, "epsilon of RMSNorm", number(0))
    tie_weights: bool = key(True, "share the weights of the embedding and the output head")
    qk_norm: bool = key(False, "normalize the queries and keys of each head")

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_size(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def ffn(self) -> int:
        return self.n_ffn or -(-self.n_embd * 8 // 3 // 64) * 64

    def shape_fault(self) -> str | None:
        """Why no model can have this shape."""
        if self.head_dim is None and self.n_embd % self.n_head:
            return f"n_embd {self.n_embd} is no multiple of n_head {self.n_head}; change one or set head_dim"
        if self.n_head % self.kv_heads:
            return f"n_head {self.n_head} is no multiple of n_kv_head {self.kv_heads}"
        if self.head_size % 2:
            return f"heads are {self.head_size} wide; rotary positions need an even width"
        return None


@dataclass(frozen=True, kw_only=True)
class GPTSizes(ModelConfig):
    """The shape of a model; the keys of its config file."""

    vocab_size: int = required("size of the vocabulary", integer(1))

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except UsageError as error:
            raise DataError(f"model: {error}") from None

    def conflicts(self) -> Iterator[str]:
        if fault := self.shape_fault():
            yield fault

    @property
    def num_parameters(self) -> int:
        """The parameters of a model of these sizes, without making it."""
        attention = self.n_embd * self.head_size * 2 * (self.n_head + self.kv_heads)
        norms = 2 * self.n_embd + (2 * self.head_size if self.qk_norm else 0)
        layers = self.n_layer * (attention + 3 * self.n_embd * self.ffn + norms)
        return layers + self.n_embd + self.vocab_size * self.n_embd * (1 if self.tie_weights else 2)


@dataclass(frozen=True, kw_only=True)
class LoraSizes(Config):
    """The shape of LoRA adapters; the keys of `lora` in a config."""

    r: int = key(16, "rank of the adapters", integer(1))
    alpha: float = key(32.0, "scale of the adapters, divided by r", number(0))
    dropout: float = key(0.0, "dropout in front of the adapters", SHARE)
    targets: Sequence[str] | str = key(
        "all-linear",
        "layers that get an adapter; all-linear: every linear layer but the head",
        ValueCheck("a text or a list of texts", _are_targets),
    )


def _is_lora(value: Any) -> bool:
    keys = keys_of(LoraSizes)
    return isinstance(value, Mapping) and all(name in keys and keys[name].check.accepts(value[name]) for name in value)


LORA = ValueCheck(
    f"an object with {', '.join(f'{name} ({each.check.expected})' for name, each in keys_of(LoraSizes).items())}",
    _is_lora,
)


# The optimizer and the run, which training on rollouts shares.


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """The keys of AdamW and of the learning-rate schedule."""

    max_iters: int | None = key(None, "optimizer steps on this dataset; null: one pass over it", optional(integer(1)))
    learning_rate: float = key(3e-4, "peak learning rate", number(0))
    min_lr_ratio: float = key(0.1, "learning rate at the end of the schedule, as a share of the peak", SHARE)
    lr_schedule: Literal["cosine", "linear", "constant"] = key("cosine", "decay of the learning rate after the warm-up")
    warmup_iters: int | None = key(None, "warm-up steps; null: warmup_pct of the run", optional(integer(0)))
    weight_decay: float = key(0.1, "weight decay of matrices; vectors have none", number(0))
    beta1: float = key(0.9, "AdamW beta1, the decay of the mean of gradients", BELOW_ONE)
    beta2: float = key(0.95, "AdamW beta2, the decay of the mean of squared gradients", BELOW_ONE)
    adam_eps: float = key(1e-8, "AdamW epsilon", number(0))
    grad_clip: float = key(1.0, "clip gradients to this norm; 0 disables clipping", number(0))


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """The keys that say what a run starts from, where it is computed, and when it writes."""

    init_from_model: str | None = key(
        None, "model folder to start from: one that chatmill wrote, or a Hugging Face model"
    )
    seed: int = key(1337, "seed of new weights, dropout and sampling", integer(0))
    device: Literal["auto", "cpu", "cuda"] = key("auto", "device; auto: a GPU if there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "precision of the computation, weights are always float32; auto: bfloat16 on a GPU"
    )
    save_interval: int = key(
        500, "steps between checkpoints, besides the one at the end; 0: no checkpoints", integer(0)
    )
    keep_checkpoints: int = key(2, "number of checkpoints to keep, the newest", integer(1))
    log_interval: int = key(10, "steps between progress lines where no terminal shows a bar", integer(1))


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig, OptimizerConfig, ModelConfig, LoadConfig):
    """All that decides what a run computes and what it writes.

    >>> TrainConfig(n_layer=2, n_embd=64, n_head=4).warmup_steps(1000)
    30
    """

    dataset_dir: str | None = key(
        None,
        "what to train on: a dataset, a cache, or a folder of caches to mix; "
        f"null: data.caches.sft_token_cache of chatmill.toml, else {CACHES}",
    )
    lora: Mapping[str, Any] | None = key(
        None, "train LoRA adapters on a Hugging Face model, whose own weights stay as they are", optional(LORA)
    )
    post_training: bool = key(
        False,
        "post-train on blocks: one pass over what the loss mask marks; rows without a trained token are skipped",
        variable="POST_TRAINING",
    )
    warmup_pct: float | None = key(
        None, f"warm-up as a share of the run's tokens; null: {WARMUP:g}", optional(SHARE), variable="WARMUP_PCT"
    )
    check_tokenizer: bool = key(True, "refuse a dataset that was made with another tokenizer than the model")
    compile: bool | None = key(None, "torch.compile the layers; null: on a GPU")
    activation_checkpointing: bool = key(False, "recompute activations in the backward pass instead of keeping them")
    parallel: Literal["ddp", "fsdp"] = key("ddp", "with several ranks: a whole model on each (ddp), or shards (fsdp)")
    eval_interval: int = key(500, "steps between evaluations on val, besides the one at the end; 0: none", integer(0))
    eval_iters: int | None = key(None, "batches of val per evaluation, of each source; null: all", optional(integer(1)))
    eval_samples: int = key(2, "prompts of val, per source, to answer at each evaluation; 0: none", integer(0))
    checkpoint: Literal["full", "sharded"] = key(
        "full", "who writes checkpoints: rank 0 the whole (full), or every rank its part (sharded)"
    )
    verify: bool = key(
        False, "check the hashes of the data: at the start, once an epoch in the background, and at the end"
    )
    log_rows: bool = key(False, "write the loss of every conversation of every step")
    tensorboard: bool = key(False, "also write TensorBoard files")
    audit_dir: str | None = key("logs/audit", "folder of the audit log, which records what was trained on")

    @property
    def reads_blocks(self) -> bool:
        return self.post_training

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.warmup_iters is not None and self.warmup_pct is not None:
            yield f"warmup_iters is {self.warmup_iters} and warmup_pct {self.warmup_pct:g}; expected one of them"
        if self.post_training and not self.use_loss_mask:
            yield "post_training is true and use_loss_mask false; post-training is on what the mask marks alone"
        if self.lora is not None and self.init_from_model is None:
            yield "lora is given and init_from_model is not; adapters go onto a Hugging Face model"
        if self.init_from_model is None and (fault := self.shape_fault()):
            yield f"model: {fault}"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, place: str = "the config") -> Self:
        return super().from_mapping(layered(values), place=place)

    def sizes(self, vocab_size: int) -> GPTSizes:
        """The shape of a new model for a dataset with this vocabulary."""
        shape = {name: getattr(self, name) for name in size_keys()}
        return GPTSizes(**{**shape, "vocab_size": self.vocab_size or vocab_size})

    def lora_sizes(self) -> LoraSizes | None:
        return None if self.lora is None else LoraSizes(**self.lora)

    def warmup_steps(self, total: int) -> int:
        """Warm-up steps in a run of `total` steps, which all have equally many tokens."""
        if self.warmup_iters is not None:
            return self.warmup_iters
        return math.ceil((WARMUP if self.warmup_pct is None else self.warmup_pct) * total)


@dataclass(frozen=True, kw_only=True)
class RunFlags(Config):
    """The flags of the training command that are not keys of its config."""

    model_name: str | None = key(None, "name of the run, which is written to checkpoints/NAME", metavar="NAME")
    config_file: str | None = key(None, "JSON file of the keys below; it may inherit from another one", metavar="FILE")
    out_dir: str = key("checkpoints", "folder that runs are written to", metavar="DIR")
    resume: str | None = key(
        None, "auto: continue from the newest checkpoint, if there is one; or the folder of a checkpoint"
    )


def with_bare_switches(args: Sequence[str]) -> list[str]:
    """The arguments with `true` behind each flag of a true-or-false key that has no value."""
    switches = {
        flag for each in keys_of(TrainConfig).values() if each.check.accepts(True) for flag in flag_spellings(each.name)
    }
    values = []
    for argument, following in pairwise([*args, "--"]):
        values += [argument, "true"] if argument in switches and following.startswith("-") else [argument]
    return values


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge layers of values, of which later ones win.

    warmup_iters and warmup_pct replace each other. The layer that turns post_training on also sets what that means,
    unless it sets those keys itself.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        if layer.get("post_training") is True and values.get("post_training") is not True:
            layer = {**POST_TRAINING, **layer}
        for name, other in (("warmup_iters", "warmup_pct"), ("warmup_pct", "warmup_iters")):
            if layer.get(name) is not None and other not in layer:
                values.pop(other, None)
        values.update(layer)
    return values


def size_keys() -> Sequence[str]:
    """The keys that shape a new model; a model that is loaded keeps its own shape."""
    return list(keys_of(ModelConfig))


def model_keys() -> Sequence[str]:
    """The keys that shape the model; a resumed run must have the same."""
    return [*size_keys(), "lora"]
