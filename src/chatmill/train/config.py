"""The configuration of a training run: data, model, optimizer, checkpoints and logs.

    defaults  <  chatmill.toml  <  config file  <  POST_TRAINING and WARMUP_PCT  <  flags

Every config key is also a flag of `train.py` and of `chatmill train`. This module does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Self

from chatmill.config import (
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
from chatmill.errors import DataError, UsageError, one_line
from chatmill.load.config import LoadConfig
from chatmill.remote.cache_settings import FOLDER, SIZE, parse_size
from chatmill.store.primer_cache import CACHES
from chatmill.train.run_config import OptimizerConfig, RunConfig

WARMUP = 0.03
"""Default warmup, as a fraction of the run."""
FIRST_FLAG = "use_loss_mask"
"""The first flag in the help, because a run without this flag also trains on user messages."""
EXCLUSIVE = (("max_iters", "epochs"), ("warmup_iters", "warmup_pct"))
"""Pairs of mutually exclusive keys; a config layer that sets one key removes the other key from earlier layers."""
POST_TRAINING = {"use_loss_mask": True, "epoch_drop_last": False}
"""Values that post_training sets: train only on tokens marked by the loss mask, and keep the incomplete last batch."""


def _are_targets(value: Any) -> bool:
    names = value if isinstance(value, list | tuple) else [value]
    return len(names) > 0 and all(isinstance(name, str) and name != "" for name in names)


def _is_cache_size(value: Any) -> bool:
    try:
        return value is None or (type(value) in (int, str) and parse_size(str(value), "cache_size") > 0)
    except UsageError:
        return False


CACHE_SIZE = ValueCheck("a number of bytes, or a string such as 200GB", _is_cache_size)
MOST_EPOCHS = 1_000_000
EPOCHS = ValueCheck(
    f"a number greater than 0 and at most {MOST_EPOCHS}",
    lambda value: type(value) in (int, float) and 0 < value <= MOST_EPOCHS,
)


# The model.


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """The config keys that define the architecture of a new model."""

    vocab_size: int | None = key(
        None, "vocabulary size; null uses the vocabulary size of the dataset", optional(integer(1))
    )
    n_layer: int = key(12, "number of layers", integer(1))
    n_embd: int = key(768, "width of the hidden states", integer(1))
    n_head: int = key(12, "number of query heads", integer(1))
    n_kv_head: int | None = key(None, "number of key and value heads; null uses n_head", optional(integer(1)))
    head_dim: int | None = key(None, "width of a head; null uses n_embd / n_head", optional(integer(1)))
    n_ffn: int | None = key(
        None,
        "width of the feed-forward layer; null uses 8/3 of n_embd, rounded up to a multiple of 64",
        optional(integer(1)),
    )
    max_positions: int = key(4096, "maximum sequence length of the model, in tokens", integer(1))
    rope_theta: float = key(10_000.0, "base of the rotary position embedding", number(1))
    norm_eps: float = key(1e-6, "epsilon in RMSNorm", number(0))
    tie_weights: bool = key(True, "tie the weights of the embedding and the output head")
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
        """Return why these model sizes are invalid, or None if they are valid."""
        if self.head_dim is None and self.n_embd % self.n_head:
            return f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}; change one of them or set head_dim"
        if self.n_head % self.kv_heads:
            return f"n_head {self.n_head} is not a multiple of n_kv_head {self.kv_heads}; change one of them"
        if self.head_size % 2:
            return f"head_dim is {self.head_size}; rotary position embeddings require an even number"
        return None


@dataclass(frozen=True, kw_only=True)
class GPTSizes(ModelConfig):
    """The architecture of a model, as stored in its config file."""

    vocab_size: int = required("vocabulary size", integer(1))

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
        """Number of parameters in a model with these sizes."""
        attention = self.n_embd * self.head_size * 2 * (self.n_head + self.kv_heads)
        norms = 2 * self.n_embd + (2 * self.head_size if self.qk_norm else 0)
        layers = self.n_layer * (attention + 3 * self.n_embd * self.ffn + norms)
        return layers + self.n_embd + self.vocab_size * self.n_embd * (1 if self.tie_weights else 2)


@dataclass(frozen=True, kw_only=True)
class LoraSizes(Config):
    """LoRA settings: the keys under `lora` in a config."""

    r: int = key(16, "rank of the adapters", integer(1))
    alpha: float = key(32.0, "scale of the adapters, whose output is multiplied by alpha / r", number(0))
    dropout: float = key(0.0, "dropout on the input of the adapters", SHARE)
    targets: Sequence[str] | str = key(
        "all-linear",
        "layers that get an adapter; all-linear selects every linear layer except the output head",
        ValueCheck("a string or a list of strings", _are_targets),
    )


def _is_lora(value: Any) -> bool:
    keys = keys_of(LoraSizes)
    return isinstance(value, Mapping) and all(name in keys and keys[name].check.accepts(value[name]) for name in value)


def _lora_fault(value: Any) -> str | None:
    """Return a message about the first unknown key or wrong value of an object."""
    keys = keys_of(LoraSizes)
    for name in value if isinstance(value, Mapping) else ():
        if name not in keys:
            return f'which has the unknown key "{one_line(str(name))}"'
        if not keys[name].check.accepts(value[name]):
            return f"in which {name} has a wrong value"
    return None


LORA = ValueCheck(
    f"an object with {', '.join(f'{name} ({each.check.expected})' for name, each in keys_of(LoraSizes).items())}, "
    """such as '{"r": 16}'""",
    _is_lora,
    _lora_fault,
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig, OptimizerConfig, ModelConfig, LoadConfig):
    """All settings of a training run.

    >>> TrainConfig(n_layer=2, n_embd=64, n_head=4).warmup_steps(1000)
    30
    """

    dataset_dir: str | None = key(
        None,
        "data to train on: a dataset, a cache, a folder of caches to mix, or the URL of a dataset or a folder of "
        f"datasets; null uses data.caches.sft_token_cache in chatmill.toml or, if that is not set, {CACHES}",
    )
    epochs: float | None = key(
        None,
        "length of the run in epochs, such as 3 or 0.5; replaces max_iters; one epoch of a mix has as many "
        "conversations as all its sources together",
        optional(EPOCHS),
    )
    tokens_per_step: int | None = key(
        None,
        "tokens per optimizer step over all ranks, including padding; sets gradient_accumulation_steps and makes "
        "batch_size the number of rows per micro-batch over all ranks; if null, batch_size is the number of rows per "
        "optimizer step",
        optional(integer(1)),
    )
    lora: Mapping[str, Any] | None = key(
        None, "train LoRA adapters on a Hugging Face model, whose own weights are frozen", optional(LORA)
    )
    quantize: Literal["none", "nf4"] = key(
        "none",
        "quantization of the base model; nf4 loads its linear layers in 4 bits (QLoRA) and requires lora and "
        "bitsandbytes",
    )
    post_training: bool = key(
        False,
        "train for one pass over a dataset prepared with --fit blocks, and skip batches without trained tokens",
        variable="POST_TRAINING",
    )
    warmup_pct: float | None = key(
        None, f"warmup as a fraction of the run's tokens; null uses {WARMUP:g}", optional(SHARE), variable="WARMUP_PCT"
    )
    check_tokenizer: bool = key(True, "fail if the dataset was prepared with a tokenizer other than the model's")
    check_memory: bool = key(True, "fail at the start if the estimated memory of the run exceeds the available memory")
    compile: bool | None = key(None, "compile the layers with torch.compile; null compiles them only on a GPU")
    fp8: bool = key(
        False,
        "compute the matrix products of linear layers in float8, on GPUs that support it; this is faster for models "
        "with at least 1.7B parameters",
    )
    activation_checkpointing: bool = key(False, "recompute activations in the backward pass instead of keeping them")
    activation_offload: bool = key(
        False, "use activation checkpointing, and keep the checkpointed layer inputs in host memory"
    )
    parallel: Literal["ddp", "fsdp"] = key(
        "ddp",
        "how to distribute training over several ranks; ddp replicates the model on each rank, and fsdp shards it "
        "over all ranks",
    )
    eval_interval: int = key(
        500,
        "number of steps between evaluations on the val split, in addition to the evaluation at the end; 0 "
        "disables evaluation",
        integer(0),
    )
    eval_iters: int | None = key(
        None, "number of val batches per evaluation and source; null uses all batches", optional(integer(1))
    )
    eval_samples: int = key(
        2, "number of val prompts per source to answer at each evaluation; 0 disables sample answers", integer(0)
    )
    early_stop_patience: int | None = key(
        None,
        "stop after this many evaluations without a lower val loss, computed over all sources of a mix; null "
        "disables early stopping",
        optional(integer(1)),
    )
    early_stop_min_delta: float = key(
        0.0, "minimum decrease in val loss that early_stop_patience counts as an improvement", number(0)
    )
    keep_best: bool | None = key(
        None,
        "keep the checkpoint with the lowest val loss in addition to keep_checkpoints, and link it as `best` in the "
        "run folder; null means true if early_stop_patience is set, otherwise false",
    )
    checkpoint: Literal["full", "sharded"] = key(
        "full",
        "how to write checkpoints; with full, rank 0 writes the whole checkpoint; with sharded, every rank "
        "writes its own part",
    )
    verify: bool = key(
        False, "check the hashes of the data at the start, once per epoch in the background, and at the end"
    )
    log_rows: bool = key(False, "log the loss of every conversation at every step")
    audit_dir: str | None = key("logs/audit", "folder of the audit log, which records the batches of the run")
    cache_dir: str | None = key(
        None,
        f"folder to cache remote data in; null uses ${FOLDER} or, if that is not set, the folder chatmill in "
        f"$XDG_CACHE_HOME or ~/.cache",
    )
    cache_size: int | str | None = key(
        None,
        f"maximum size of the cache of remote data, such as 200GB or a number of bytes; null uses ${SIZE} or, "
        f"if that is not set, 64GB",
        CACHE_SIZE,
    )

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint with the lowest val loss is kept."""
        return bool(self.early_stop_patience and self.save_interval) if self.keep_best is None else self.keep_best

    @property
    def reads_blocks(self) -> bool:
        return self.post_training

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        for name, other in EXCLUSIVE:
            if (value := getattr(self, name)) is not None and (instead := getattr(self, other)) is not None:
                yield f"{name} is {value} and {other} is {instead:g}; set only one of these keys"
        if self.tokens_per_step is not None and self.gradient_accumulation_steps != 1:
            yield (
                f"tokens_per_step is {self.tokens_per_step} and gradient_accumulation_steps is "
                f"{self.gradient_accumulation_steps}; set only one of these keys"
            )
        if self.post_training and self.epochs is not None and self.epochs > 1:
            yield f"post_training is true and epochs is {self.epochs:g}; post-training runs for at most one epoch"
        needs = {"early_stop_patience": self.early_stop_patience is not None, "keep_best": self.keep_best is True}
        for name in (name for name, is_set in needs.items() if is_set and not self.eval_interval):
            yield f"{name} is {json.dumps(getattr(self, name))} and eval_interval is 0; set eval_interval to at least 1"
        if self.keep_best and not self.save_interval:
            yield "keep_best is true and save_interval is 0, which disables checkpoints; change one of these keys"
        if self.early_stop_min_delta and self.early_stop_patience is None:
            yield (
                f"early_stop_min_delta is {self.early_stop_min_delta:g} and early_stop_patience is null; "
                "set early_stop_patience as well"
            )
        if self.post_training and not self.use_loss_mask:
            yield "post_training is true and use_loss_mask is false; post-training requires the loss mask"
        if self.lora is not None and self.init_from_model is None:
            yield "lora is set and init_from_model is not; adapters require a Hugging Face model"
        if self.fp8 and self.lora is not None:
            yield "fp8 is true and lora is set, but float8 supports only full fine-tuning; set fp8 to false"
        if self.parallel == "fsdp" and self.optimizer in ("adafactor", "muon"):
            yield (
                f"optimizer is {self.optimizer} and parallel is fsdp; {self.optimizer} requires unsharded matrices; "
                f"use ddp, or the optimizer adamw, adamw8bit or adamw_bf16"
            )
        if self.quantize != "none" and self.lora is None:
            yield f"quantize is {self.quantize} and lora is not set, but quantized weights cannot be trained; set lora"
        if self.quantize != "none" and self.parallel == "fsdp":
            yield f"quantize is {self.quantize} and parallel is fsdp, which cannot shard 4-bit weights; use ddp"
        if self.init_from_model is None and (fault := self.shape_fault()):
            yield f"model: {fault}"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, place: str = "the config") -> Self:
        if "tensorboard" in values:
            raise UsageError(
                f'{place}: the key tensorboard was replaced by report_to; use "report_to": ["tensorboard"]'
            )
        return super().from_mapping(layered(values), place=place)

    def sizes(self, vocab_size: int) -> GPTSizes:
        """Return the sizes of a new model; `vocab_size` is the vocabulary size of the dataset."""
        shape = {name: getattr(self, name) for name in size_keys()}
        return GPTSizes(**{**shape, "vocab_size": self.vocab_size or vocab_size})

    def lora_sizes(self) -> LoraSizes | None:
        return None if self.lora is None else LoraSizes(**self.lora)

    def with_accumulation(self) -> tuple[Self, list[str]]:
        """Return a config with batch_size and gradient_accumulation_steps instead of tokens_per_step, and a note about
        it.

        In the returned config, tokens_per_step is null, so resuming with that config does not change the batch size
        again.

        >>> config, _ = TrainConfig(tokens_per_step=65_536, batch_size=8, block_size=1024).with_accumulation()
        >>> config.batch_size, config.gradient_accumulation_steps
        (64, 8)
        """
        if (wanted := self.tokens_per_step) is None:
            return self, []
        at_once = self.batch_size * self.block_size
        steps = max(1, (2 * wanted + at_once) // (2 * at_once))
        note = f"tokens_per_step {wanted}: gradient_accumulation_steps is {steps}, "
        note += f"with {self.batch_size} rows of {self.block_size} tokens per micro-batch"
        note += "" if steps * at_once == wanted else f" ({steps * at_once} tokens per step)"
        batch_size = steps * self.batch_size
        return replace(self, batch_size=batch_size, gradient_accumulation_steps=steps, tokens_per_step=None), [note]

    def warmup_steps(self, total: int) -> int:
        """Return the number of warmup steps in a run of `total` steps. All steps are assumed to have the same number of
        tokens.
        """
        if self.warmup_iters is not None:
            return self.warmup_iters
        return math.ceil((WARMUP if self.warmup_pct is None else self.warmup_pct) * total)


@dataclass(frozen=True, kw_only=True)
class RunFlags(Config):
    """Flags of the training command that are not config keys."""

    model_name: str | None = key(None, "name of the run; its files are written to checkpoints/NAME", metavar="NAME")
    config_file: str | None = key(
        None, "JSON file with config keys (listed below); it may inherit from another file", metavar="FILE"
    )
    out_dir: str = key("checkpoints", "folder to which runs are written", metavar="DIR")
    resume: str | None = key(
        None, "checkpoint folder to resume from; auto resumes from the newest checkpoint of the run, if it has one"
    )
    estimate: bool = key(False, "estimate the memory of the run and print whether it fits, without starting the run")
    gpus: int | None = key(
        None,
        "number of GPUs for --estimate; null uses the number of ranks that the launcher starts",
        optional(integer(1)),
        metavar="N",
    )
    gpu_memory: float | None = key(
        None,
        "memory of each GPU in GiB for --estimate; null uses the memory of this machine's GPU",
        optional(number(0)),
        metavar="GIB",
    )


def with_bare_switches(args: Sequence[str]) -> list[str]:
    """Insert `true` after each boolean flag without a value."""
    keys = [*keys_of(RunFlags).values(), *keys_of(TrainConfig).values()]
    switches = {flag for each in keys if each.check.accepts(True) for flag in flag_spellings(each.name)}
    values = []
    for argument, following in pairwise([*args, "--"]):
        values += [argument, "true"] if argument in switches and following.startswith("-") else [argument]
    return values


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge dicts of settings, called layers; later layers override earlier ones.

    A layer that sets max_iters removes epochs from earlier layers, and vice versa. A layer that sets warmup_iters
    removes warmup_pct from earlier layers, and vice versa. If a layer sets tokens_per_step, batch_size is divided by
    gradient_accumulation_steps to keep the number of rows per micro-batch, and gradient_accumulation_steps is removed.
    A layer that turns post_training on also sets the keys in POST_TRAINING, except those that the layer sets itself.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        if layer.get("post_training") is True and values.get("post_training") is not True:
            layer = {**POST_TRAINING, **layer}
        for name, other in (*EXCLUSIVE, *((other, name) for name, other in EXCLUSIVE)):
            if layer.get(name) is not None and other not in layer:
                values.pop(other, None)
        if layer.get("tokens_per_step") is not None and "gradient_accumulation_steps" not in layer:
            steps = values.pop("gradient_accumulation_steps", 1)
            if type(steps) is int and steps > 0 and type(values.get("batch_size")) is int:
                values["batch_size"] = max(1, values["batch_size"] // steps)
        values.update(layer)
    return values


def renamed_keys(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Rename old keys in a run config from an earlier version of chatmill."""
    values = dict(stored)
    if values.pop("tensorboard", False) is True:
        values.setdefault("report_to", ["tensorboard"])
    return values


def size_keys() -> Sequence[str]:
    """Return the config keys that define the architecture of a new model."""
    return list(keys_of(ModelConfig))


def model_keys() -> Sequence[str]:
    """Return the config keys that a resumed run must not change, because they define the model."""
    return [*size_keys(), "lora", "quantize"]
