"""The interface of all model families, used by the training loop, evaluation and generation.

The loss of a batch is computed in two steps. A model (`CausalModel`) computes hidden states and provides its output
head. A loss function (`LossFunction` in loss.py) computes the loss from the hidden states and the output head.
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
from chatmill.train.flash import remember_bounds
from chatmill.train.loss import LMHead, Losses, LossFunction, TrainedPositions, moved, weighted_loss

if TYPE_CHECKING:
    from chatmill.train.config import LoraSizes


WeightPrecision = Literal["float32", "stored", "bfloat16", "nf4"]
"""The precision of a model's weights in memory.

"float32" is for full fine-tuning, and "bfloat16" is for optimizers that train bfloat16 weights. "stored" keeps the
dtype of the files, for frozen weights. "nf4" quantizes linear layers to 4 bits, for QLoRA.
"""


ACTIVATION_BUDGET = 0.99
"""Memory budget for the activations that compiled layers keep for the backward pass, relative to torch's default.

A budget below 1 makes torch recompute elementwise results; a much lower budget would make it recompute matrix products
too.
"""


class Inputs(NamedTuple):
    """The arguments of a forward pass, which is called as `model(*inputs)`."""

    x: Tensor
    positions: Tensor
    segments: Tensor
    targets: TrainedPositions

    @classmethod
    def of(cls, batch: Batch, device: torch.device | str) -> Inputs:
        """Return the model inputs for a batch from the loader, copied to a device."""
        x, y, weights, positions, segments = (
            torch.as_tensor(part) for part in (batch.x, batch.y, batch.weights, batch.positions, batch.segments)
        )
        targets = TrainedPositions.of(y, weights).to(device)
        inputs = cls(moved(x, device), moved(positions, device), moved(segments, device), targets)
        if inputs.segments.is_cuda:
            remember_bounds(inputs.segments, segments)
        return inputs


def usable_precision(compute: torch.dtype | None) -> torch.dtype | None:
    """Return `compute`, after making sure that torch can compute in this dtype without printing a warning.

    On an Arm processor without bfloat16 instructions, the first bfloat16 matrix product prints a thirty-line warning
    and turns oneDNN off. Turning oneDNN off before the first matrix product gives the same results without the warning.
    """
    is_arm = platform.machine() == "aarch64" and torch.backends.mkldnn.is_available()
    if compute is torch.bfloat16 and is_arm and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        torch._C._set_mkldnn_enabled(False)
    return compute


class DecodingCache(Protocol):
    """The cached keys and values of all tokens processed so far during generation, for each row."""

    def take(self, rows: Tensor) -> None:
        """Replace the cached rows by the rows with the given indices; an index can occur more than once."""


class SavedPart(NamedTuple):
    """A group of weights that must be saved in the same file; usually a single weight."""

    weights: tuple[str, ...]
    """Names of the weights in the model's state dict."""
    saved: tuple[str, ...]
    """Names of the tensors in the saved files."""
    is_converted: bool = False
    """Whether the weights are converted before they are saved."""


class CausalModel(nn.Module):
    """A model that predicts the next token from the previous tokens of the same segment.

    Calling the module returns losses, so that wrappers such as DDP and FSDP see the whole forward pass. To add a model
    family, subclass `CausalModel` and add the subclass to `MODEL_FAMILIES` in load_model.py.
    """

    vocab_size: int
    max_positions: int
    """Maximum sequence length, in tokens."""
    tokenizer_folder: Path | None = None
    """The folder of the initial model, whose tokenizer files are copied to saved models; None if nothing is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.loss: LossFunction = weighted_loss
        """The loss function, which `train_model(loss=...)` replaces."""

    def forward(self, x: Tensor, positions: Tensor, segments: Tensor, targets: TrainedPositions) -> Losses:
        """Compute the losses for the targets in a batch; x, positions and segments have the shape (rows, length)."""
        return self.loss(self.hidden(x, positions, segments), self.head(), targets)

    @abstractmethod
    def hidden(self, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Compute the final hidden states (rows, length, width); tokens attend only to tokens of the same segment."""

    @abstractmethod
    def head(self) -> LMHead:
        """Return the output head, which computes logits from hidden states."""

    def logits(self, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Compute all logits (rows, length, vocabulary) in float32, for tests and small batches."""
        return self.head().logits(self.hidden(x, positions, segments))

    @abstractmethod
    def prefill(self, ids: Tensor, lengths: Tensor, room: int) -> tuple[Tensor, DecodingCache]:
        """Process right-padded prompts (rows, length); return the next-token logits (rows, vocabulary) of each prompt,
        and the KV cache.

        `room` is the maximum number of tokens to generate after a prompt.
        """

    @abstractmethod
    def step(self, tokens: Tensor, cache: DecodingCache) -> Tensor:
        """Process one more token per row; return the logits (rows, vocabulary) of the next token."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """Return the transformer layers, which are compiled, checkpointed and sharded one by one."""

    @abstractmethod
    def checkpoint_blocks(self, *, offload: bool = False) -> None:
        """Turn on activation checkpointing: keep only the input of each block for the backward pass.

        If `offload` is set, the inputs of the blocks are kept in host memory; see offload.py.
        """

    @abstractmethod
    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write the model into an existing folder, as safetensors and JSON. If `state` is given, its weights are
        written instead of the model's own weights.
        """

    def save_parts(self, folder: Path, like: Mapping[str, Tensor]) -> list[SavedPart] | None:
        """Write all files of a model folder except the weights, and return the groups of weights to save.

        `like` contains the weights as meta tensors, in the dtypes in which they will be saved. Return None if the model
        family cannot save its weights in groups.
        """
        return None

    def saved_tensors(self, part: SavedPart, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors to save for a group of weights, keyed by their names in the saved files."""
        return {name: weights[weight] for weight, name in zip(part.weights, part.saved, strict=True)}

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a weight in the files that the model was loaded from, or None for a new model."""
        return None

    def with_lora(self, sizes: LoraSizes, folder: Path) -> CausalModel:
        """Add new LoRA adapters to this model and freeze its other weights. `folder` is the folder of the model."""
        raise UsageError(f"{folder}: is not a Hugging Face model, but lora is set; LoRA requires a Hugging Face model")

    def trained_state(self) -> dict[str, Tensor]:
        """Return the trainable weights by name: all weights, or only the adapters if the model has adapters."""
        return {name: parameter.detach() for name, parameter in self.named_parameters() if parameter.requires_grad}

    def compile_blocks(self, *, recompute: bool = True) -> None:
        """Compile each block with static shapes; blocks with the same code and shapes are compiled only once.

        If `recompute` is set, the backward pass recomputes elementwise operators. Recomputation reduces memory use by a
        quarter at the same speed. Do not combine `recompute` with activation checkpointing, because the two together
        need more memory than checkpointing alone. `recompute` applies to all models in the process.
        """
        import torch._functorch.config as partitioner

        partitioner.activation_memory_budget = ACTIVATION_BUDGET if recompute else 1.0
        for block in self.blocks():
            block.compile(dynamic=False)

    @property
    def num_parameters(self) -> int:
        """Number of parameters, counting shared parameters once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Context manager that puts a module in eval mode, which disables dropout."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
