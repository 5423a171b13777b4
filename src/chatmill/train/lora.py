"""LoRA adapters for Hugging Face models, using peft.

The base model keeps the dtype of its weight files; adapters are trained in float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from chatmill.errors import DataError, UsageError, one_line
from chatmill.train.adapted_linear import use_adapted_linear
from chatmill.train.checkpoint import check_model
from chatmill.train.config import LoraSizes
from chatmill.train.half_weights import HalfLinear, is_half
from chatmill.train.hf import HFModel, copy_tokenizer
from chatmill.train.hf_load import adapter_rank, faults_of, quiet
from chatmill.train.memory import check_memory
from chatmill.train.model import CausalModel, WeightPrecision
from chatmill.train.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_folder, read_config, read_headers
from chatmill.train.preflight import base_of, weights_hash

ADAPTER_BASE = "base.json"
"""File that records the precision of the base model in training, if it differs from the stored precision (QLoRA)."""


class LoraModel(HFModel):
    """A Hugging Face model with trainable LoRA adapters (peft) and frozen base weights."""

    with_lora = CausalModel.with_lora

    def __init__(self, base: HFModel, peft_model: Any) -> None:
        # peft injects its layers in place, so base.lm already contains the adapters.
        super().__init__(base.lm, source=base.source, compute=base.compute, separates=base.separates)
        # Use a tuple, so that torch does not register the same weights twice.
        self._peft = (peft_model,)
        for module in self.lm.modules():
            use_adapted_linear(module)
        if self.compute not in (None, torch.float32):
            # Disable peft's float32 copy of adapter inputs, because autocast casts the inputs anyway.
            for module in self.lm.modules():
                if hasattr(module, "cast_input_dtype_enabled"):
                    module.cast_input_dtype_enabled = False

    def _check_kind_of_head(self) -> None:
        # Check only whether the adapters replaced the head, because the head of the base model has already been
        # checked.
        if type(self.lm.get_output_embeddings()) not in (nn.Linear, HalfLinear):
            raise DataError(
                f"{self._name}: the adapters change the output head, which is not supported without merging; run "
                f"chatmill merge and use the merged model"
            )

    @classmethod
    def on(cls, base: HFModel, sizes: LoraSizes) -> LoraModel:
        """Add new adapters to a model and freeze the weights of the model. Untrained adapters do not change the
        output.
        """
        peft = _peft(str(base.source))
        targets = sizes.targets if isinstance(sizes.targets, str) else list(sizes.targets)
        head = next(name for name, module in base.lm.named_modules() if module is base.lm.get_output_embeddings())
        if any(f".{head}".endswith(f".{target}") for target in targets):
            raise UsageError(
                f"lora: {head} is the output head, which cannot have an adapter; remove the head from targets"
            )
        config = peft.LoraConfig(
            r=sizes.r, lora_alpha=sizes.alpha, lora_dropout=sizes.dropout, target_modules=targets, task_type="CAUSAL_LM"
        )
        try:
            with quiet():
                peft_model = peft.get_peft_model(base.lm, config)
        except ValueError as error:
            raise UsageError(f"lora: {str(error).splitlines()[0]}") from None
        return cls(base, peft_model)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        compute: torch.dtype | None = None,
        weights: WeightPrecision = "float32",
        base_model: Path | None = None,
    ) -> LoraModel:
        """Load adapters that were written by `save`. The base model is loaded from `base_model` or from the folder in
        the adapter config.

        `weights` is the precision of the frozen base model. "float32" and "bfloat16" are replaced by the precision of
        the base model when the adapters were trained.
        """
        check_folder(folder)
        adapter_rank(folder, read_config(folder / ADAPTER_CONFIG))
        weights = trained_on(folder) if weights in ("float32", "bfloat16") else weights
        place = base_folder(folder, base_model)
        with ThreadPoolExecutor(1) as pool:
            # Hash the files and load the model in parallel, because hashing takes as long as loading.
            checked = pool.submit(check_base, folder, place)
            model = HFModel.load(place, compute=compute, weights=weights)
            checked.result()
        return cls(model, read_adapters(folder, model.lm))

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write the adapters, the absolute path of their base model, and the tokenizer files to a folder."""
        weights = (
            None if state is None else {f"base_model.model.{name.removeprefix('lm.')}": t for name, t in state.items()}
        )
        if self.source is not None:
            self._peft[0].peft_config["default"].base_model_name_or_path = str(self.source.resolve())
        with quiet():
            # The default for save_embedding_layers, "auto", would query the Hugging Face Hub to find out whether the
            # embedding was resized.
            self._peft[0].save_pretrained(str(folder), state_dict=weights, save_embedding_layers=False)
        copy_tokenizer(self.source, folder)
        # Remove the empty model card that peft writes.
        (folder / "README.md").unlink(missing_ok=True)
        if getattr(self.lm, "is_loaded_in_4bit", False):
            (folder / ADAPTER_BASE).write_text(json.dumps({"weights": "nf4"}) + "\n")


def read_adapters(folder: Path, lm: Any) -> Any:
    """Load adapters from a folder into a transformers model as trainable weights; return the `PeftModel`."""
    config = read_config(folder / ADAPTER_CONFIG)
    rank = adapter_rank(folder, config)
    tensors = read_headers(folder, ADAPTER_WEIGHTS)
    linear = [module for module in lm.modules() if isinstance(module, nn.Linear)]
    most = sum(module.in_features + module.out_features for module in linear)
    check_memory(4 * rank * most, folder, what="a LoRA adapter of this rank")
    peft = _peft(str(folder))
    known = {field.name for field in fields(peft.LoraConfig)}
    # Accept unknown keys with number or string values, because these only configure options that other keys turn on.
    if unknown := [key for key, value in config.items() if key not in known and _is_on(value)]:
        raise DataError(
            f"{folder / ADAPTER_CONFIG}: has {one_line(unknown[0])}, which peft {peft.__version__} does not know; "
            "upgrade peft"
        )
    copied = _copied_embeddings(folder, tensors, lm)
    with quiet(), faults_of(folder, "these adapters cannot be read"):
        peft_model = peft.PeftModel.from_pretrained(
            lm, str(folder), is_trainable=True, use_safetensors=True, local_files_only=True
        )
        need = peft.get_peft_model_state_dict(peft_model, save_embedding_layers=False)
        _use_float32(peft_model, folder)
    if missing := sorted(need.keys() - tensors.keys()):
        raise DataError(f"{folder / ADAPTER_WEIGHTS}: has no {one_line(missing[0])} (missing tensors: {len(missing)})")
    if others := sorted(tensors.keys() - need.keys() - copied):
        raise DataError(
            f"{folder / ADAPTER_WEIGHTS}: has {one_line(others[0])}, which matches no adapter on this base model "
            f"(tensors that do not match: {len(others)}); pass the base model that the adapters were trained on"
        )
    return peft_model


def _is_on(value: Any) -> bool:
    return value is True or (isinstance(value, (dict, list)) and bool(value))


def _use_float32(peft_model: Any, folder: Path) -> None:
    """Load trained biases, `modules_to_save` and trained token embeddings in float32; peft would use the dtype of the
    base model.
    """
    from peft import set_peft_model_state_dict
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    layers = [module for module in peft_model.modules() if isinstance(module, TrainableTokensLayer)]
    trained = [parameter for parameter in peft_model.parameters() if parameter.requires_grad]
    if narrow := [each for each in (*trained, *(layer.get_base_layer().weight for layer in layers)) if is_half(each)]:
        for parameter in narrow:
            parameter.data = parameter.data.float()
        set_peft_model_state_dict(peft_model, load_file(folder / ADAPTER_WEIGHTS))


def _copied_embeddings(folder: Path, tensors: Mapping[str, Any], lm: Any) -> set[str]:
    """Return the names of adapter tensors that are copies of an embedding of the base model. For some target modules,
    peft saves these copies with the adapters.
    """
    copied = set()
    for name, module in lm.named_modules():
        if module is lm.get_input_embeddings() or module is lm.get_output_embeddings():
            for key in (f"base_model.model.{name}.weight", f"base_model.model.{name}.base_layer.weight"):
                if key in tensors:
                    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
                        if torch.equal(file.get_tensor(key).to(module.weight), module.weight):
                            copied.add(key)
    return copied


def trained_on(folder: Path) -> WeightPrecision:
    """Return the precision that the base model had when the adapters in a folder were trained."""
    path = folder / ADAPTER_BASE
    weights: Any = read_config(path).get("weights") if path.exists() else "stored"
    if weights not in ("stored", "nf4"):
        raise DataError(f"{path}: weights is {one_line(json.dumps(weights))}; expected stored or nf4")
    return weights


def base_folder(folder: Path, base_model: Path | None = None) -> Path:
    """Return `base_model` if given, otherwise the folder of the base model from the adapter config. The base model is
    never downloaded.
    """
    if base_model is not None:
        return base_model
    name = read_config(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str) or "\0" in name or not Path(name).is_dir():
        raise DataError(
            f"{folder}: base model {one_line(str(name), 300)} is not a folder on this machine; "
            f"restore the folder, change base_model_name_or_path in {ADAPTER_CONFIG}, or pass --base-model to chat, "
            f"eval and merge"
        )
    return Path(name)


def check_base(folder: Path, base: Path) -> None:
    """Raise `DataError` if the adapters were trained on a different base model."""
    check_model(base)
    stored = base_of(folder)
    if stored is not None and stored["sha256"] != (mine := weights_hash(base)):
        raise DataError(
            f"{folder}: these adapters were trained on {one_line(stored['folder'], 300)} with weights "
            f"{stored['sha256'][:12]}…, but {base} has weights {mine[:12]}…; use the base model that the adapters were "
            f"trained on"
        )


def _peft(place: str) -> Any:
    try:
        with quiet():
            import peft
    except ImportError:
        raise UsageError(f"{place}: adapters require peft; pip install 'chatmill[lora]'") from None
    return peft
