"""Load a model from a folder, whatever its family."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from chatmill.train.checkpoint import check_model
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.model import CausalModel
from chatmill.train.model_files import check_folder, check_headers, is_adapter, model_type

HUGGING_FACE = "chatmill.train.hf:HFModel"
"""The family of every `model_type` that has none of its own."""
ADAPTERS = "chatmill.train.hf:LoraModel"

Load = Callable[..., CausalModel]
MODEL_FAMILIES: dict[str, str | Load] = {"chatmill-gpt": "chatmill.train.gpt:GPT"}
"""Model families by the `model_type` of a folder's config.json: a class with `load`, named as MODULE:CLASS so that it
is imported when it is used, or a function `load(folder, *, compute)`. To add a family, add it here."""


def open_model(folder: Path, *, compute: torch.dtype | None = None) -> CausalModel:
    """The model in a folder, in float32 on the CPU; its hidden states have `compute` precision.

    A folder of adapters gives the model they were trained on with the adapters applied. The model of a checkpoint is
    opened only if its files have the hashes they were written with.

    >>> import tempfile
    >>> from chatmill.train import GPT, GPTSizes
    >>> folder = Path(tempfile.mkdtemp())
    >>> GPT(GPTSizes(vocab_size=8, n_layer=1, n_embd=16, n_head=2)).save(folder)
    >>> type(open_model(folder)).__name__
    'GPT'
    """
    check_model(folder)
    check_folder(folder)
    family = ADAPTERS if is_adapter(folder) else MODEL_FAMILIES.get(model_type(folder), HUGGING_FACE)
    if isinstance(family, str):
        module, _, name = family.partition(":")
        family = getattr(import_module(module), name).load
    return family(folder, compute=compute)


def open_ready(path: str | Path, device: str = "auto") -> CausalModel:
    """The model of a folder, a checkpoint or a run, on its device in eval mode."""
    chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    return open_model(model_folder(path), compute=compute_dtype("auto", chosen)).to(chosen).eval()


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype | None:
    """The precision of hidden states for the `dtype` of a config on a device; None is float32."""
    half = device.type == "cuda" if dtype == "auto" else dtype == "bfloat16"
    return torch.bfloat16 if half else None


def check_is_model(folder: Path) -> None:
    """Raise `DataError` if a folder holds neither a model nor adapters, by its headers; custom families read theirs."""
    check_folder(folder)
    if is_adapter(folder) or not callable(MODEL_FAMILIES.get(model_type(folder))):
        check_headers(folder)
