"""Load model folders with transformers and peft.

File headers are checked before a model is loaded. Every error message is one line.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.train.memory import check_memory
from chatmill.train.model import WeightPrecision
from chatmill.train.model_files import ADAPTER_CONFIG, CONFIG, ModelFiles, check_sizes, read_model_files
from chatmill.train.quiet import quiet_logs
from chatmill.train.weight_dtypes import WeightDtypes, opened_as, opened_dtype, weight_dtypes

NF4_BYTES = 0.516
"""Bytes per NF4 weight: 4 bits, an 8-bit scale per 64 weights, and a 32-bit scale per 256 of the 8-bit scales."""
VARIANTS = (
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "megatron_config",
)
"""Keys of adapter_config.json that select unsupported variants of LoRA."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights for which peft does not change the weights of the base model."""


def load_lm(folder: Path, *, weights: WeightPrecision = "float32") -> Any:
    """Load a causal language model with transformers, without running code or reading pickles from the folder.

    First, only the file headers are read, to check the file types, the tensor sizes and the required memory. A missing
    weight is an error, because transformers would initialize it randomly. With nf4 weights, the model is quantized on a
    GPU if one is available, and stays on that GPU.
    """
    files = read_model_files(folder)
    check_sizes(files)
    if weights == "nf4":
        _check_can_quantize(files)
    auto_config, auto_model = auto_classes(folder)
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with quiet(), faults_of(folder, "transformers cannot load this folder as a causal language model"):
        config = auto_config.from_pretrained(folder, **local)
        dtypes = check_shapes(files, config, weights)
        if weights == "nf4":
            from chatmill.train.quantized import nf4_config, use_nf4

            local["quantization_config"] = nf4_config()
        with opened_as(dtypes):
            lm, loaded = auto_model.from_pretrained(
                folder, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **local
            )
    if missing := sorted(map(str, loaded["missing_keys"])):
        raise missing_fault(folder, missing)
    stored = {opened_dtype(tensor.dtype, "stored") for tensor in files.tensors.values()}
    for tensor in [*lm.parameters(), *lm.buffers()]:
        # Copy weights that were not cast: they are views of the memory-mapped file and would change with the file.
        if tensor.dtype in stored and tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()
    if weights == "nf4" and not use_nf4(lm):
        raise DataError(f"{folder}: has no linear layers to quantize other than the output head; set quantize to none")
    return lm


def auto_classes(folder: Path) -> tuple[Any, Any]:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise UsageError(f"{folder}: is a Hugging Face model; pip install 'chatmill[hf]' to train it") from None
    return AutoConfig, AutoModelForCausalLM


def missing_fault(folder: Path, missing: Sequence[str]) -> DataError:
    return DataError(
        f"{folder}: the weight files have no {one_line(missing[0])}, which {CONFIG} requires (missing weights: "
        f"{len(missing)})"
    )


def _check_can_quantize(files: ModelFiles) -> None:
    if files.config.get("quantization_config"):
        raise DataError(
            f"{files.folder / CONFIG}: has a quantization_config, so the model is already quantized; "
            "nf4 requires a model that is not quantized"
        )
    if find_spec("bitsandbytes") is None:
        raise UsageError(f"{files.folder}: nf4 weights require bitsandbytes; pip install 'chatmill[qlora]'")


def check_shapes(files: ModelFiles, config: Any, weights: WeightPrecision, *, share: int = 1) -> WeightDtypes:
    """Return the dtype in which to load each weight of a model. Raise `DataError` if the weights do not match the model
    config or do not fit into memory.

    For nf4 weights, return the dtypes before quantization. The memory check assumes that the weights are divided
    equally among `share` ranks.
    """
    from transformers import AutoModelForCausalLM

    kept: WeightPrecision = "stored" if weights == "nf4" else weights
    packed: set[str] = set()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except (NotImplementedError, RuntimeError) as error:
        if "meta tensor" not in str(error):
            raise
        # A few constructors compute with tensor values, which the meta device does not support, so use the tensor sizes
        # in the files instead.
        dtypes = weight_dtypes(files, {}, kept)
        sizes = {name: tensor.size for name, tensor in files.tensors.items()}
    else:
        state = model.state_dict()
        dtypes = weight_dtypes(files, {name: tensor.dtype for name, tensor in state.items()}, kept)
        if not hasattr(config, "quantization_config"):
            for name, tensor in state.items():
                if name in files.tensors and files.tensors[name].shape != tuple(tensor.shape):
                    raise DataError(
                        f"{files.folder}: {one_line(name)} has the shape {files.tensors[name].shape}, but {CONFIG} "
                        f"implies {tuple(tensor.shape)}"
                    )
        sizes = {name: each.numel() for name, each in [*model.named_parameters(), *model.named_buffers()]}
        if weights == "nf4":
            linear = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
            packed = {
                f"{name}.weight" for name in linear if model.get_submodule(name) is not model.get_output_embeddings()
            }
    bytes_each = {name: NF4_BYTES if name in packed else dtypes[name].itemsize for name in sizes}
    check_memory(sum(size * bytes_each[name] for name, size in sizes.items()) / share, files.folder)
    return dtypes


def adapter_rank(folder: Path, config: Mapping[str, Any]) -> int:
    """Return the largest LoRA rank of an adapter config; raise `DataError` if its kind of adapter is not supported."""
    place = folder / ADAPTER_CONFIG
    if (kind := config.get("peft_type")) != "LORA":
        raise DataError(f"{place}: peft_type is {one_line(str(kind))}; expected LORA")
    for key in VARIANTS:
        if config.get(key):
            raise DataError(f"{place}: has {key}; this variant of LoRA is not supported")
    if (start := config.get("init_lora_weights", True)) not in PLAIN_STARTS:
        raise DataError(
            f"{place}: init_lora_weights is {one_line(str(start))}, which changes the weights of the base model; "
            "convert the adapters to plain LoRA with path_initial_model_for_weight_conversion in peft's save_pretrained"
        )
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [None])]
    if any(type(rank) is not int or rank < 1 for rank in ranks):
        raise DataError(f"{place}: r is {one_line(str(ranks))}; expected an integer of at least 1")
    return max(ranks)


@contextmanager
def faults_of(folder: Path, what: str) -> Iterator[None]:
    """Turn any exception that a library raises while it reads a folder into a one-line `DataError`."""
    try:
        yield
    except (ChatmillError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # If the first line of an error is a heading that ends with a colon, as in torch, include the second line.
        reason = one_line(" ".join(each.strip() for each in lines[: 1 + lines[0].endswith(":")]), 300)
        raise DataError(f"{folder}: {what} ({reason})") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars and warnings from transformers; chatmill reports serious problems as errors."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with quiet_logs(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
