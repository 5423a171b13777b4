"""A model from a folder: chatmill's own, or any Hugging Face causal model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from chatmill.errors import DataError
from chatmill.train.checkpoint import check_model
from chatmill.train.gpt import CONFIG, GPT, KIND
from chatmill.train.model import CausalModel


def open_model(folder: Path, *, compute: torch.dtype | None = None) -> CausalModel:
    """The model that a folder holds, in float32 on the CPU; its hidden states have `compute` precision.

    A folder of adapters gives the model under them with the adapters on it.
    The model of a checkpoint is opened only if it is as it was written.
    """
    check_model(folder)
    if (folder / "adapter_config.json").exists():
        from chatmill.train.lora import LoraModel

        return LoraModel.load(folder, compute=compute)
    if model_type(folder) == KIND:
        return GPT.load(folder, compute=compute)
    from chatmill.train.hf import HFModel

    return HFModel.load(folder, compute=compute)


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype | None:
    """What `dtype` of a config means on a device, for hidden states; None is float32."""
    half = device.type == "cuda" if dtype == "auto" else dtype == "bfloat16"
    return torch.bfloat16 if half else None


def model_type(folder: Path) -> str:
    """What `config.json` of a model folder calls the model."""
    path = folder / CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
        return str(config["model_type"])
    except FileNotFoundError:
        raise DataError(f"{folder}: has no {CONFIG}; a model folder has one") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{path}: does not say what model it is ({error!r}); a model folder's does") from None
