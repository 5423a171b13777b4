"""Wrap any Hugging Face causal model as a `CausalModel`.

transformers builds its attention masks from position ids that restart with each conversation. When a model is opened,
chatmill tests whether the architecture really separates packed conversations, and whether the output head alone
computes the logits from the last hidden states.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chatmill.errors import DataError, UsageError
from chatmill.store.layout import TOKENIZER_STATE
from chatmill.train.attention import MIN_HEAD_SIZE
from chatmill.train.config import LoraSizes
from chatmill.train.flash import bounds_of, is_usable, segment_begins
from chatmill.train.half_weights import HalfLinear, is_half, use_half_weights, widened
from chatmill.train.hf_attention import FLASH_TYPES, head_size, registered_flash, registered_flex
from chatmill.train.hf_load import faults_of, load_lm, quiet
from chatmill.train.loss import LMHead
from chatmill.train.model import CausalModel, DecodingCache, SavedPart, WeightPrecision, eval_mode, usable_precision
from chatmill.train.model_files import CONFIG, INDEX, ModelFiles, read_model_files
from chatmill.train.offload import ActivationOffload
from chatmill.train.weight_dtypes import WeightDtypes, saved_state, weight_dtypes, write_dtype

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.jinja",
    "chat_template.json",
    "*.model",
)
"""Patterns of the tokenizer files that are copied to the folder of a saved model."""
GENERATION = "generation_config.json"
CLOSE = 1e-3
"""Largest relative difference between logits that is attributed to rounding."""


class HFModel(CausalModel):
    """A transformers causal LM. Parameters keep their dtype; the forward pass runs under autocast to `compute`."""

    def __init__(
        self,
        lm: Any,
        *,
        source: Path | None = None,
        compute: torch.dtype | None = None,
        separates: bool | None = None,
    ) -> None:
        """`separates` says whether the architecture separates packed conversations. If `separates` is None, the model
        is tested.
        """
        super().__init__()
        self.lm = lm
        self.training = lm.training
        self.source = self.tokenizer_folder = source
        self._stored: WeightDtypes | None = None
        self._fused: tuple[tuple[str, ...], ...] = ()
        self.compute = usable_precision(compute)
        text = lm.config.get_text_config()
        self.vocab_size = int(text.vocab_size)
        self.max_positions = int(getattr(text, "max_position_embeddings", None) or 1 << 30)
        use_half_weights(lm, self.compute or torch.float32, self._name)
        self._check_kind_of_head()
        self.is_widened = False
        """Whether half-precision weights were converted to float32 because the model cannot compute with them."""
        self.separates = self._check_architecture() if separates is None else separates
        """Whether the architecture separates the conversations in a packed row; otherwise, rows are unpacked."""

    @classmethod
    def load(cls, folder: Path, *, compute: torch.dtype | None = None, weights: WeightPrecision = "float32") -> HFModel:
        """Load a folder written by `save_pretrained`; see `load_lm`."""
        lm = load_lm(folder, weights=weights)
        # Some architectures, such as Mamba, read the weights of linear layers directly, which 4-bit layers do not
        # support.
        packed = faults_of(folder, "this architecture cannot compute with 4-bit linear layers; set quantize to none")
        with packed if weights == "nf4" else nullcontext():
            model = cls(lm, source=folder, compute=compute)
        model.remember_files(read_model_files(folder))
        if model.device.type == "cuda":
            # Free memory that the allocator still caches from loading, quantizing and testing the model.
            torch.cuda.empty_cache()
        return model

    def remember_files(self, files: ModelFiles, *, fused: Sequence[Sequence[str]] = ()) -> None:
        """Record the dtypes of the model files, so that the model is saved in the same dtypes.

        `fused` lists groups of weights that transformers computed together from several tensors in the files.
        """
        kinds = {name: tensor.dtype for name, tensor in self.lm.state_dict().items()}
        self._stored = weight_dtypes(files, kinds, "stored")
        self._fused = tuple(map(tuple, fused))

    def hidden(self, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        if self.uses_flash():
            self._attend_by(registered_flash())
            bounds = bounds_of(segments)
            return self._states(x, positions, cu_seq_lens_q=bounds.at, max_length_q=bounds.longest)
        self._attend_by(registered_flex() if x.is_cuda and self.uses_flex() else "sdpa")
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

    def _states(self, x: Tensor, positions: Tensor, **options: Any) -> Tensor:
        with self._cast():
            states = self._base_states(x, positions, **options)
        return states.to(self.compute or states.dtype)

    def _base_states(self, x: Tensor, positions: Tensor, **options: Any) -> Tensor:
        out = self.lm.base_model(input_ids=x, position_ids=positions.long(), use_cache=False, **options)
        return out.last_hidden_state

    def _cast(self) -> AbstractContextManager[Any]:
        if self.compute in (None, torch.float32):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute)

    def blocks(self) -> list[nn.Module]:
        if not (layers := self._layers()):
            raise UsageError(
                f"{self._name}: cannot locate the decoder layers of this architecture, which compile, fsdp, fp8 and "
                f"muon require; turn these settings off"
            )
        return layers

    def _layers(self) -> list[nn.Module]:
        return self.layers_of(self.lm)

    @staticmethod
    def layers_of(lm: Any) -> list[nn.Module]:
        """Return the decoder layers of a transformers model; the list is empty if they cannot be located."""
        depth = lm.config.get_text_config().num_hidden_layers
        lists = (module for module in lm.base_model.modules() if isinstance(module, nn.ModuleList))
        return next((list(module) for module in lists if len(module) == depth), [])

    def checkpoint_blocks(self, *, offload: bool = False) -> None:
        self.lm.gradient_checkpointing_enable({"use_reentrant": False})
        if offload:
            self.lm._set_gradient_checkpointing(gradient_checkpointing_func=ActivationOffload().checkpoint)

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
        from chatmill.train.lora import LoraModel

        return LoraModel.on(self, sizes)

    def stored_dtype(self, name: str) -> torch.dtype | None:
        return None if self._stored is None else self._stored[name.removeprefix("lm.")]

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        weights = {name.removeprefix("lm."): tensor for name, tensor in (state or saved_state(self)).items()}
        save_lm(self.lm, folder, weights, self.source)

    def save_parts(self, folder: Path, like: Mapping[str, Tensor]) -> list[SavedPart] | None:
        with recorded_weights() as saved:
            self.save(folder, dict(like))
        (folder / INDEX).unlink(missing_ok=True)
        names = {id(tensor): name for name, tensor in reversed(list(like.items()))}
        parts = [SavedPart((names.pop(id(each)),), (name,)) for name, each in saved.items() if id(each) in names]
        fused = [tuple(f"lm.{name}" for name in group) for group in self._fused]
        fused = fused or [(name,) for name in names.values()]
        for group in fused if len(parts) < len(saved) else ():
            tensors = self._reverted({name: like[name] for name in group})
            parts.append(SavedPart(group, tuple(tensors), is_converted=True))
        # Save in parts only if the parts contain exactly the tensors that transformers would write, without duplicates.
        written = [name for part in parts for name in part.saved]
        return parts if len(written) == len(set(written)) and set(written) == saved.keys() else None

    def saved_tensors(self, part: SavedPart, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._reverted(weights) if part.is_converted else super().saved_tensors(part, weights)

    def _reverted(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undo the weight conversion that transformers applies when it loads the model files."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.lm, {name.removeprefix("lm."): each for name, each in weights.items()})

    # Attention.

    def uses_flash(self) -> bool:
        """Whether the model uses FlashAttention 4 on its GPU."""
        config = self.lm.config.get_text_config()
        if config.model_type not in FLASH_TYPES or not self.uses_flex():
            return False
        # Configs that have `layer_types` may set `sliding_window` without using it.
        kinds = getattr(config, "layer_types", None)
        slides = getattr(config, "sliding_window", None) if kinds is None else set(kinds) != {"full_attention"}
        return not slides and is_usable(self.device, head_size(config), self.compute)

    def uses_flex(self) -> bool:
        """Whether the model can use FlexAttention on a GPU, rather than SDPA with a mask."""
        if not self.separates or not getattr(self.lm, "_supports_flex_attn", False):
            return False
        config = self.lm.config.get_text_config()
        dropout = getattr(config, "attention_dropout", None) or getattr(config, "attn_pdrop", None)
        return not dropout and head_size(config) >= MIN_HEAD_SIZE

    def _attend_by(self, name: str) -> None:
        if self.lm.config._attn_implementation not in (name, "eager"):
            self.lm.set_attn_implementation(name)

    # Checks of the model architecture, which run in float32.

    def _check_kind_of_head(self) -> None:
        layer = self.lm.get_output_embeddings()
        if type(layer) not in (nn.Linear, HalfLinear):
            raise DataError(
                f"{self._name}: the output head is a {type(layer).__name__}; only a plain linear head can be trained"
            )

    def _check_architecture(self) -> bool:
        """Return whether the architecture separates packed conversations; raise `DataError` if the output head is not
        supported.
        """
        with eval_mode(self.lm), torch.no_grad():
            if self.compute in (None, torch.float32):
                try:
                    self._check_head()
                    return self._separates()
                except RuntimeError:
                    is_quantized = getattr(self.lm, "is_loaded_in_4bit", False)
                    if is_quantized or not any(map(is_half, self.lm.parameters())):
                        raise
                    # Some layers read the weights of other layers and need them in the dtype of the hidden states.
                    self.lm.float()
                    self.is_widened = True
            with widened(self.lm, self._layers()):
                self._check_head()
                return self._separates()

    def _check_head(self) -> None:
        x = torch.arange(4, device=self.device)[None] % self.vocab_size
        states: list[Tensor] = []
        # Get hidden states and logits from the same forward pass, because a pass takes seconds for a large model.
        hook = self.lm.base_model.register_forward_hook(lambda *given: states.append(given[-1].last_hidden_state))
        try:
            expected = self.lm(input_ids=x).logits
        finally:
            hook.remove()
        if not states:
            # OPT models call only a part of their base model, so the hook does not run.
            states.append(self.lm.base_model(input_ids=x).last_hidden_state)
        if not _close(expected, self.head().logits(states[-1])):
            if bool(expected.isnan().any()):
                raise DataError(f"{self._name}: the logits are NaN, because some weights are NaN or infinite")
            raise DataError(
                f"{self._name}: the logits differ from the output of the head; chatmill cannot train this architecture"
            )

    def _separates(self) -> bool:
        x = torch.tensor([[1, 2, 3, 0, 3, 2, 1]], device=self.device) % self.vocab_size
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]], device=self.device)
        packed = self._base_states(x, positions)[:, 3:]
        return _close(packed, self._base_states(x[:, 3:], positions[:, 3:]))

    @property
    def _name(self) -> str:
        return str(self.source or type(self.lm).__name__)


class HFCache:
    """A transformers cache for left-padded prompts, with a mask of the positions that contain tokens."""

    def __init__(self, past: Any, lengths: Tensor, *, seen: Tensor) -> None:
        self.past, self.lengths, self.seen = past, lengths, seen

    def take(self, rows: Tensor) -> None:
        self.past.reorder_cache(rows)
        self.lengths, self.seen = self.lengths[rows], self.seen[rows]


class RecomputeCache:
    """Cache for models with a recurrent state instead of keys and values; every step processes all tokens again."""

    def __init__(self, ids: Tensor, lengths: Tensor) -> None:
        self.ids, self.lengths = ids, lengths

    def append(self, tokens: Tensor) -> None:
        self.ids = torch.cat([self.ids, torch.zeros_like(self.ids[:, :1])], dim=1)
        self.ids = self.ids.scatter(1, self.lengths[:, None], tokens[:, None])
        self.lengths = self.lengths + 1

    def take(self, rows: Tensor) -> None:
        self.ids, self.lengths = self.ids[rows], self.lengths[rows]


def save_lm(lm: Any, folder: Path, weights: dict[str, Tensor], source: Path | None) -> None:
    """Save a transformers model with these weights, and copy the tokenizer files from its source folder."""
    path = None if source is None else source / GENERATION
    generation = path.read_bytes() if path is not None and path.is_file() else None
    own = lm.generation_config
    try:
        if generation is not None:
            # Copy generation_config.json verbatim, because transformers refuses to write some configs that it can read.
            lm.generation_config = type(own)()
        with quiet():
            lm.save_pretrained(folder, state_dict=weights)
    finally:
        lm.generation_config = own
    if generation is not None:
        (folder / GENERATION).write_bytes(generation)
    write_dtype(folder / CONFIG, weights.values())
    copy_tokenizer(source, folder)


@contextmanager
def recorded_weights() -> Iterator[dict[str, Tensor]]:
    """Make transformers write all files of a model except its weights, which are collected in a dictionary."""
    from transformers import modeling_utils

    write, saved = modeling_utils.safe_save_file, {}
    modeling_utils.safe_save_file = lambda tensors, *_, **__: saved.update(tensors)
    try:
        yield saved
    finally:
        modeling_utils.safe_save_file = write


def copy_tokenizer(source: Path | None, folder: Path) -> None:
    """Copy the tokenizer files, including the chat template, from one model folder to another."""
    if source is not None and source.resolve() != folder.resolve():
        for path in (path for pattern in TOKENIZER_FILES for path in source.glob(pattern)):
            # Skip the tokenizer state, because every run writes its own.
            if path.name != TOKENIZER_STATE:
                shutil.copy(path, folder / path.name)


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= CLOSE * b.abs().max())


def _unpacked(segments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token indices of each segment in the flattened rows, padded at the end, and the segment lengths."""
    start = segment_begins(segments).flatten().nonzero().squeeze(1)
    lengths = torch.diff(start, append=start.new_tensor([segments.numel()]))
    index = start[:, None] + torch.arange(int(lengths.max()), device=segments.device)
    return index.clamp(max=segments.numel() - 1), lengths
