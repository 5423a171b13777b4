"""LoRA adapters on a Hugging Face model, with peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chatmill.errors import DataError, UsageError, one_line
from chatmill.train.checkpoint import check_model
from chatmill.train.config import LoraSizes
from chatmill.train.hf import HFModel, quiet
from chatmill.train.load_model import ADAPTER_CONFIG
from chatmill.train.model import CausalModel


class LoraModel(HFModel):
    """A Hugging Face model of which only the adapters are trained."""

    with_lora = CausalModel.with_lora

    def __init__(self, base: HFModel, peft_model: Any) -> None:
        # peft inserts its layers into the model that it is given: base.lm has them from here on.
        super().__init__(base.lm, source=base.source, compute=base.compute)
        # In a tuple, so that torch does not count the same weights twice.
        self._peft = (peft_model,)

    @classmethod
    def on(cls, base: HFModel, sizes: LoraSizes) -> LoraModel:
        """Fresh adapters on a model, whose own weights are frozen; untrained adapters change no output."""
        peft = _peft(str(base.source))
        targets = sizes.targets if isinstance(sizes.targets, str) else list(sizes.targets)
        head = next(name for name, module in base.lm.named_modules() if module is base.lm.get_output_embeddings())
        if any(f".{head}".endswith(f".{target}") for target in targets):
            raise UsageError(f"lora: {head} is the head, which cannot have an adapter; leave it out of the targets")
        config = peft.LoraConfig(
            r=sizes.r, lora_alpha=sizes.alpha, lora_dropout=sizes.dropout, target_modules=targets, task_type="CAUSAL_LM"
        )
        try:
            peft_model = peft.get_peft_model(base.lm, config)
        except ValueError as error:
            raise UsageError(f"lora: {str(error).splitlines()[0]}") from None
        return cls(base, peft_model)

    @classmethod
    def load(cls, folder: Path, *, compute: torch.dtype | None = None) -> LoraModel:
        """Read adapters that `save` wrote, and their base model from the folder that they name."""
        peft = _peft(str(folder))
        try:
            name = json.loads((folder / ADAPTER_CONFIG).read_bytes())["base_model_name_or_path"]
            base = _load_base(folder, name, compute)
            return cls(base, peft.PeftModel.from_pretrained(base.lm, str(folder), is_trainable=True))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{folder}: these adapters cannot be read ({str(error).splitlines()[0]})") from None

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write the adapters alone."""
        weights = (
            None if state is None else {f"base_model.model.{name.removeprefix('lm.')}": t for name, t in state.items()}
        )
        with quiet():
            self._peft[0].save_pretrained(str(folder), state_dict=weights)
        # An empty model card.
        (folder / "README.md").unlink(missing_ok=True)

    def merge(self) -> HFModel:
        """The model with the adapters merged into its weights; this object cannot be used afterwards."""
        merged = self._peft[0].merge_and_unload()
        return HFModel(merged, source=self.source, compute=self.compute)


def _load_base(folder: Path, name: str, compute: torch.dtype | None) -> HFModel:
    """The base model of adapters."""
    check_model(Path(name))
    try:
        return HFModel.load(Path(name), compute=compute)
    except DataError:
        if Path(name).is_dir():
            raise
        raise DataError(
            f"{folder}: these adapters go onto the model {one_line(name, 300)}, which is no folder here; "
            "put it back there"
        ) from None


def _peft(place: str) -> Any:
    try:
        import peft
    except ImportError:
        raise UsageError(f"{place}: adapters need peft; pip install 'chatmill[lora]'") from None
    return peft
