"""Build the model that a config describes on the meta device, from sizes and file headers, without reading weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chatmill.errors import DataError, UsageError, one_line
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.config import TrainConfig
from chatmill.train.gpt import GPT, read_sizes
from chatmill.train.hf_load import NF4_BYTES, faults_of, quiet
from chatmill.train.load_model import HUGGING_FACE, MODEL_FAMILIES
from chatmill.train.model import CausalModel, WeightPrecision
from chatmill.train.model_files import CONFIG, ModelFiles, check_sizes, is_adapter, model_type, read_model_files
from chatmill.train.optimizers import weights_of
from chatmill.train.weight_dtypes import opened_dtype, weight_dtypes

META = torch.device("meta")
LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class WeightShape:
    """Shape, dtype size and layer of one weight or buffer."""

    name: str
    shape: tuple[int, ...]
    bytes_each: float
    """Bytes per value in memory."""
    trained: bool
    layer: int | None
    """The layer that the weight belongs to, if any."""

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> float:
        return self.size * self.bytes_each

    def rows(self, ranks: int) -> int:
        """Return the largest number of rows on any rank if the weight is sharded by rows."""
        return -(-self.shape[0] // ranks) if self.shape else 1

    def share(self, ranks: int) -> float:
        """Return the largest fraction of the weight on any rank."""
        return self.rows(ranks) / self.shape[0] if self.shape and self.shape[0] else 1.0


@dataclass(frozen=True)
class ModelShape:
    """The weight shapes of a model, and the model on the meta device, without weight values."""

    weights: tuple[WeightShape, ...]
    model: CausalModel | None
    """The model on the meta device; None if the architecture cannot be built there."""


def shape_of_model(config: TrainConfig, vocab_size: int | None, *, compute: torch.dtype | None) -> ModelShape:
    """Build the model that a config describes, without reading weights; raise `UsageError` if the vocabulary size is
    unknown.
    """
    if config.init_from_model is None:
        size = config.vocab_size or vocab_size
        if size is None:
            raise UsageError("vocab_size is missing; set dataset_dir or vocab_size")
        return _of(_new_gpt(config, size, compute))
    folder = model_folder(config.init_from_model)
    if is_adapter(folder):
        return _adapter_shape(folder, compute)
    family = MODEL_FAMILIES.get(model_type(folder), HUGGING_FACE)
    adapters = config.lora_sizes()
    weights: WeightPrecision = (
        weights_of(config) if adapters is None else "nf4" if config.quantize == "nf4" else "stored"
    )
    files = read_model_files(folder)
    if family == HUGGING_FACE:
        return _hugging_face_shape(files, config, weights, compute)
    if not isinstance(family, str):
        raise UsageError(f"{folder}: is a model of a custom family, whose memory cannot be estimated")
    with META:
        model = GPT(read_sizes(folder, files.config), compute=compute)
    dtypes = {name: opened_dtype(tensor.dtype, weights) for name, tensor in files.tensors.items()}
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, torch.float32))
    return _of(model if adapters is None else model.with_lora(adapters, folder))


def _new_gpt(config: TrainConfig, vocab_size: int, compute: torch.dtype | None) -> CausalModel:
    try:
        with META:
            return GPT(config.sizes(vocab_size), compute=compute).to(getattr(torch, weights_of(config)))
    except (OverflowError, RuntimeError) as error:
        raise DataError(f"model: these sizes are not valid ({one_line(str(error))})") from None


def _hugging_face_shape(
    files: ModelFiles, config: TrainConfig, weights: WeightPrecision, compute: torch.dtype | None
) -> ModelShape:
    """Return the weight shapes of a Hugging Face model, from the file headers if the model cannot be built without
    weights.
    """
    adapters = config.lora_sizes()
    lm, packed = _lm_on_meta(files, weights)
    if lm is None:
        rank = 0 if adapters is None else adapters.r
        return ModelShape(tuple(_by_headers(files, weights, rank)), None)
    from chatmill.train.hf import HFModel

    model: CausalModel = HFModel(lm, source=files.folder, compute=compute, separates=True)
    with META:
        model = model if adapters is None else model.with_lora(adapters, files.folder)
    return _of(model, packed)


def _lm_on_meta(files: ModelFiles, weights: WeightPrecision) -> tuple[Any, set[int]]:
    """Build the transformers model on the meta device; return the model, and the Python `id` of each weight that is
    stored in 4 bits. The model is None if it cannot be built.
    """
    check_sizes(files)
    if weights == "nf4" and files.config.get("quantization_config"):
        raise DataError(
            f"{files.folder / CONFIG}: has a quantization_config, so the model is already quantized; nf4 "
            f"requires a model that is not quantized"
        )
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise UsageError(f"{files.folder}: is a Hugging Face model; pip install 'chatmill[hf]' to train it") from None
    with quiet(), faults_of(files.folder, "transformers cannot load this folder as a causal language model"):
        config = AutoConfig.from_pretrained(files.folder, local_files_only=True, trust_remote_code=False)
        try:
            with META:
                lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        except (NotImplementedError, RuntimeError) as error:
            if "meta tensor" not in str(error):
                raise
            return None, set()
    state = {name: tensor.dtype for name, tensor in lm.state_dict().items()}
    dtypes = weight_dtypes(files, state, "stored" if weights == "nf4" else weights)
    for name, tensor in [*lm.named_parameters(), *lm.named_buffers()]:
        if tensor.is_floating_point() and name in state:
            tensor.data = tensor.data.to(dtypes[name])
    head = lm.get_output_embeddings()
    linear = [module for module in lm.modules() if type(module) is nn.Linear and module is not head]
    return lm, {id(module.weight) for module in linear} if weights == "nf4" else set()


def _adapter_shape(folder: Path, compute: torch.dtype | None) -> ModelShape:
    """Return the weight shapes of a base model with existing adapters that are trained further."""
    from chatmill.train.hf import HFModel
    from chatmill.train.lora import LoraModel, base_folder, trained_on

    lm, packed = _lm_on_meta(read_model_files(base_folder(folder)), trained_on(folder))
    if lm is None:
        raise UsageError(f"{folder}: the base model cannot be built without weights, so its memory cannot be estimated")
    base = HFModel(lm, source=folder, compute=compute, separates=True)
    with META, quiet(), faults_of(folder, "these adapters cannot be read"):
        import peft

        adapters = peft.LoraConfig.from_pretrained(str(folder))
        adapters.inference_mode = False
        model = LoraModel(base, peft.get_peft_model(lm, adapters))
    return _of(model, packed)


def _of(model: CausalModel, packed: set[int] | None = None) -> ModelShape:
    layers = layers_of(model)
    place = {
        id(each): number for number, layer in enumerate(layers) for each in (*layer.parameters(), *layer.buffers())
    }
    shapes = tuple(
        WeightShape(
            name,
            tuple(each.shape),
            NF4_BYTES if packed and id(each) in packed else each.element_size(),
            isinstance(each, nn.Parameter) and each.requires_grad,
            place.get(id(each)),
        )
        for name, each in [*model.named_parameters(), *model.named_buffers()]
    )
    return ModelShape(shapes, model)


def layers_of(model: CausalModel) -> Sequence[nn.Module]:
    """Return the layers of a model; the sequence is empty if they cannot be located."""
    from chatmill.train.hf import HFModel

    return model._layers() if isinstance(model, HFModel) else model.blocks()


def _by_headers(files: ModelFiles, weights: WeightPrecision, rank: int) -> Iterator[WeightShape]:
    """Yield the weights in the file headers and, if `rank` is not 0, a LoRA adapter for each matrix in a layer."""
    for name, tensor in files.tensors.items():
        number = LAYER.search(name)
        layer = None if number is None else int(number[1])
        dtype = opened_dtype(tensor.dtype, "stored" if weights == "nf4" else weights)
        is_matrix = layer is not None and len(tensor.shape) == 2
        bytes_each = NF4_BYTES if weights == "nf4" and is_matrix else dtype.itemsize
        yield WeightShape(name, tensor.shape, bytes_each, not rank, layer)
        if rank and is_matrix:
            yield WeightShape(f"{name} (adapter)", (sum(tensor.shape), rank), 4, True, layer)
