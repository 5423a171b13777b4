"""Merge LoRA adapters into their base model. The result is a plain Hugging Face folder.

Each adapted weight is merged in float32 and rounded once, to the dtype in which it is saved. The model is kept in
memory in its stored precision, with only one weight at a time in float32.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.plain_file import local_path
from chatmill.store import files
from chatmill.store.hashed import hashed_text, parse_hashed, read_hashed
from chatmill.store.layout import TOKENIZER_STATE
from chatmill.store.publish import FolderKind, building
from chatmill.train.checkpoint import check_model
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.half_weights import is_half
from chatmill.train.hf import copy_tokenizer, save_lm
from chatmill.train.hf_load import faults_of, load_lm, quiet
from chatmill.train.load_model import BaseWeights
from chatmill.train.logit_difference import LogitDifference, probe_logits
from chatmill.train.lora import base_folder, check_base, read_adapters, trained_on
from chatmill.train.model_files import CONFIG, WEIGHTS, check_folder, is_adapter, match_modes, read_model_files
from chatmill.train.preflight import TRAINING, trained_with
from chatmill.train.saved_template import write_templates
from chatmill.train.sharded_tensors import file_info
from chatmill.train.weight_dtypes import cast_state, weight_dtypes

MANIFEST = "chatmill_merge.json"
SCHEMA, SCHEMA_VERSION = "chatmill-merge", 1


@dataclass(frozen=True)
class Merged:
    """Summary of a merge of adapters into their base model."""

    adapters: str
    base: str
    layers: int
    """Number of layers with an adapter."""
    dtype: str
    """The dtype recorded in the merged model's config, which is the dtype of most weights."""
    size: int
    """Total size of the weight files, in bytes."""
    difference: LogitDifference | None = None
    """Difference between the logits of the merged and the trained model. None unless QLoRA adapters were merged into
    the original base model.
    """


def merge_adapters(
    path: str | Path,
    output: str | Path,
    *,
    save_dtype: str = "auto",
    base: BaseWeights = "trained",
    base_model: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> Merged:
    """Merge the adapters of a run, a checkpoint or an adapter folder into their base model, as a new model folder.

    The new folder includes the tokenizer, the chat template and the training metadata. The folder is written
    atomically. `save_dtype` is the dtype of the saved weights; "auto" keeps the dtype of each weight in the base model.
    `progress` is called after each merged layer.

    By default, QLoRA adapters are merged into the dequantized weights that they were trained with. If `base` is
    "original", QLoRA adapters are merged into the original weights, and the result reports how much the logits change.
    """
    target = local_path(output)
    folder = model_folder(path)
    check_folder(folder)
    if not is_adapter(folder):
        raise UsageError(f"{folder}: is not an adapter folder; expected a folder with LoRA adapters")
    check_model(folder)
    place = base_folder(folder, None if base_model is None else model_folder(base_model)).resolve()
    is_quantized = trained_on(folder) == "nf4"
    with building(
        target, "merging", overwrite=overwrite, kind=MERGED, reads=[folder / CONFIG, place / CONFIG]
    ) as staging:
        check_base(folder, place)
        lm = _dequantized(place, save_dtype) if is_quantized and base == "trained" else load_lm(place, weights="stored")
        layers = _merge(lm, folder, save_dtype, progress)
        kinds = {name: tensor.dtype for name, tensor in lm.state_dict().items()}
        stored = weight_dtypes(read_model_files(place), kinds, "stored")

        def saved(name: str, tensor: Tensor) -> torch.dtype:
            if not tensor.is_floating_point():
                return tensor.dtype
            return stored[name] if save_dtype == "auto" else getattr(torch, save_dtype)

        weights = cast_state(lm, saved)
        try:
            save_lm(lm, staging, weights, place)
            match_modes(staging)
            # Replace the tokenizer of the base model with the tokenizer of the adapters.
            copy_tokenizer(folder, staging)
            write_templates(staging, trained_with(folder).get("format"))
            about = _write_about(folder, place, staging)
        except (SafetensorError, OSError) as error:
            # When the disk is full, safetensors raises its own exception, and the error from shutil names the wrong
            # file.
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ChatmillError(f"{staging}: the model cannot be written ({one_line(str(reason))})") from None
        dtype = json.loads((staging / CONFIG).read_text())["dtype"]
        sizes = [path.stat().st_size for path in staging.glob("*.safetensors")]
        difference = _difference(lm, folder, place) if is_quantized and base == "original" else None
        merged = Merged(**about, layers=layers, dtype=dtype, size=sum(sizes), difference=difference)
        hashes = {path.name: asdict(file_info(path)) for path in sorted(staging.iterdir())}
        with files.create(staging / MANIFEST) as manifest:
            versions = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION}
            manifest.write(hashed_text({**versions, **asdict(merged), "files": hashes}))
    return merged


def _dequantized(base: Path, save_dtype: str) -> Any:
    """Load the base model in 4 bits and dequantize it, which gives the weights that the adapters were trained with."""
    lm = load_lm(base, weights="nf4")
    from chatmill.train.quantized import dequantize

    dequantize(lm, torch.float32 if save_dtype == "float32" else None)
    return lm


def _difference(lm: Any, folder: Path, base: Path) -> LogitDifference:
    """Compare the logits of the merged model with those of the quantized model with adapters."""
    merged = probe_logits(lm)
    trained = load_lm(base, weights="nf4")
    read_adapters(folder, trained)
    return LogitDifference.of(merged, probe_logits(trained))


def _merge(lm: Any, folder: Path, save_dtype: str, progress: Callable[[int], None]) -> int:
    """Merge the adapters in a folder into a transformers model in place; return the number of merged layers."""
    peft_model = read_adapters(folder, lm)
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in lm.modules() if isinstance(module, BaseTunerLayer)]
    with quiet(), faults_of(folder, "these adapters cannot be merged"):
        _untie(lm, layers, folder)
        for layer in layers:
            module = layer.get_base_layer()
            dtypes = {name: each.dtype for name, each in module._parameters.items() if is_half(each)}
            # Merge in float32 and round once; peft would round the adapter product first, and then the sum.
            for name in dtypes:
                module._parameters[name].data = module._parameters[name].data.float()
            layer.merge(safe_merge=True)
            for name, dtype in dtypes.items():
                kept = dtype if save_dtype == "auto" else getattr(torch, save_dtype)
                module._parameters[name].data = module._parameters[name].data.to(kept)
            progress(1)
        # Replace each adapter layer with its merged base layer.
        peft_model.merge_and_unload(progressbar=False)
    for config in (lm.config, lm.config.get_text_config()):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = lm.get_input_embeddings().weight is lm.get_output_embeddings().weight
    return len(layers)


def _untie(lm: Any, layers: Sequence[Any], folder: Path) -> None:
    """Untie the weights of adapted layers, because merging into a tied weight changes every layer that shares it."""
    from peft.tuners.lora import LoraLayer

    uses = Counter(id(parameter) for module in lm.modules() for parameter in module._parameters.values())
    ends = lm.get_input_embeddings(), lm.get_output_embeddings()
    for layer in layers:
        # Keep embeddings with trained tokens tied, because the trained tokens apply to all layers that share the
        # embedding.
        if not isinstance(layer, LoraLayer):
            continue
        module = layer.get_base_layer()
        for name, parameter in module._parameters.items():
            if parameter is None or uses[id(parameter)] < 2:
                continue
            if not any(layer is end for end in ends):
                raise DataError(
                    f"{folder}: has adapters on layers with tied weights, which cannot be merged; use the adapters "
                    f"without merging"
                )
            module._parameters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=False)


def _write_about(folder: Path, base: Path, staging: Path) -> dict[str, str]:
    """Copy the training metadata of the adapters; return the folders of the adapters and the base model."""
    if (folder / TOKENIZER_STATE).exists():
        shutil.copy(folder / TOKENIZER_STATE, staging / TOKENIZER_STATE)
    about = {"adapters": str(folder.resolve()), "base": str(base)}
    training = {name: value for name, value in trained_with(folder).items() if name != "base"}
    if training:
        text = json.dumps({**training, "merged": about}, indent=1) + "\n"
        (staging / TRAINING).write_text(text)
    return about


def _listed(folder: Path) -> Iterator[str]:
    path = folder / MANIFEST
    raw = read_hashed(path, "merged model", Path.read_bytes)
    data = parse_hashed(raw, place=str(path), schema=SCHEMA, version=SCHEMA_VERSION)
    data.pop("sha256", None)
    listed = data.get("files")
    if hashed_text(data) != raw or not isinstance(listed, dict):
        raise DataError(f"{path}: the hash differs from the recorded hash; the file was changed or is damaged")
    yield from listed


MERGED = FolderKind(
    "merged model",
    MANIFEST,
    re.compile(
        rf"{re.escape(MANIFEST)}|(config|generation_config|training)\.json|{re.escape(WEIGHTS)}(\.index\.json)?"
        r"|model-\d+-of-\d+\.safetensors|(tokenizer|vocab)[^/]*|(special_tokens_map|added_tokens|chat_template)\.json|merges\.txt"
        r"|[^/]+\.(jinja|model)"
    ),
    _listed,
)
