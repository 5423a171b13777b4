"""Load a model in shards. Each rank needs memory only for its own shard and for one whole tensor at a time.

The model is first built with its parameters on the meta device, where they take no memory. FSDP then shards the model
by the rows of every parameter, and each rank allocates its own rows. Finally, each rank reads the values of these rows
from the safetensors files. For a new model, each rank initializes its rows instead.

If a model cannot be loaded in shards, every rank loads the whole model, and a note gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from chatmill.errors import ChatmillError, one_line
from chatmill.train.checkpoint import check_model
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.config import LoraSizes, TrainConfig
from chatmill.train.distributed import Values, World
from chatmill.train.gpt import GPT, draw_weights, open_on_meta
from chatmill.train.load_model import HUGGING_FACE, MODEL_FAMILIES
from chatmill.train.memory import available_memory, check_memory
from chatmill.train.model import CausalModel, WeightPrecision
from chatmill.train.model_files import ModelFiles, check_folder, is_adapter, model_type
from chatmill.train.optimizers import OPTIMIZER_BYTES, weights_of
from chatmill.train.preflight import make_model
from chatmill.train.sharded_tensors import Rows, open_weights

T = TypeVar("T")


class NotShardableError(Exception):
    """Raised if a model cannot be loaded in shards."""


@dataclass(frozen=True)
class OpenedModel:
    """A model that will be sharded over ranks."""

    model: CausalModel
    values: Values | None = None
    """Yields the values of the parameters on the meta device; None if the model is fully loaded."""
    test: Callable[[], bool] | None = None
    """Tests, with the weights in the files, whether conversations in a packed row are independent of each other."""
    note: str | None = None
    """The reason why the model could not be loaded in shards; None if it was loaded in shards."""


def open_for_shards(config: TrainConfig, vocab_size: int, *, compute: torch.dtype | None, world: World) -> OpenedModel:
    """Open the model of a config with parameters on the meta device; all ranks must call this function.

    Raises `MemoryError` or `DataError` if the host does not have enough memory for a rank's shard.
    """
    opened, reason = _agreed(world, lambda: _open(config, vocab_size, compute, world))
    if opened is not None and (test := opened.test) is not None:
        # Run the test only on rank 0. The test reads all weight files into the page cache, so other ranks on the node
        # of rank 0 do not need to read from disk.
        separates, reason = _agreed(world, lambda: [test()] if world.is_first else [])
        if separates is not None:
            opened.model.separates = any(value for each in world.gather(separates) for value in each)
    if reason is None:
        assert opened is not None
        return opened
    model = world.together(lambda: make_model(config, vocab_size, compute=compute))
    note = f"{config.init_from_model}: cannot be loaded in shards ({reason}), so every rank loads the whole model first"
    return OpenedModel(model, note=note)


def _agreed(world: World, work: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result of `work`, or the reason why it failed. If `work` fails on one rank, all ranks return the
    reason.
    """

    def tried() -> tuple[T | None, str | None]:
        try:
            return work(), None
        except (ChatmillError, OSError, MemoryError):
            raise
        except Exception as error:
            # Catch any error from transformers or peft, because loading the whole model will report the error.
            return None, one_line(str(error) or type(error).__name__, 200)

    result, reason = world.together(tried)
    reasons = [each for each in world.gather(reason) if each is not None]
    return (None, reasons[0]) if reasons else (result, None)


def _open(config: TrainConfig, vocab_size: int, compute: torch.dtype | None, world: World) -> OpenedModel:
    torch.manual_seed(config.seed)
    size = OPTIMIZER_BYTES[config.optimizer]
    # With a GPU, host memory is needed only for the weights, while they are being read.
    bytes_each = size.total if world.device.type == "cpu" else size.weight
    if config.init_from_model is None:
        sizes = config.sizes(vocab_size)
        if bytes_each * sizes.num_parameters / world.size > available_memory():
            raise MemoryError
        with torch.device("meta"):
            gpt = GPT(sizes, compute=compute).to(getattr(torch, weights_of(config)))
        parameters = dict(gpt.named_parameters())
        return OpenedModel(gpt, lambda: draw_weights(gpt, parameters, config.seed))
    folder = model_folder(config.init_from_model)
    weights = weights_of(config) if config.lora is None else "stored"
    opened = open_folder(folder, compute=compute, weights=weights, world=world)
    if (adapters := config.lora_sizes()) is not None:
        opened = replace(opened, model=_adapted(opened.model, adapters, folder))
    if world.device.type == "cpu":
        trained = [parameter for parameter in opened.model.parameters() if parameter.requires_grad]
        needed = sum((2 * each.element_size() + size.state) * each.numel() for each in trained) / world.size
        check_memory(needed, folder, what="one shard of the model with gradients and optimizer state")
    return opened


def _adapted(model: CausalModel, adapters: LoraSizes, folder: Path) -> CausalModel:
    if isinstance(model, GPT):
        # `GPT` does not support adapters, so `with_lora` raises an error.
        return model.with_lora(adapters, folder)
    from chatmill.train.hf_shards import adapters_on_cpu, check_adapters

    with adapters_on_cpu():
        adapted = model.with_lora(adapters, folder)
    check_adapters(adapted)
    return adapted


def open_folder(folder: Path, *, compute: torch.dtype | None, weights: WeightPrecision, world: World) -> OpenedModel:
    """Open a model folder with parameters on the meta device; raise `NotShardableError` if this is not possible."""
    check_model(folder)
    check_folder(folder)
    if is_adapter(folder):
        from chatmill.train.hf_shards import open_adapters

        return open_adapters(folder, compute=compute, share=world.size)
    family = MODEL_FAMILIES.get(model_type(folder), HUGGING_FACE)
    if family == HUGGING_FACE:
        from chatmill.train.hf_shards import open_hf

        return open_hf(folder, compute=compute, weights=weights, share=world.size)
    if family != MODEL_FAMILIES["chatmill-gpt"]:
        raise NotShardableError(f"{model_type(folder)} is a custom model family")
    model, files = open_on_meta(folder, compute=compute, weights=weights, share=world.size)
    parameters = dict(model.named_parameters())
    return OpenedModel(model, lambda: named_values(files, parameters))


def named_values(files: ModelFiles, parameters: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Rows]]:
    """Yield each parameter with the tensor of the same name in the model files."""
    with open_weights(files) as weights:
        for name, parameter in parameters.items():
            yield parameter, weights(name)
