"""Check the file types and headers of a model folder before the model is loaded.

Model folders may come from untrusted sources. Only the following files are read:

    config.json                     a JSON object whose sizes are possible for the weights
    model.safetensors               or the files of this folder that model.safetensors.index.json lists
    adapter_model.safetensors       instead, in a folder with adapter_config.json

Pickles (pytorch_model.bin, .pt, …) are not read, because loading a pickle can run arbitrary code. This module does not
import torch, so an invalid model folder is rejected quickly.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.errors import DataError, one_line
from chatmill.plain_file import KINDS, check_plain, open_plain, read_plain

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
HEADER_LIMIT = 1 << 25
"""Maximum size of a safetensors header in bytes."""
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
LAYER_COUNTS = {
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "decoder_layers",
    "encoder_layers",
    "num_blocks",
    "n_blocks",
    "depth",
}
"""Config keys for the number of layers; each layer has at least one tensor."""
MOST_LAYERS = 2048
"""Maximum number of layers. Creating a model with this many layers takes a few seconds."""
SIZES = {"vocab_size", "hidden_size", "n_embd", "d_model", "num_experts", "num_local_experts", "n_routed_experts"}
"""Config keys whose value must not exceed the largest dimension of any tensor in the model."""
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
"""Config keys whose value transformers treats as a code repository if it contains a slash."""


class TensorInfo(NamedTuple):
    """The dtype and shape of one tensor in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelFiles:
    """The config of a model folder, and the dtype and shape of each tensor in its weight files."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def check_folder(folder: Path) -> None:
    """Raise `DataError` if a model folder contains anything other than folders and regular files.

    Symbolic links must point to files inside the folder; in the Hugging Face cache, links from snapshots/ to blobs/ are
    also allowed.
    """
    try:
        root = folder.resolve()
        if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
            root = root.parent.parent
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path = folder / entry.name
            if entry.is_symlink() and not path.resolve().is_relative_to(root):
                raise DataError(f"{path}: is a link to a file outside the model folder; copy that file into the folder")
            mode = stat.S_IFMT(path.stat().st_mode) if path.exists() else 0
            if mode not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise DataError(f"{path}: is {KINDS.get(mode, 'not a file')}; expected a regular file")
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read ({error.strerror})") from None
    except RuntimeError as error:
        # Before Python 3.13, `resolve` raises `RuntimeError` for a cycle of links.
        raise DataError(f"{folder}: cannot be read ({one_line(str(error))})") from None


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file in a model folder."""
    try:
        config = json.loads(read_plain(path))
    except FileNotFoundError:
        raise DataError(f"{path.parent}: has no {path.name}, which every model folder must have") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({one_line(str(error))})") from None
    if not isinstance(config, dict):
        raise DataError(f"{path}: is not a JSON object; expected the config of a model")
    return config


def read_model_files(folder: Path) -> ModelFiles:
    check_folder(folder)
    return ModelFiles(folder, read_config(folder / CONFIG), read_headers(folder, WEIGHTS, INDEX))


def read_headers(folder: Path, weights: str, index: str | None = None) -> dict[str, TensorInfo]:
    """Return the dtype and shape of each tensor in the file `weights` or, if it does not exist, in the files that
    `index` lists.
    """
    if os.path.lexists(folder / weights):
        return read_header(folder / weights)
    if index is not None and os.path.lexists(folder / index):
        return _read_index(folder, index)
    for path in sorted(folder.iterdir()):
        if path.suffix in PICKLES:
            raise DataError(
                f"{path}: pickle weights are not read, because loading them can run arbitrary code; convert the "
                f"weights to safetensors with transformers' save_pretrained"
            )
    raise DataError(f"{folder}: has no {weights}; expected weights in safetensors format")


def _read_index(folder: Path, name: str) -> dict[str, TensorInfo]:
    path = folder / name
    listed = read_config(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise DataError(f"{path}: weight_map is {one_line(json.dumps(listed))}; expected a file for each tensor")
    headers: dict[str, Mapping[str, TensorInfo]] = {}
    for tensor, file in listed.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or file != Path(file).name or "\0" in file:
            raise DataError(
                f"{path}: {one_line(tensor)} is in {one_line(json.dumps(file))}; expected a safetensors file in this "
                f"folder"
            )
        if file not in headers:
            headers[file] = read_header(folder / file)
        if tensor not in headers[file]:
            raise DataError(f"{folder / file}: has no {one_line(tensor)}, which {name} lists")
    return {tensor: headers[file][tensor] for tensor, file in listed.items()}


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file; raise `DataError` if there are gaps or overlaps between its tensors."""
    try:
        size = check_plain(path)
        with open_plain(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8 or length > HEADER_LIMIT:
                raise DataError(f"{path}: is not a safetensors file; its header cannot have {length:,} bytes")
            header = json.loads(file.read(length))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: is not a safetensors file; its header is not JSON ({one_line(str(error))})") from None
    if not isinstance(header, dict):
        raise DataError(f"{path}: is not a safetensors file; its header is not an object")
    header.pop("__metadata__", None)
    tensors: dict[str, TensorInfo] = {}
    places = []
    for name, entry in header.items():
        try:
            dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
            bits = DTYPE_BITS[dtype]
            if any(type(number) is not int or number < 0 for number in (start, stop, *shape)):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{path}: the entry for {one_line(name)} in the file header cannot be read") from None
        if 8 * (stop - start) != bits * math.prod(shape):
            raise DataError(
                f"{path}: {one_line(name)} has {stop - start:,} bytes, which does not match the shape "
                f"{one_line(str(shape))}; the file header is wrong"
            )
        tensors[name] = TensorInfo(dtype, tuple(shape))
        places.append((start, stop, name))
    at = 0
    for start, stop, name in sorted(places):
        if start != at:
            raise DataError(f"{path}: {one_line(name)} begins at byte {start:,}, expected {at:,}; the header is wrong")
        at = stop
    if at != size - 8 - length:
        raise DataError(
            f"{path}: has {size - 8 - length:,} bytes of tensors, but its header lists {at:,}; the file is truncated"
        )
    return tensors


def match_modes(folder: Path) -> None:
    """Set the permissions of a saved model's weight files to those of its config file.

    The safetensors library creates files that only their owner can read.
    """
    mode = stat.S_IMODE(next(folder.glob("*config.json")).stat().st_mode)
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)


def check_headers(folder: Path) -> None:
    """Raise `DataError` if a folder contains neither a valid model nor LoRA adapters. Only file types, configs and
    tensor headers are checked.
    """
    check_folder(folder)
    if is_adapter(folder):
        read_config(folder / ADAPTER_CONFIG)
        read_headers(folder, ADAPTER_WEIGHTS)
        return
    model_type(folder)
    check_sizes(read_model_files(folder))


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).exists()


def model_type(folder: Path) -> str:
    name = read_config(folder / CONFIG).get("model_type")
    if not isinstance(name, str):
        raise DataError(
            f"{folder / CONFIG}: model_type is {one_line(str(name))}; expected the name of a model architecture"
        )
    return name


def check_sizes(files: ModelFiles) -> None:
    """Raise `DataError` if the layer counts and sizes in a model's config are too large for its weights."""
    largest = max((number for tensor in files.tensors.values() for number in tensor.shape), default=0)
    for key, value in _numbers(files.config):
        name = key.rpartition(".")[2]
        most = min(len(files.tensors), MOST_LAYERS) if name in LAYER_COUNTS else largest
        if type(value) is not int or not 0 <= value <= most:
            raise DataError(
                f"{files.folder / CONFIG}: {one_line(key)} is {one_line(json.dumps(value))}; expected 0 to {most:,} "
                f"(the weights have {len(files.tensors):,} tensors, none with a dimension above {largest:,})"
            )
    for key, value in _named(files.config, KERNELS):
        if isinstance(value, str) and "/" in value:
            raise DataError(
                f"{files.folder / CONFIG}: {one_line(key)} is {one_line(value)}, a code repository; remove this key, "
                f"because chatmill does not run code from models"
            )


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the layer counts and sizes in a config and its nested configs. Null values, for which transformers uses its
    defaults, are skipped.
    """
    return ((key, value) for key, value in _named(config, LAYER_COUNTS | SIZES) if value is not None)


def _named(config: Mapping[str, Any], names: Any) -> Iterator[tuple[str, Any]]:
    stack: list[tuple[str, Any]] = [("", config)]
    while stack:
        where, value = stack.pop()
        for key, inner in value.items():
            if key in names:
                yield f"{where}{key}", inner
            if isinstance(inner, dict):
                stack.append((f"{where}{key}.", inner))
