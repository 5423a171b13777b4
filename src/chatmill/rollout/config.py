"""The configuration of a rollout run: task, generation and loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from chatmill.config import SHARE, Config, ValueCheck, integer, key, number, optional
from chatmill.rollout.match import GATE
from chatmill.rollout.target import Border
from chatmill.rollout.trained_parts import PartWeights
from chatmill.train.config import LORA, LoraSizes
from chatmill.train.run_config import OptimizerConfig, RunConfig


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value)


def _is_positive(value: Any) -> bool:
    return number(0).accepts(value) and value > 0


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Config):
    """Config keys for the task."""

    truth: str | None = key(None, ".jsonl file of ground-truth records, each with id, messages and objects")
    tokenizer: str = key("bytes", "tokenizer that the model was trained with")
    format: str | None = key(
        None,
        "chat format that the model was trained with; null uses the chat template in the tokenizer's folder, "
        "or chatml if the folder has none",
    )
    add_tokens: bool = key(False, "add the control and coordinate tokens that the tokenizer lacks")
    fields: Sequence[str] | None = key(
        None,
        "field names of each entry; the default is a description and a box or polygon",
        optional(ValueCheck("a list of names", _are_names)),
    )
    gate: float = key(GATE, "minimum overlap (IoU) to match two boxes", SHARE)
    train_values: bool = key(True, "also train on the texts of appended entries")
    train_cut: bool = key(False, "if the kept prefix ends inside a token, train on the shorter tokens that replace it")
    border: Border = key(
        "shorter", "how to tokenize the text around the end of the kept prefix: shorter, masked, joined or canonical"
    )


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(Config):
    """Config keys for generating rollouts."""

    rollout_share: float = key(1.0, "fraction of rows that are rollouts; other rows are ground-truth answers", SHARE)
    rollout_every: int = key(1, "number of training steps after which new answers are generated", integer(1))
    max_new_tokens: int = key(512, "maximum answer length in tokens", integer(1))
    decoding: Literal["greedy", "sample", "beam"] = key("greedy", "decoding method for answers")
    temperature: float = key(1.0, "sampling temperature", number(0))
    top_k: int = key(0, "sample from the k most likely tokens; 0 disables the limit", integer(0))
    top_p: float = key(1.0, "sample from the most likely tokens up to this total probability (nucleus sampling)", SHARE)
    beams: int = key(4, "number of beams for beam search", integer(1))
    generate_batch_size: int = key(64, "number of prompts per generation batch", integer(1))
    server: str | None = key(None, "URL (http://…/v1) of a server that generates answers with its own weights")
    server_model: str | None = key(None, "name of the model on the server")
    server_api: Literal["tokens", "completions", "chat"] = key(
        "tokens", "server API: tokens exchanges token ids, completions exchanges text, and chat sends messages"
    )
    server_key_env: str | None = key(None, "name of the environment variable that contains the server's API key")
    replay: str | None = key(
        None, "rollouts.jsonl of an earlier run; its answers are used, and no new ones are generated"
    )


@dataclass(frozen=True, kw_only=True)
class RolloutLossConfig(Config):
    """Config keys for the loss."""

    text_weight: float = key(1.0, "weight of the cross-entropy loss on text tokens", number(0))
    soft_weight: float = key(1.0, "cross-entropy weight on coordinate tokens, with a Gaussian target", number(0))
    wasserstein_weight: float = key(
        1.0, "weight of the Wasserstein distance to the Gaussian target, on coordinate tokens", number(0)
    )
    outside_weight: float = key(
        1.0, "weight of the penalty on the probability of non-coordinate tokens, at coordinate positions", number(0)
    )
    slot_weight: float = key(1.0, "loss weight of the coordinates of matched objects", number(0))
    append_weight: float = key(1.0, "loss weight of appended objects", number(0))
    end_weight: float = key(1.0, "loss weight of the closing brace and EOS", number(0))
    surplus_weight: float = key(
        0.0,
        "loss weight of the target that closes the answer if the rollout continues after the last true object",
        number(0),
    )
    sigma: float = key(2.0, "standard deviation of the Gaussian target", ValueCheck("a number above 0", _is_positive))


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(RunConfig, OptimizerConfig, RolloutLossConfig, GenerationConfig, TaskConfig):
    """All settings of a rollout run."""

    max_iters: int = key(1000, "optimizer steps", integer(1))
    learning_rate: float = key(1e-4, "peak learning rate", number(0))
    warmup_iters: int = key(0, "warm-up steps", integer(0))
    batch_size: int = key(16, "number of rows per optimizer step", integer(1))
    gradient_accumulation_steps: int = key(1, "number of micro-batches per step", integer(1))
    lora: Mapping[str, Any] | None = key(
        None, "train LoRA adapters on a Hugging Face model, whose own weights are frozen", optional(LORA)
    )

    @property
    def generation_size(self) -> int:
        """Number of prompts per call to the generator."""
        groups = max(1, self.generate_batch_size // self.beams)
        return groups * self.beams if self.decoding == "beam" else self.generate_batch_size

    def part_weights(self) -> PartWeights:
        return PartWeights(self.slot_weight, self.append_weight, self.end_weight, self.surplus_weight)

    def lora_sizes(self) -> LoraSizes | None:
        return None if self.lora is None else LoraSizes(**self.lora)

    def conflicts(self) -> Iterator[str]:
        for name in ("truth", "init_from_model"):
            if getattr(self, name) is None:
                yield f"{name} is required"
        if self.gate == 0:
            yield "gate is 0; expected a number above 0 and at most 1"
        if self.save_interval % self.rollout_every:
            # Checkpoints do not contain the answers of the current round, so save only between rounds.
            yield f"save_interval is {self.save_interval}; expected a multiple of rollout_every ({self.rollout_every})"
        if self.server is not None and self.server_model is None:
            yield "server is set, but server_model is missing; set both"
        for name in ("server_model", "server_api", "server_key_env"):
            if self.server is None and getattr(self, name) not in (None, "tokens"):
                yield f"{name} is set, but server is missing; set both"
        if self.server is not None and self.replay is not None:
            yield "server and replay are both set; set only one of them"
        if self.server is not None and (self.decoding == "beam" or self.top_k):
            yield "a server supports only greedy decoding, temperature and top_p; remove beams and top_k"
