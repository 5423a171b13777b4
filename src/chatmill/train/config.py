"""The configuration of a training run: what is loaded, the model, the optimizer, and when something is written.

    defaults  <  config file  <  POST_TRAINING and WARMUP_PCT  <  flags

Every key of it is a flag of `train.py` too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from chatmill.config import Right, flag, key, number, one_of, optional, text, whole
from chatmill.errors import ChatmillError, UsageError, one_line
from chatmill.load.config import LoadConfig
from chatmill.train.gpt import GPTSizes
from chatmill.train.lora import LoraSizes

WARMUP = 0.03
"""The warm-up's share of a run that names none."""
POST_TRAINING = {"use_loss_mask": True, "epoch_drop_last": False}
"""What post-training means: the mask, and all of one pass."""
SHARE = Right(
    "a share from 0 to 1, such as 0.03 for 3 percent",
    lambda value: type(value) in (int, float) and 0 <= value <= 1,
)
BETA = Right("a number from 0 to below 1", lambda value: type(value) in (int, float) and 0 <= value < 1)


def _are_targets(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) > 0 and all(map(text().fits, value))
    return text().fits(value)


LORA = {
    "r": whole(1),
    "alpha": number(0),
    "dropout": SHARE,
    "targets": Right("a text or a list of texts", _are_targets),
}
"""What is right for each key of `LoraSizes`."""
ADAPTER = Right(
    f"an object with {', '.join(f'{name} ({right.words})' for name, right in LORA.items())}",
    lambda value: isinstance(value, Mapping) and all(k in LORA and LORA[k].fits(v) for k, v in value.items()),
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoadConfig):
    """All that decides what a run computes and what it writes. A wrong value is a `UsageError` that names all."""

    # The data and the model.
    dataset_dir: str | None = key(
        None, "what to train on: a dataset, a cache, or a folder of caches that are mixed", optional(text())
    )
    init_from_model: str | None = key(
        None, "a folder of a model to begin with: chatmill's own, or a Hugging Face one", optional(text())
    )
    lora: Mapping[str, Any] | None = key(
        None, "train adapters on a Hugging Face model, which stays as it is", optional(ADAPTER)
    )
    vocab_size: int | None = key(None, "tokens that the model knows; null: as many as the data has", optional(whole(1)))
    n_layer: int = key(12, "layers", whole(1))
    n_embd: int = key(768, "width", whole(1))
    n_head: int = key(12, "heads of queries", whole(1))
    n_kv_head: int | None = key(None, "heads of keys and values; null: n_head", optional(whole(1)))
    head_dim: int | None = key(None, "width of a head; null: n_embd / n_head", optional(whole(1)))
    n_ffn: int | None = key(None, "width of the gated layer; null: 8/3 of n_embd", optional(whole(1)))
    max_positions: int = key(4096, "the longest conversation that the model can read", whole(1))
    rope_theta: float = key(10_000.0, "base of the rotary positions", number(1))
    norm_eps: float = key(1e-6, "what keeps RMSNorm from dividing by zero", number(0))
    tie_weights: bool = key(True, "the head is the embedding", flag())
    qk_norm: bool = key(False, "normalize queries and keys of each head", flag())

    # The optimizer and its schedule.
    max_iters: int | None = key(None, "optimizer steps on this data; null: one pass over it", optional(whole(1)))
    learning_rate: float = key(3e-4, "the highest learning rate", number(0))
    min_lr_ratio: float = key(0.1, "the share of it that the schedule falls to", SHARE)
    lr_schedule: str = key("cosine", "how it falls", one_of("cosine", "linear", "constant"))
    warmup_iters: int | None = key(None, "steps in which it rises; null: warmup_pct of the run", optional(whole(0)))
    warmup_pct: float | None = key(
        None, f"the share of the token budget in which it rises; null: {WARMUP:g}", optional(SHARE)
    )
    weight_decay: float = key(0.1, "decay of matrices; vectors have none", number(0))
    beta1: float = key(0.9, "AdamW's memory of gradients", BETA)
    beta2: float = key(0.95, "AdamW's memory of their squares", BETA)
    adam_eps: float = key(1e-8, "what keeps AdamW from dividing by zero", number(0))
    grad_clip: float = key(1.0, "the longest gradient; 0: of any length", number(0))
    post_training: bool = key(
        False, "blocks and assistant spans: one pass, what nothing in is trained is skipped", flag()
    )
    check_tokenizer: bool = key(True, "refuse data that was made with another tokenizer than the model's", flag())
    seed: int = key(1337, "of fresh weights and of dropout", whole(0))

    # Where and how it is computed.
    device: str = key("auto", "where; auto: on a GPU if there is one", one_of("auto", "cpu", "cuda"))
    dtype: str = key(
        "auto",
        "precision of the computation, weights are always float32; auto: bfloat16 on a GPU",
        one_of("auto", "float32", "bfloat16"),
    )
    compile: bool | None = key(None, "torch.compile the layers; null: on a GPU", optional(flag()))
    activation_checkpointing: bool = key(False, "compute activations again instead of keeping them", flag())
    parallel: str = key("ddp", "several ranks: whole models (ddp), or shards of one (fsdp)", one_of("ddp", "fsdp"))

    # What is written, and when.
    eval_interval: int = key(500, "steps between evaluations on val, and one at the end; 0: none", whole(0))
    eval_iters: int | None = key(None, "batches of val to evaluate on; null: all of them", optional(whole(1)))
    eval_samples: int = key(2, "questions of val, of each source, to answer at an evaluation; 0: none", whole(0))
    save_interval: int = key(500, "steps between checkpoints, and one at the end; 0: none", whole(0))
    keep_checkpoints: int = key(2, "how many of the last checkpoints stay", whole(1))
    checkpoint: str = key(
        "full",
        "who writes it: rank 0 all of it (full), or every rank what it holds (sharded)",
        one_of("full", "sharded"),
    )
    log_interval: int = key(10, "steps between lines of progress where no terminal shows a bar", whole(1))
    log_rows: bool = key(False, "write the loss of every conversation of every step", flag())
    tensorboard: bool = key(False, "write for TensorBoard too", flag())
    audit_dir: str | None = key("logs/audit", "where the audit log of what was trained on goes", optional(text()))

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.warmup_iters is not None and self.warmup_pct is not None:
            yield f"warmup_iters is {self.warmup_iters} and warmup_pct {self.warmup_pct:g}; expected one of them"
        if self.post_training and not self.use_loss_mask:
            yield "post_training is true and use_loss_mask false; post-training is on what the mask marks alone"
        if self.lora is not None and self.init_from_model is None:
            yield "lora is given and init_from_model is not; adapters go onto a Hugging Face model"
        if self.init_from_model is None:
            try:
                self.sizes(1)
            except ChatmillError as error:
                yield str(error)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, place: str = "the config") -> Self:
        return super().from_mapping(layered(values), place=place)

    def sizes(self, vocab_size: int) -> GPTSizes:
        """The shape of a fresh model for data with so many tokens."""
        same = {each.name: getattr(self, each.name) for each in fields(GPTSizes) if each.name != "vocab_size"}
        return GPTSizes(vocab_size=self.vocab_size or vocab_size, **same)

    def lora_sizes(self) -> LoraSizes | None:
        return None if self.lora is None else LoraSizes(**self.lora)

    def warmup_steps(self, total: int) -> int:
        """Steps of warm-up in a run of `total`: every step has equally many tokens of the budget."""
        if self.warmup_iters is not None:
            return self.warmup_iters
        share = WARMUP if self.warmup_pct is None else self.warmup_pct
        return -int(-share * total // 1)


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The keys that the documented variables set; this is the one place where they are read."""
    values: dict[str, Any] = {}
    faults = []
    if given := environment.get("POST_TRAINING"):
        if given not in ("0", "1"):
            faults.append(f"POST_TRAINING is {one_line(given)}; expected 0 or 1")
        values["post_training"] = given == "1"
    if given := environment.get("WARMUP_PCT"):
        try:
            values["warmup_pct"] = float(given)
        except ValueError:
            faults.append(f"WARMUP_PCT is {one_line(given)}; expected {SHARE.words}")
    if faults:
        raise UsageError("; ".join(faults))
    return values


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Values of which later layers win. The two ways to give the warm-up are one there: the later one is meant.

    The layer that turns post-training on brings what that means, unless it says otherwise itself.
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
    """The keys that shape a fresh model; one that is opened has its shape."""
    return [each.name for each in fields(GPTSizes)]


def model_keys() -> Sequence[str]:
    """The keys that shape the model: a run that goes on has the same."""
    return [*size_keys(), "lora"]
