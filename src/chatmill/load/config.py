"""The configuration of a loader: which rows come when, and what a batch holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from chatmill.config import Config, Right, flag, key, one_of, optional, whole
from chatmill.errors import ChatmillError
from chatmill.load.mix import MIX_BY, shares
from chatmill.load.order import MODES, SEED_LIMIT


def _is_mix(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


@dataclass(frozen=True, kw_only=True)
class LoadConfig(Config):
    """What decides which rows come when, and what a batch holds."""

    batch_size: int = key(8, "rows of one optimizer step, over all ranks and accumulation steps", whole(1))
    block_size: int = key(512, "tokens of a row of x", whole(1))
    gradient_accumulation_steps: int = key(1, "parts a rank takes its rows of a step in", whole(1))
    use_loss_mask: bool = key(False, "train only what the mask marks, such as what the assistant says", flag())
    batch_sampling_mode: str = key("epoch", "the order: epoch, feistel (very large sets) or random", one_of(*MODES))
    epoch_seed: int = key(1337, "base seed; epoch e is shuffled with epoch_seed + e", whole(0, SEED_LIMIT - 1))
    epoch_shuffle: bool = key(True, "shuffle episodes in each epoch", flag())
    epoch_drop_last: bool = key(True, "drop the incomplete last batch of an epoch", flag())
    pad_token_id: int | None = key(None, "what rows are filled up with; null: the end of turn", optional(whole(0)))
    episode_min_tokens: int = key(2, "episodes with fewer tokens are skipped", whole(0))
    packing: str = key("none", "one episode a row, or several that share it (bins)", one_of("none", "bins"))
    mix_sft: Mapping[str, float] | None = key(
        None, "sources and their weights", optional(Right("an object of sources and weights", _is_mix))
    )
    mix_by: str = key("rows", "what the weights of sources count", one_of(*MIX_BY))

    def conflicts(self) -> Iterator[str]:
        """What is wrong with keys that are each right by themselves."""
        if self.batch_size % self.gradient_accumulation_steps:
            yield (
                f"batch_size {self.batch_size} cannot be taken in {self.gradient_accumulation_steps} equal parts; "
                "expected a multiple of gradient_accumulation_steps"
            )
        if self.packing == "bins" and self.episode_min_tokens < 1:
            yield "episode_min_tokens is 0; packing bins takes episodes of at least 1 token"
        if self.mix_sft is not None:
            try:
                shares(self.mix_sft)
            except ChatmillError as error:
                yield str(error)

    def order_part(self) -> dict[str, Any]:
        """The keys that decide which episodes stand in which batch: runs that agree in them agree there."""
        names = [
            "batch_size",
            "batch_sampling_mode",
            "epoch_seed",
            "epoch_shuffle",
            "epoch_drop_last",
            "episode_min_tokens",
            "packing",
        ]
        names += ["block_size"] if self.packing == "bins" or self.mix_by != "rows" else []
        names += ["mix_sft", "mix_by"] if self.mix_sft is not None else []
        names += ["use_loss_mask"] if self.mix_by == "trained_tokens" else []
        return {name: getattr(self, name) for name in names}
