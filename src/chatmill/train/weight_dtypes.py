"""The dtypes in which a model's weights are loaded and saved."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chatmill.errors import DataError
from chatmill.train.model import CausalModel, WeightPrecision
from chatmill.train.model_files import ModelFiles, read_config

HALF = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Half-precision dtypes by their safetensors names; every other floating-point dtype is loaded as float32."""


def opened_dtype(stored: str, weights: WeightPrecision) -> torch.dtype:
    """Return the dtype in which a weight is loaded, given its dtype in the safetensors file."""
    if weights == "bfloat16":
        return torch.bfloat16
    return HALF.get(stored, torch.float32) if weights == "stored" else torch.float32


@dataclass(frozen=True)
class WeightDtypes:
    """The dtype of each weight by name: the dtype of the first matching pattern, or `default`."""

    default: torch.dtype = torch.float32
    exceptions: tuple[tuple[str, torch.dtype], ...] = ()
    """Pairs of a regular expression for weight names and the dtype of the matching weights."""

    def __getitem__(self, name: str) -> torch.dtype:
        return next((dtype for pattern, dtype in self.exceptions if re.search(pattern, name)), self.default)

    @property
    def are_float32(self) -> bool:
        return self.default == torch.float32 and not self.exceptions

    def plan(self) -> dict[str, torch.dtype]:
        """Return the dtypes as a dtype plan for transformers, which maps patterns for weight names to dtypes."""
        return {**dict(self.exceptions), "*": self.default}


def weight_dtypes(files: ModelFiles, model: Mapping[str, torch.dtype], weights: WeightPrecision) -> WeightDtypes:
    """Return the dtypes in which the weights in a model folder are loaded. `model` maps the names of the model's
    parameters to dtypes.

    Usually, most weights in a folder share one dtype, and a few have a wider dtype. If a weight with a wider dtype has
    a different name in the model, all weights are loaded as float32, which loses no precision.
    """
    if weights == "float32" or files.config.get("quantization_config"):
        return WeightDtypes()
    # Keep the dtype of integer tensors.
    exceptions = {_pattern(name): dtype for name, dtype in model.items() if not dtype.is_floating_point}
    if weights == "bfloat16":
        return WeightDtypes(torch.bfloat16, tuple(exceptions.items()))
    sizes: Counter[torch.dtype] = Counter()
    by_name = {}
    for name, tensor in files.tensors.items():
        if tensor.dtype.startswith(("F", "BF")):
            by_name[name] = opened_dtype(tensor.dtype, weights)
            sizes[by_name[name]] += tensor.size
    most = max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
    others = {name: dtype for name, dtype in by_name.items() if dtype != most}
    if not others.keys() <= model.keys() or (most == torch.float32 and not others):
        return WeightDtypes()
    for name, dtype in others.items():
        # Use one pattern for all layers: if a weight has a wider dtype in one layer, it is loaded with that dtype in
        # all layers.
        pattern = _pattern(name)
        exceptions[pattern] = torch.promote_types(exceptions.get(pattern, dtype), dtype)
    return WeightDtypes(most, tuple(exceptions.items()))


def _pattern(name: str) -> str:
    """Return a regular expression that matches the name of a weight in every layer, whatever the layer index."""
    return "^" + re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name)) + "$"


@contextmanager
def opened_as(dtypes: WeightDtypes) -> Iterator[None]:
    """Make transformers load weights in the given dtypes, and keep all other tensors of a model in float32.

    With the argument `dtype=`, transformers would also round values that it computes from the config, such as the
    embedding scale.
    """
    from transformers import PreTrainedModel

    of_library = getattr(PreTrainedModel, "_get_dtype_plan", None)
    if dtypes.are_float32 or of_library is None:
        yield
        return

    def plan(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
        # Put transformers' own plan first, because it lists weights that the architecture requires in float32.
        return {**of_library(model, dtypes.default), **dtypes.plan()}

    PreTrainedModel._get_dtype_plan = plan
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = of_library


def saved_dtype(model: CausalModel, name: str, tensor: Tensor, save_dtype: str = "auto") -> torch.dtype:
    """Return the dtype in which a weight is saved. "auto" selects the dtype of the weight in the loaded files."""
    if not tensor.is_floating_point():
        return tensor.dtype
    return (model.stored_dtype(name) or tensor.dtype) if save_dtype == "auto" else getattr(torch, save_dtype)


def saved_state(model: CausalModel) -> dict[str, Tensor]:
    return cast_state(model, lambda name, tensor: saved_dtype(model, name, tensor))


def cast_state(module: nn.Module, dtype_of: Callable[[str, Tensor], torch.dtype]) -> dict[str, Tensor]:
    """Return the weights of a module, cast to the dtypes that `dtype_of` returns. Tied weights remain a single
    tensor.
    """
    state = module.state_dict(keep_vars=True)
    cast: dict[int, Tensor] = {}
    for name, tensor in state.items():
        if id(tensor) not in cast:
            cast[id(tensor)] = tensor.detach().to(dtype_of(name, tensor))
    weights = {name: cast[id(tensor)] for name, tensor in state.items()}
    check_float16(weights)
    return weights


def check_float16(weights: Mapping[str, Tensor]) -> None:
    """Raise `DataError` if a weight overflowed when it was cast to float16."""
    for name, tensor in weights.items():
        if tensor.dtype == torch.float16 and not bool(tensor.isfinite().all()):
            raise DataError(f"{name}: has values outside the range of float16; set save_dtype to bfloat16 or float32")


def write_dtype(path: Path, weights: Iterable[Tensor]) -> None:
    """Set `dtype` in the config of a saved model to the dtype of most of its weights."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in weights:
        if tensor.is_floating_point():
            sizes[tensor.dtype] += tensor.numel()
    config = read_config(path)
    dtype = str(max(sizes, key=lambda each: sizes[each])).removeprefix("torch.")
    if config.get("dtype") != dtype:
        path.write_text(json.dumps({**config, "dtype": dtype}, indent=2, sort_keys=True) + "\n")
