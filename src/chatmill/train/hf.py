"""Any Hugging Face causal model as a `CausalModel`.

transformers builds its masks from position ids that restart with each conversation. Whether an architecture really
separates conversations, and whether its logits are those of its head, is tested when a model is opened.
"""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chatmill.errors import DataError, UsageError, one_line
from chatmill.train.attention import segment_begins
from chatmill.train.checkpoint import check_model
from chatmill.train.config import LoraSizes
from chatmill.train.hf_load import adapter_rank, faults_of, load_lm, quiet
from chatmill.train.loss import LMHead
from chatmill.train.memory import check_memory
from chatmill.train.model import CausalModel, DecodingCache, eval_mode, usable_precision
from chatmill.train.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_folder, read_config, read_headers

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.jinja",
    "*.model",
)
"""Copied from the folder that a model was loaded from to the folder it is saved in."""
CLOSE = 1e-3
"""Largest relative difference of logits that counts as rounding."""


class HFModel(CausalModel):
    """A causal model of transformers. Parameters stay float32; the forward pass is autocast to `compute`."""

    def __init__(self, lm: Any, *, source: Path | None = None, compute: torch.dtype | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.training = lm.training
        self.source = source
        self.compute = usable_precision(compute)
        text = lm.config.get_text_config()
        self.vocab_size = int(text.vocab_size)
        self.max_positions = int(getattr(text, "max_position_embeddings", None) or 1 << 30)
        self._check_head()
        self.separates = self._separates()
        """Whether the architecture separates the conversations of a packed row; if not, rows are unpacked."""

    @classmethod
    def load(cls, folder: Path, *, compute: torch.dtype | None = None) -> HFModel:
        """Read a folder that `save_pretrained` wrote; see `load_lm`."""
        return cls(load_lm(folder), source=folder, compute=compute)

    def hidden(self, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        self._attend_by(self._training_attention(x))
        if self.separates:
            return self._states(x, positions)
        index, lengths = _unpacked(segments)
        states = self._states(x.flatten()[index], positions.flatten()[index])
        inside = torch.arange(index.shape[1], device=x.device) < lengths[:, None]
        return states[inside].view(*x.shape, -1)

    def head(self) -> LMHead:
        layer, config = self.lm.get_output_embeddings(), self.lm.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        return LMHead(layer.weight, layer.bias, scale, getattr(config, "final_logit_softcapping", None))

    def _states(self, x: Tensor, positions: Tensor) -> Tensor:
        with self._cast():
            out = self.lm.base_model(input_ids=x, position_ids=positions.long(), use_cache=False)
        states = out.last_hidden_state
        return states.to(self.compute or states.dtype)

    def _cast(self) -> AbstractContextManager[Any]:
        if self.compute in (None, torch.float32):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute)

    def blocks(self) -> list[nn.Module]:
        depth = self.lm.config.get_text_config().num_hidden_layers
        for module in self.lm.base_model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == depth:
                return list(module)
        raise UsageError(f"{self._name}: its layers cannot be told one by one; neither compile nor shard it")

    def checkpoint_blocks(self) -> None:
        self.lm.gradient_checkpointing_enable({"use_reentrant": False})

    def prefill(self, ids: Tensor, lengths: Tensor, room: int) -> tuple[Tensor, DecodingCache]:
        from transformers import DynamicCache

        if getattr(self.lm, "_is_stateful", False):
            recompute = RecomputeCache(ids, lengths)
            return self._recomputed(recompute), recompute
        length = ids.shape[1]
        # transformers expects left-padded prompts.
        places = torch.arange(length, device=ids.device) - (length - lengths[:, None])
        cache = HFCache(DynamicCache(config=self.lm.config), lengths, seen=places >= 0)
        ids = ids.gather(1, places.clamp(min=0))
        return self._next(ids, places.clamp(min=0), cache), cache

    def step(self, tokens: Tensor, cache: DecodingCache) -> Tensor:
        if isinstance(cache, RecomputeCache):
            cache.append(tokens)
            return self._recomputed(cache)
        assert isinstance(cache, HFCache)
        positions = cache.lengths[:, None]
        cache.lengths = cache.lengths + 1
        cache.seen = torch.cat([cache.seen, torch.ones_like(positions, dtype=torch.bool)], dim=1)
        return self._next(tokens[:, None], positions, cache)

    def _next(self, ids: Tensor, positions: Tensor, cache: HFCache) -> Tensor:
        self._attend_by("sdpa")
        with self._cast():
            inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": cache.seen.long()}
            out = self.lm(**inputs, past_key_values=cache.past, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].float()

    def _recomputed(self, cache: RecomputeCache) -> Tensor:
        positions = torch.arange(cache.ids.shape[1], device=cache.ids.device).expand_as(cache.ids)
        states = self._states(cache.ids, positions)
        return self.head().logits(states[torch.arange(len(states), device=states.device), cache.lengths - 1])

    def with_lora(self, sizes: LoraSizes, folder: Path) -> CausalModel:
        return LoraModel.on(self, sizes)

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        weights = None if state is None else {name.removeprefix("lm."): tensor for name, tensor in state.items()}
        with quiet():
            self.lm.save_pretrained(folder, state_dict=weights)
        if self.source is not None and self.source.resolve() != folder.resolve():
            for pattern in TOKENIZER_FILES:
                for path in self.source.glob(pattern):
                    shutil.copy(path, folder / path.name)

    # Attention.

    def _training_attention(self, x: Tensor) -> str:
        config = self.lm.config.get_text_config()
        dropout = getattr(config, "attention_dropout", None) or getattr(config, "attn_pdrop", None)
        if x.is_cuda and self.separates and not dropout and getattr(self.lm, "_supports_flex_attn", False):
            return _registered_flex()
        return "sdpa"

    def _attend_by(self, name: str) -> None:
        if self.lm.config._attn_implementation not in (name, "eager"):
            self.lm.set_attn_implementation(name)

    # Tests of the architecture.

    def _check_head(self) -> None:
        layer = self.lm.get_output_embeddings()
        if type(layer) is not nn.Linear:
            raise DataError(
                f"{self._name}: its head is a {type(layer).__name__}; only a plain linear head can be trained"
            )
        with eval_mode(self.lm), torch.inference_mode():
            x = torch.arange(4)[None] % self.vocab_size
            expected = self.lm(input_ids=x).logits
            ours = self.head().logits(self.lm.base_model(input_ids=x).last_hidden_state)
        if not _close(expected, ours):
            raise DataError(
                f"{self._name}: its logits are not those of its head; this architecture cannot be trained here"
            )

    def _separates(self) -> bool:
        x = torch.tensor([[1, 2, 3, 0, 3, 2, 1]]) % self.vocab_size
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
        with eval_mode(self.lm), torch.inference_mode():
            packed = self._states(x, positions)[:, 3:]
            alone = self._states(x[:, 3:], positions[:, 3:])
        return _close(packed, alone)

    @property
    def _name(self) -> str:
        return str(self.source or type(self.lm).__name__)


class LoraModel(HFModel):
    """A Hugging Face model of which only the LoRA adapters are trained, with peft."""

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
        check_folder(folder)
        config = read_config(folder / ADAPTER_CONFIG)
        tensors = read_headers(folder, ADAPTER_WEIGHTS)
        rank = adapter_rank(folder, config)
        base = _load_base(folder, config.get("base_model_name_or_path"), compute)
        linear = [module for module in base.lm.modules() if isinstance(module, nn.Linear)]
        most = sum(module.in_features + module.out_features for module in linear)
        check_memory(4 * rank * most, folder, what="adapters of this rank")
        peft = _peft(str(folder))
        with faults_of(folder, "these adapters cannot be read"):
            peft_model = peft.PeftModel.from_pretrained(
                base.lm, str(folder), is_trainable=True, use_safetensors=True, local_files_only=True
            )
            need = peft.get_peft_model_state_dict(peft_model)
        if missing := sorted(need.keys() - tensors.keys()):
            raise DataError(f"{folder / ADAPTER_WEIGHTS}: has no {one_line(missing[0])} ({len(missing)} are missing)")
        return cls(base, peft_model)

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


class HFCache:
    """transformers' cache; prompts are left-padded, so it has a mask of the places that hold tokens."""

    def __init__(self, past: Any, lengths: Tensor, *, seen: Tensor) -> None:
        self.past, self.lengths, self.seen = past, lengths, seen

    def take(self, rows: Tensor) -> None:
        self.past.reorder_cache(rows)
        self.lengths, self.seen = self.lengths[rows], self.seen[rows]


class RecomputeCache:
    """For models with a recurrent state instead of keys and values: the tokens, recomputed at every step."""

    def __init__(self, ids: Tensor, lengths: Tensor) -> None:
        self.ids, self.lengths = ids, lengths

    def append(self, tokens: Tensor) -> None:
        self.ids = torch.cat([self.ids, torch.zeros_like(self.ids[:, :1])], dim=1)
        self.ids = self.ids.scatter(1, self.lengths[:, None], tokens[:, None])
        self.lengths = self.lengths + 1

    def take(self, rows: Tensor) -> None:
        self.ids, self.lengths = self.ids[rows], self.lengths[rows]


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= CLOSE * b.abs().max())


def _unpacked(segments: Tensor) -> tuple[Tensor, Tensor]:
    """For each segment the indices of its tokens in the flattened rows, padded at the end, and its length."""
    start = segment_begins(segments).flatten().nonzero().squeeze(1)
    lengths = torch.diff(start, append=start.new_tensor([segments.numel()]))
    index = start[:, None] + torch.arange(int(lengths.max()), device=segments.device)
    return index.clamp(max=segments.numel() - 1), lengths


def _registered_flex() -> str:
    """Register FlexAttention that accepts the mixed precisions of autocast; its name in transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.masking_utils import flex_attention_mask

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        return flex_attention_forward(module, q.to(v.dtype), k.to(v.dtype), v, *args, **kwargs)

    AttentionInterface.register("chatmill_flex", attention)
    AttentionMaskInterface.register("chatmill_flex", flex_attention_mask)
    return "chatmill_flex"


def _load_base(folder: Path, name: Any, compute: torch.dtype | None) -> HFModel:
    """The base model of adapters, which is a folder; nothing is looked for under its name elsewhere."""
    if not isinstance(name, str) or "\0" in name or not Path(name).is_dir():
        raise DataError(
            f"{folder}: these adapters go onto the model {one_line(str(name), 300)}, which is no folder here; "
            "put it back there"
        )
    check_model(Path(name))
    return HFModel.load(Path(name), compute=compute)


def _peft(place: str) -> Any:
    try:
        import peft
    except ImportError:
        raise UsageError(f"{place}: adapters need peft; pip install 'chatmill[lora]'") from None
    return peft
