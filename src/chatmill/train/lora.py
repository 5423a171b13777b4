"""Adapters on a Hugging Face model: few weights are trained beside the frozen ones, and can be merged into them."""

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

ADAPTER_CONFIG = "adapter_config.json"


class LoraModel(HFModel):
    """A Hugging Face model of which only the adapters are trained."""

    def __init__(self, base: HFModel, peft_model: Any) -> None:
        # peft puts its layers into the model that it is given: base.lm has them from here on.
        super().__init__(base.lm, source=base.source, compute=base.compute)
        # In a tuple, so that torch does not count the same weights twice.
        self._peft = (peft_model,)

    @classmethod
    def on(cls, base: HFModel, sizes: LoraSizes) -> LoraModel:
        """Fresh adapters on a model, whose own weights are frozen; they change nothing until they are trained."""
        peft = _peft(str(base.source))
        targets = sizes.targets if isinstance(sizes.targets, str) else list(sizes.targets)
        head = next(name for name, module in base.lm.named_modules() if module is base.lm.get_output_embeddings())
        if any(f".{head}".endswith(f".{target}") for target in targets):
            raise UsageError(f"lora: {head} is the head, which cannot have an adapter; leave it out of the targets")
        config = peft.LoraConfig(
            r=sizes.r,
            lora_alpha=sizes.alpha,
            lora_dropout=sizes.dropout,
            target_modules=targets,
            task_type="CAUSAL_LM",
        )
        try:
            peft_model = peft.get_peft_model(base.lm, config)
        except ValueError as error:
            raise UsageError(f"lora: {str(error).splitlines()[0]}") from None
        return cls(base, peft_model)

    @classmethod
    def load(cls, folder: Path, *, compute: torch.dtype | None = None) -> LoraModel:
        """Read adapters that `save` wrote, and the model under them from the folder that they name."""
        peft = _peft(str(folder))
        try:
            name = json.loads((folder / ADAPTER_CONFIG).read_bytes())["base_model_name_or_path"]
            base = _under(folder, name, compute)
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
        # A model card to be filled in by hand, which nobody asked for.
        (folder / "README.md").unlink(missing_ok=True)

    def merge(self) -> HFModel:
        """The model with the adapters added to its weights; this one is used up."""
        merged = self._peft[0].merge_and_unload()
        return HFModel(merged, source=self.source, compute=self.compute)


def _under(folder: Path, name: str, compute: torch.dtype | None) -> HFModel:
    """The model that adapters name."""
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
