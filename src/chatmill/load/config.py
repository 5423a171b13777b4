"""The configuration of a loader: the order of episodes and the layout of batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from chatmill.config import Config, ValueCheck, integer, key, one_of, optional
from chatmill.errors import ChatmillError
from chatmill.load.mix import MIX_BY, shares
from chatmill.load.order import MODES, SEED_LIMIT
from chatmill.store.layout import TOKEN_DTYPES

MIX = ValueCheck(
    "an object that maps sources to weights",
    lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value),
)


@dataclass(frozen=True, kw_only=True)
class LoadConfig(Config):
    """Settings that determine the episodes and the layout of each batch.

    >>> LoadConfig(batch_size=4, packing="bins", use_loss_mask=True).block_size
    512
    """

    batch_size: int = key(8, "rows per optimizer step, summed over all ranks and accumulation steps", integer(1))
    block_size: int = key(512, "input tokens per row", integer(1))
    gradient_accumulation_steps: int = key(1, "micro-batches per step on each rank", integer(1))
    use_loss_mask: bool = key(False, "train only on tokens that the loss mask selects, such as assistant turns")
    batch_sampling_mode: str = key(
        "epoch", "order of episodes: epoch, feistel (for very large datasets) or random", one_of(*MODES)
    )
    epoch_seed: int = key(1337, "base seed; epoch e is shuffled with epoch_seed + e", integer(0, SEED_LIMIT - 1))
    epoch_shuffle: bool = key(True, "shuffle the episodes of each epoch")
    epoch_drop_last: bool = key(True, "drop the incomplete last batch of an epoch")
    pad_token_id: int | None = key(
        None, "token id that pads rows; null uses the end-of-turn token", optional(integer(0))
    )
    episode_min_tokens: int = key(2, "skip episodes with fewer tokens than this", integer(0))
    packing: Literal["none", "bins"] = key(
        "none", "none puts one episode in each row; bins packs several whole episodes into a row"
    )
    mix_sft: Mapping[str, float] | None = key(None, "sources to mix, with their weights", optional(MIX))
    mix_epochs: Mapping[str, float] | None = key(
        None,
        "sources to mix, with the number of epochs of each source per epoch of the mix; replaces mix_sft",
        optional(MIX),
    )
    mix_by: str = key("rows", "unit of the weights in mix_sft", one_of(*MIX_BY))
    token_dtype: str | None = key(
        None,
        "token type (uint16 or uint32) of a dataset written by another program, if it cannot be inferred",
        optional(one_of(*TOKEN_DTYPES)),
    )

    @property
    def reads_blocks(self) -> bool:
        """Whether the dataset must consist of stream blocks of block_size + 1 tokens, as in post-training."""
        return False

    def conflicts(self) -> Iterator[str]:
        if self.batch_size % self.gradient_accumulation_steps:
            yield (
                f"batch_size {self.batch_size} cannot be split into {self.gradient_accumulation_steps} equal parts; "
                "expected a multiple of gradient_accumulation_steps"
            )
        if self.packing == "bins" and self.episode_min_tokens < 1:
            yield "episode_min_tokens is 0; packing=bins requires at least 1"
        if self.mix_sft is not None and self.mix_epochs is not None:
            yield "mix_sft and mix_epochs are both set; set only one of them"
        if self.mix_epochs is not None and self.mix_by != "rows":
            yield f"mix_by is {self.mix_by}, but mix_epochs counts rows; use mix_sft, or remove mix_by"
        if self.mix is not None:
            try:
                shares(self.mix, self.mix_key)
            except ChatmillError as error:
                yield str(error)

    @property
    def mix(self) -> Mapping[str, float] | None:
        """Maps each source of the mix to its weight or its number of epochs; None if the config has no mix."""
        return self.mix_sft if self.mix_epochs is None else self.mix_epochs

    @property
    def mix_key(self) -> str:
        """The config key that lists the sources of the mix."""
        return "mix_sft" if self.mix_epochs is None else "mix_epochs"

    def order_part(self) -> dict[str, Any]:
        """Return the settings that determine which episodes are in which batch."""
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
        names += ["mix_epochs"] if self.mix_epochs is not None else []
        names += ["use_loss_mask"] if self.mix_by == "trained_tokens" else []
        return {name: getattr(self, name) for name in names}


def order_sha256(order: Mapping[str, Any]) -> str:
    """Hash the settings that `order_part` returns."""
    return hashlib.sha256(json.dumps(order, sort_keys=True).encode()).hexdigest()
