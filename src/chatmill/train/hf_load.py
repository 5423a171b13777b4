"""Open model folders with transformers and peft: checked by their headers first, and every fault one line."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.train.memory import check_memory
from chatmill.train.model_files import ADAPTER_CONFIG, CONFIG, ModelFiles, check_sizes, read_model_files


def load_lm(folder: Path) -> Any:
    """The causal model of transformers in a folder, in float32; code and pickles in the folder are not read.

    Its files, sizes and memory are checked by headers first. A weight that is missing is an error: transformers would
    begin with a random one.
    """
    files = read_model_files(folder)
    check_sizes(files)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise UsageError(f"{folder}: is a Hugging Face model; pip install 'chatmill[hf]' to train it") from None
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with quiet(), faults_of(folder, "transformers cannot open it as a causal model"):
        config = AutoConfig.from_pretrained(folder, **local)
        check_shapes(files, config)
        lm, loaded = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **local
        )
    if missing := sorted(map(str, loaded["missing_keys"])):
        raise DataError(
            f"{folder}: its weights have no {one_line(missing[0])}, which the model of {CONFIG} has "
            f"({len(missing)} are missing)"
        )
    return lm


def check_shapes(files: ModelFiles, config: Any) -> None:
    """Raise `DataError` if a model of this config has other weights, or takes more memory than there is."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (NotImplementedError, RuntimeError) as error:
        if "meta tensor" not in str(error):
            raise
        # A few architectures compute while they are made; their size is that of their weights.
        check_memory(4 * sum(math.prod(tensor.shape) for tensor in files.tensors.values()), files.folder)
        return
    if not hasattr(config, "quantization_config"):
        for name, tensor in model.state_dict().items():
            if name in files.tensors and files.tensors[name].shape != tuple(tensor.shape):
                raise DataError(
                    f"{files.folder}: {one_line(name)} has the shape {files.tensors[name].shape}, "
                    f"{CONFIG} gives {tuple(tensor.shape)}"
                )
    check_memory(4 * sum(each.numel() for each in [*model.parameters(), *model.buffers()]), files.folder)


def adapter_rank(folder: Path, config: Mapping[str, Any]) -> int:
    """The largest rank of adapters; `DataError` unless they are plain LoRA adapters."""
    if (kind := config.get("peft_type")) != "LORA" or config.get("layer_replication"):
        raise DataError(f"{folder / ADAPTER_CONFIG}: peft_type is {one_line(str(kind))}; only plain LORA is read")
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [None])]
    if any(type(rank) is not int or rank < 1 for rank in ranks):
        raise DataError(f"{folder / ADAPTER_CONFIG}: r is {one_line(str(ranks))}; expected a whole number from 1 on")
    return max(ranks)


@contextmanager
def faults_of(folder: Path, what: str) -> Iterator[None]:
    """Whatever a library raises for files of others, in one line."""
    try:
        yield
    except (ChatmillError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = str(error).strip()
        reason = one_line(text.splitlines()[0], 300) if text else type(error).__name__
        raise DataError(f"{folder}: {what} ({reason})") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and warnings of transformers; what matters of them is an error here."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
