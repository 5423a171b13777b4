"""The model interface that the loop, evaluation and generation use for every model family.

The loss of a batch is computed in two replaceable steps: a model family computes hidden states and provides its head
(`CausalModel`), and a loss function computes the loss from both (`LossFunction` in loss.py).
"""

from __future__ import annotations

import platform
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from chatmill.errors import UsageError
from chatmill.load.batch import Batch
from chatmill.train.loss import LMHead, Losses, LossFunction, TrainedPositions, moved, weighted_loss

if TYPE_CHECKING:
    from chatmill.train.config import LoraSizes


WeightPrecision = Literal["float32", "stored", "bfloat16", "nf4"]
"""The precision of a model's weights in memory.

float32: master weights, for full fine-tuning. stored: the dtype of the files, for frozen weights. bfloat16: for
optimizers that train bfloat16 weights. nf4: linear layers quantized to 4 bits, for QLoRA.
"""


ACTIVATION_BUDGET = 0.99
"""Activations that compiled layers keep for the backward pass, relative to torch's default.

Anything below 1 makes torch recompute elementwise results; a much lower value would make it recompute matrix products
too.
"""


class Inputs(NamedTuple):
    """The arguments of a forward pass: `model(*inputs)`."""

    x: Tensor
    positions: Tensor
    segments: Tensor
    targets: TrainedPositions

    @classmethod
    def of(cls, batch: Batch, device: torch.device | str) -> Inputs:
        """Copy a batch from the loader to the model's device."""
        x, y, weights, positions, segments = (
            torch.as_tensor(part) for part in (batch.x, batch.y, batch.weights, batch.positions, batch.segments)
        )
        targets = TrainedPositions.of(y, weights).to(device)
        return cls(moved(x, device), moved(positions, device), moved(segments, device), targets)


def usable_precision(compute: torch.dtype | None) -> torch.dtype | None:
    """Return `compute`, after making sure that torch can compute in it without a warning.

    On an Arm processor without bfloat16 instructions, torch tries oneDNN for the first bfloat16 product, prints a
    thirty-line warning, and turns oneDNN off permanently. This function turns it off first, which gives the same
    results without the warning.
    """
    is_arm = platform.machine() == "aarch64" and torch.backends.mkldnn.is_available()
    if compute is torch.bfloat16 and is_arm and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        torch._C._set_mkldnn_enabled(False)
    return compute


class DecodingCache(Protocol):
    """Keys and values of the tokens seen so far, row by row, during generation."""

    def take(self, rows: Tensor) -> None:
        """Keep these rows in this order; rows may be repeated or dropped."""


class SavedPart(NamedTuple):
    """Weights of a model that are saved together in one file; usually a single tensor."""

    weights: tuple[str, ...]
    """Names in the model's state dict."""
    saved: tuple[str, ...]
    """Names in the files."""
    is_converted: bool = False
    """Whether the saved tensors are computed from the weights, rather than equal to them."""


class CausalModel(nn.Module):
    """A model that predicts the next token from the previous tokens of the same segment.

    Calling the module returns losses, so that wrappers such as DDP and FSDP see the whole forward pass. A new family
    subclasses this and adds its `load` to `MODEL_FAMILIES` (load_model.py).
    """

    vocab_size: int
    max_positions: int
    """Maximum sequence length, in tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.loss: LossFunction = weighted_loss
        """The loss function; `train_model(loss=...)` sets it."""

    def forward(self, x: Tensor, positions: Tensor, segments: Tensor, targets: TrainedPositions) -> Losses:
        """Losses for the targets in a batch; x, positions and segments are (rows, length)."""
        return self.loss(self.hidden(x, positions, segments), self.head(), targets)

    @abstractmethod
    def hidden(self, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Hidden states (rows, length, width) for the head; no token attends to another segment."""

    @abstractmethod
    def head(self) -> LMHead:
        """How logits are computed from hidden states."""

    def logits(self, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """All logits (rows, length, vocabulary) in float32, for tests and small batches."""
        return self.head().logits(self.hidden(x, positions, segments))

    @abstractmethod
    def prefill(self, ids: Tensor, lengths: Tensor, room: int) -> tuple[Tensor, DecodingCache]:
        """Logits (rows, vocabulary) after right-padded prompts (rows, length), and the cache.

        `room` is the maximum number of tokens to generate after a prompt.
        """

    @abstractmethod
    def step(self, tokens: Tensor, cache: DecodingCache) -> Tensor:
        """Logits (rows, vocabulary) after one more token per row."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The repeated layers, which are compiled, checkpointed and sharded one by one."""

    @abstractmethod
    def checkpoint_blocks(self, *, offload: bool = False) -> None:
        """Turn on activation checkpointing: keep only the input of each block for the backward pass.

        With `offload`, the inputs are kept in host memory (offload.py).
        """

    @abstractmethod
    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write the model into an existing folder, as safetensors and JSON. `state` replaces the model's weights."""

    def save_parts(self, folder: Path, like: Mapping[str, Tensor]) -> list[SavedPart] | None:
        """Write a model folder without weights; return the parts in which weights are saved, or None if unknown.

        `like` has the weights on the meta device, in the dtypes they are saved in.
        """
        return None

    def saved_tensors(self, part: SavedPart, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a part as they are saved, by their names in the files."""
        return {name: weights[weight] for weight, name in zip(part.weights, part.saved, strict=True)}

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a weight in the folder that the model was loaded from; None for a new model."""
        return None

    def with_lora(self, sizes: LoraSizes, folder: Path) -> CausalModel:
        """Add new adapters to this model and freeze its weights; `folder` is the folder it was loaded from."""
        raise UsageError(f"{folder}: is not a Hugging Face model, but lora is given; LoRA requires one")

    def trained_state(self) -> dict[str, Tensor]:
        """The trainable weights by name: all weights, or only the adapters if the model has any."""
        return {name: parameter.detach() for name, parameter in self.named_parameters() if parameter.requires_grad}

    def compile_blocks(self, *, recompute: bool = True) -> None:
        """Compile each block; equal blocks are compiled once. Shapes are static.

        With `recompute`, the backward pass recomputes elementwise operators in kernels that read their inputs anyway,
        which saves a quarter of the memory at the same speed. With activation checkpointing, blocks need less memory
        without `recompute`. The setting applies to the whole process.
        """
        import torch._functorch.config as partitioner

        partitioner.activation_memory_budget = ACTIVATION_BUDGET if recompute else 1.0
        for block in self.blocks():
            block.compile(dynamic=False)

    @property
    def num_parameters(self) -> int:
        """Number of parameters; shared parameters count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Context in which a module is in eval mode (no dropout)."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
