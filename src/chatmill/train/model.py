"""What the loop, evaluation and generation know of a model: chatmill's own GPT and Hugging Face ones look alike."""

from __future__ import annotations

import platform
from abc import abstractmethod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from chatmill.load.batch import Batch
from chatmill.train.loss import LMHead, Losses, TrainedPositions, moved, weighted_loss


class Inputs(NamedTuple):
    """What a model is called with: `model(*inputs)`."""

    x: Tensor
    positions: Tensor
    segments: Tensor
    targets: TrainedPositions

    @classmethod
    def of(cls, batch: Batch, device: torch.device | str) -> Inputs:
        """A batch from the loader, which lies in the host's memory, on the model's device."""
        x, y, weights, positions, segments = (
            torch.as_tensor(part) for part in (batch.x, batch.y, batch.weights, batch.positions, batch.segments)
        )
        targets = TrainedPositions.of(y, weights).to(device)
        return cls(moved(x, device), moved(positions, device), moved(segments, device), targets)


def usable_precision(compute: torch.dtype | None) -> torch.dtype | None:
    """`compute` itself, once torch can multiply in it without a warning.

    On an Arm processor without bfloat16 instructions torch tries oneDNN for the first bfloat16 product, warns in thirty
    lines, and turns oneDNN off for good. This turns it off first: the same results, and nothing to read.
    """
    is_arm = platform.machine() == "aarch64" and torch.backends.mkldnn.is_available()
    if compute is torch.bfloat16 and is_arm and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        torch._C._set_mkldnn_enabled(False)
    return compute


class DecodingCache(Protocol):
    """Keys and values of the tokens that were seen, row by row, while answers are generated."""

    def take(self, rows: Tensor) -> None:
        """Go on with these rows in this order; a row may come twice, or no more."""


class CausalModel(nn.Module):
    """A model that predicts the next token from those before it in the same segment.

    Called as a module it gives losses, so that what wraps modules (DDP, FSDP) sees the whole forward pass.
    """

    vocab_size: int
    max_positions: int
    """Tokens of one conversation, at most."""

    def forward(self, x: Tensor, positions: Tensor, segments: Tensor, targets: TrainedPositions) -> Losses:
        """Losses of the targets in a batch; x, positions and segments are (rows, length)."""
        return weighted_loss(self.hidden(x, positions, segments), self.head(), targets)

    @abstractmethod
    def hidden(self, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Hidden states (rows, length, width), ready for the head; no token sees another segment."""

    @abstractmethod
    def head(self) -> LMHead:
        """How logits come from hidden states."""

    def logits(self, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """All logits (rows, length, vocabulary) in float32: for tests and small questions, not for training."""
        return self.head().logits(self.hidden(x, positions, segments))

    @abstractmethod
    def prefill(self, ids: Tensor, lengths: Tensor, room: int) -> tuple[Tensor, DecodingCache]:
        """Logits (rows, vocabulary) after prompts (rows, length) filled up at their ends, and what was seen.

        `room` is how many tokens may follow a prompt.
        """

    @abstractmethod
    def step(self, tokens: Tensor, cache: DecodingCache) -> Tensor:
        """Logits (rows, vocabulary) after one more token a row."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The repeated layers: what is compiled, checkpointed and sharded one by one."""

    @abstractmethod
    def checkpoint_blocks(self) -> None:
        """From now on keep only what enters each block for the backward pass, and compute the rest again."""

    @abstractmethod
    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write the model into a folder that exists: safetensors and JSON. `state` stands for its own weights."""

    def trained_state(self) -> dict[str, Tensor]:
        """The weights that training changes, by name: all of them, or the adapters of a model that has some."""
        return {name: parameter.detach() for name, parameter in self.named_parameters() if parameter.requires_grad}

    def compile_blocks(self) -> None:
        """Compile each block; they share one compilation. Shapes are taken as fixed."""
        for block in self.blocks():
            block.compile(dynamic=False)

    @property
    def num_parameters(self) -> int:
        """Each shared parameter counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device
