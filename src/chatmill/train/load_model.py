"""Load a model of any family from a folder."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Literal

import torch

from chatmill.errors import UsageError
from chatmill.train.checkpoint import check_model
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.model import CausalModel, WeightPrecision
from chatmill.train.model_files import check_folder, check_headers, is_adapter, model_type

HUGGING_FACE = "chatmill.train.hf:HFModel"
"""The model family for every `model_type` that is not in MODEL_FAMILIES."""
ADAPTERS = "chatmill.train.lora:LoraModel"

Load = Callable[..., CausalModel]
BaseWeights = Literal["trained", "original"]
"""Base model weights to use with adapters: the (possibly quantized) weights used in training, or those stored on disk.
"""
MODEL_FAMILIES: dict[str, str | Load] = {"chatmill-gpt": "chatmill.train.gpt:GPT"}
"""Model families by the `model_type` in config.json. Register new model families here.

A family is a function `load(folder, *, compute, weights)` or the name of a class with a `load` method. The name has the
form MODULE:CLASS, and the class is imported on first use.
"""


def open_model(
    folder: Path,
    *,
    compute: torch.dtype | None = None,
    weights: WeightPrecision = "float32",
    base_model: Path | None = None,
) -> CausalModel:
    """Load the model in a folder on the CPU; hidden states have `compute` precision (float32 if None).

    `weights` is the precision of the weights in memory; "stored" keeps the dtype of the files.

    For an adapter folder, return the base model with the adapters applied. If the base model has moved, pass its new
    folder as `base_model`. The model in a checkpoint is opened only if its files match the recorded hashes.

    >>> import tempfile
    >>> from chatmill.train import GPT, GPTSizes
    >>> folder = Path(tempfile.mkdtemp())
    >>> GPT(GPTSizes(vocab_size=8, n_layer=1, n_embd=16, n_head=2)).save(folder)
    >>> type(open_model(folder)).__name__
    'GPT'
    """
    check_model(folder)
    check_folder(folder)
    if base_model is not None and not is_adapter(folder):
        raise UsageError(f"{folder}: is not an adapter folder, but --base-model is given; remove the option")
    family = ADAPTERS if is_adapter(folder) else MODEL_FAMILIES.get(model_type(folder), HUGGING_FACE)
    if isinstance(family, str):
        module, _, name = family.partition(":")
        family = getattr(import_module(module), name).load
    under = {} if base_model is None else {"base_model": base_model}
    return family(folder, compute=compute, weights=weights, **under)


def open_ready(
    path: str | Path, device: str = "auto", *, base: BaseWeights = "trained", base_model: str | None = None
) -> CausalModel:
    """Load the model in a model folder, checkpoint or run, in eval mode and in the precision of its files.

    `base` and `base_model` apply only to adapters. If the base model was quantized in training, `base` selects its
    quantized or its original weights for inference. If the base model has moved, `base_model` is its new folder.
    """
    folder = model_folder(path)
    if base != "trained" and not is_adapter(folder):
        raise UsageError(f"{folder}: is not an adapter folder, but --base is {base}; remove the option")
    chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    # If `folder` contains adapters, "float32" means that the base model keeps the precision that it had in training.
    weights: WeightPrecision = "float32" if is_adapter(folder) and base == "trained" else "stored"
    under = None if base_model is None else model_folder(base_model)
    model = open_model(folder, compute=compute_dtype("auto", chosen), weights=weights, base_model=under)
    return model.to(chosen).eval()


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype | None:
    """Return the precision of hidden states on a device for the config key `dtype`; None means float32."""
    half = device.type == "cuda" if dtype == "auto" else dtype == "bfloat16"
    return torch.bfloat16 if half else None


def check_is_model(folder: Path) -> None:
    """Raise `DataError` if a folder contains neither a model nor adapters.

    Only configs and file headers are checked. Custom model families are not checked.
    """
    check_folder(folder)
    if is_adapter(folder) or not callable(MODEL_FAMILIES.get(model_type(folder))):
        check_headers(folder)
