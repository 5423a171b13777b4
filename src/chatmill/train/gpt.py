"""chatmill's own GPT, with pre-RMSNorm, rotary position embeddings, grouped-query attention and SwiGLU.

Parameters keep the dtype that they were created with. Hidden states have `compute` precision, or float32 if `compute`
is None. Weights are cast to the precision of the hidden states when they are used. With float32 parameters and bfloat16
compute, the model trains in mixed precision with float32 master weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chatmill.config import keys_of
from chatmill.errors import DataError, UsageError, one_line
from chatmill.train.attention import Mask, attend, segment_mask
from chatmill.train.config import GPTSizes
from chatmill.train.flash import Bounds
from chatmill.train.flash_heads import flash_heads
from chatmill.train.loss import LMHead
from chatmill.train.memory import check_memory
from chatmill.train.model import CausalModel, DecodingCache, SavedPart, WeightPrecision, usable_precision
from chatmill.train.model_files import CONFIG, WEIGHTS, ModelFiles, read_model_files
from chatmill.train.offload import ActivationOffload
from chatmill.train.rotary import rotate, rotations, split_heads
from chatmill.train.sharded_tensors import open_weights
from chatmill.train.weight_dtypes import WeightDtypes, opened_dtype, saved_state, weight_dtypes

KIND = "chatmill-gpt"
"""The `model_type` in the config of a saved model."""
REQUIRED = ("vocab_size", "n_layer", "n_embd", "n_head")
"""Keys that the config of a saved model must have."""
PutInCache: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function that adds keys and values to the cache of a layer and returns all cached keys and values."""


class GPT(CausalModel):
    """A decoder-only transformer; the constructor initializes its weights randomly.

    >>> GPT(GPTSizes(vocab_size=64, n_layer=2, n_embd=32, n_head=4)).num_parameters
    34976
    """

    def __init__(self, sizes: GPTSizes, *, compute: torch.dtype | None = None) -> None:
        super().__init__()
        self.sizes = sizes
        self.vocab_size, self.max_positions = sizes.vocab_size, sizes.max_positions
        self.compute = usable_precision(compute)
        self._stored: WeightDtypes | None = None
        self._checkpoint: Callable[..., Tensor] | None = None
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.n_embd)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.n_layer))
        self.norm = Norm(sizes.n_embd, sizes.norm_eps)
        self.unembedding = None if sizes.tie_weights else Linear(sizes.n_embd, sizes.vocab_size)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize norm weights to 1, and matrices from a normal distribution. Projections into the residual stream
        get a smaller standard deviation.
        """
        for name, parameter in self.named_parameters():
            self.init_weight(name, parameter)

    def init_weight(self, name: str, weight: Tensor) -> None:
        """Initialize one weight; its name determines the standard deviation."""
        if weight.ndim == 1:
            weight.fill_(1)
        else:
            writes = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(weight, std=0.02 / (2 * self.sizes.n_layer) ** 0.5 if writes else 0.02)

    def hidden(self, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        mask = segment_mask(segments, head_size=self.sizes.head_size, dtype=self.compute)
        return self._run(x, positions, mask, None)

    def head(self) -> LMHead:
        return LMHead(self.embedding.weight if self.unembedding is None else self.unembedding.weight)

    def _run(self, x: Tensor, positions: Tensor, mask: Mask | None, cache: KVCache | None) -> Tensor:
        h = self.embedding(x)
        h = h.to(self.compute or torch.float32)
        rotary = rotations(positions, self.sizes.head_size, self.sizes.rope_theta)
        for depth, block in enumerate(self.layers):
            if cache is not None:
                # Shapes change with every generated token, so do not use the layers compiled for training.
                h = block.forward(h, *rotary, mask, partial(cache.put, depth))
            elif self._checkpoint is not None and torch.is_grad_enabled():
                h = self._checkpoint(block, h, *rotary, mask)
            else:
                h = block(h, *rotary, mask)
        return self.norm(h)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def checkpoint_blocks(self, *, offload: bool = False) -> None:
        self._checkpoint = ActivationOffload().checkpoint if offload else partial(checkpoint, use_reentrant=False)

    def prefill(self, ids: Tensor, lengths: Tensor, room: int) -> tuple[Tensor, DecodingCache]:
        rows, length = ids.shape
        cache = KVCache(self, rows, length + room)
        hidden = self._cached(ids, torch.arange(length, device=ids.device).expand(rows, -1), cache)
        cache.lengths = lengths.clone()
        return self.head().logits(hidden[torch.arange(rows, device=ids.device), lengths - 1]), cache

    def step(self, tokens: Tensor, cache: DecodingCache) -> Tensor:
        assert isinstance(cache, KVCache)
        hidden = self._cached(tokens[:, None], cache.lengths[:, None], cache)
        cache.lengths = cache.lengths + 1
        return self.head().logits(hidden[:, 0])

    def _cached(self, ids: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        cache.positions = positions
        slots = torch.arange(cache.size, device=ids.device)
        return self._run(ids, positions, (slots <= positions[:, :, None])[:, None], cache)

    def stored_dtype(self, name: str) -> torch.dtype | None:
        return None if self._stored is None else self._stored[name]

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        self._save_config(folder)
        weights = {name: tensor.detach().contiguous() for name, tensor in (state or saved_state(self)).items()}
        save_file(weights, folder / WEIGHTS)

    def save_parts(self, folder: Path, like: Mapping[str, Tensor]) -> list[SavedPart]:
        self._save_config(folder)
        return [SavedPart((name,), (name,)) for name in like]

    def _save_config(self, folder: Path) -> None:
        config = {"model_type": KIND, **asdict(self.sizes)}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path, *, compute: torch.dtype | None = None, weights: WeightPrecision = "float32") -> GPT:
        """Load a model from a folder written by `save`. The config is compared with the weight files before memory is
        allocated.
        """
        model, files = open_on_meta(folder, compute=compute, weights=weights)
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        with open_weights(files) as rows:
            # Make a copy: the safetensors tensor may be a view of the memory-mapped file, which may change later.
            copied = {name: rows(name)[...].to(dtype, copy=True) for name, dtype in dtypes.items()}
        model.load_state_dict(copied, assign=True)
        return model


def open_on_meta(
    folder: Path, *, compute: torch.dtype | None, weights: WeightPrecision, share: int = 1
) -> tuple[GPT, ModelFiles]:
    """Open a model folder and check its tensors; return the model with parameters on the meta device, and its files.

    The memory check assumes that the weights are divided equally among `share` ranks.
    """
    if weights == "nf4":
        raise UsageError(f"{folder}: is not a Hugging Face model, which nf4 quantization requires")
    files = read_model_files(folder)
    sizes, path = read_sizes(folder, files.config), folder / WEIGHTS
    have, need = {name: tensor.shape for name, tensor in files.tensors.items()}, _shapes(sizes, folder, files)
    if have != need:
        wrong = sorted(name for name in have.keys() | need.keys() if have.get(name) != need.get(name))
        raise DataError(
            f"{path}: {one_line(wrong[0])} does not match {CONFIG} (weights that do not match: {len(wrong)})"
        )
    dtypes = {name: opened_dtype(tensor.dtype, weights) for name, tensor in files.tensors.items()}
    check_memory(sum(tensor.size * dtypes[name].itemsize for name, tensor in files.tensors.items()) / share, folder)
    with torch.device("meta"):
        model = GPT(sizes, compute=compute)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    model._stored = weight_dtypes(files, dict.fromkeys(files.tensors, torch.float32), "stored")
    return model, files


@torch.no_grad()
def draw_weights(model: GPT, parameters: Mapping[str, Tensor], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter with the initial values that it would have in a new `GPT` created with this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in model.modules():
            # Creating a `GPT` first runs the default initialization of its layers. Repeat this initialization and
            # discard the results, so that the weights below get the same random values.
            if isinstance(module, nn.Embedding):
                nn.Embedding(module.num_embeddings, module.embedding_dim)
            elif isinstance(module, nn.Linear):
                Linear(module.in_features, module.out_features)
        for name, parameter in parameters.items():
            weight = torch.empty(parameter.shape)
            model.init_weight(name, weight)
            yield parameter, weight


def _shapes(sizes: GPTSizes, folder: Path, files: ModelFiles) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight. All layers have the same weight shapes, so it is enough to create a one-layer
    model on the meta device.
    """
    try:
        with torch.device("meta"):
            one = GPT(replace(sizes, n_layer=1)).state_dict()
    except (OverflowError, RuntimeError) as error:
        # torch raises one of these errors if a tensor would have more elements than torch supports.
        raise DataError(f"{folder / CONFIG}: these sizes are not valid ({one_line(str(error))})") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in one.items()}
    layer = {name: shapes.pop(name) for name in list(shapes) if name.startswith("layers.0.")}
    if len(files.tensors) != (count := len(shapes) + sizes.n_layer * len(layer)):
        raise DataError(
            f"{folder / WEIGHTS}: has {len(files.tensors):,} tensors; a model with {sizes.n_layer:,} layers, as "
            f"in {CONFIG}, has {count:,}"
        )
    return shapes | {
        name.replace(".0.", f".{number}.", 1): shape for number in range(sizes.n_layer) for name, shape in layer.items()
    }


def read_sizes(folder: Path, config: Mapping[str, Any]) -> GPTSizes:
    path = folder / CONFIG
    known = keys_of(GPTSizes).keys()
    if unknown := sorted(config.keys() - known - {"model_type"}):
        raise DataError(f"{path}: unknown key {one_line(unknown[0])}; expected one of {', '.join(sorted(known))}")
    if missing := [name for name in REQUIRED if name not in config]:
        raise DataError(f"{path}: required keys are missing: {', '.join(missing)}; expected the sizes of a saved model")
    try:
        return GPTSizes(**{name: value for name, value in config.items() if name in known})
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


class Block(nn.Module):
    """A transformer layer: attention and MLP, each with a residual connection."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.attention_norm = Norm(sizes.n_embd, sizes.norm_eps)
        self.attention = Attention(sizes)
        self.mlp_norm = Norm(sizes.n_embd, sizes.norm_eps)
        self.mlp = MLP(sizes)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None, put: PutInCache | None = None) -> Tensor:
        h = h + self.attention(self.attention_norm(h), cos, sin, mask, put)
        return h + self.mlp(self.mlp_norm(h))


class Attention(nn.Module):
    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.heads = [sizes.n_head, sizes.kv_heads, sizes.kv_heads]
        self.head_size, self.eps = sizes.head_size, sizes.norm_eps
        self.qkv = Linear(sizes.n_embd, sum(self.heads) * sizes.head_size)
        self.out = Linear(sizes.n_head * sizes.head_size, sizes.n_embd)
        self.q_norm = Norm(sizes.head_size, sizes.norm_eps) if sizes.qk_norm else None
        self.k_norm = Norm(sizes.head_size, sizes.norm_eps) if sizes.qk_norm else None

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None, put: PutInCache | None) -> Tensor:
        qkv = self.qkv(h)
        if qkv.is_cuda and put is None:
            given = qkv, self._norm_weights(), cos, sin, self.heads, self.eps
            attended = flash_heads(*given, mask) if isinstance(mask, Bounds) else attend(*split_heads(*given), mask)
            return self.out(attended.flatten(-2))
        q, k, v = qkv.unflatten(-1, (-1, self.head_size)).split(self.heads, dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if put is not None:
            k, v = put(k, v)
        return self.out(attend(q, k, v, mask).flatten(-2))

    def _norm_weights(self) -> tuple[Tensor, Tensor] | None:
        return None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)


class MLP(nn.Module):
    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        # Merging the matrix products of gate and up would save less time than concatenating their gradients would cost.
        self.gate = Linear(sizes.n_embd, sizes.ffn)
        self.up = Linear(sizes.n_embd, sizes.ffn)
        self.down = Linear(sizes.ffn, sizes.n_embd)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(h)) * self.up(h))


class Linear(nn.Linear):
    """A linear layer without bias that computes in the precision of its input."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weight.to(h.dtype))


class Norm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, h: Tensor) -> Tensor:
        return F.rms_norm(h.float(), self.weight.shape, self.weight.float(), self.eps).to(h.dtype)


class KVCache:
    """Key-value cache for generation: one tensor of shape (2, rows, slots, heads, size) per layer. The slot of a token
    is its position in the row.

    Rows are right-padded: slots after the end of a row are masked and are overwritten later.
    """

    def __init__(self, model: GPT, rows: int, size: int) -> None:
        self.size = size
        weight, shape = model.embedding.weight, (2, rows, size, model.sizes.kv_heads, model.sizes.head_size)
        dtype = model.compute or torch.float32
        self.layers = [torch.zeros(shape, dtype=dtype, device=weight.device) for _ in model.layers]
        self.lengths = self.positions = torch.empty(0)

    def put(self, depth: int, k: Tensor, v: Tensor) -> Tensor:
        """Store the keys and values of a layer at `positions`; return all cached keys and values of the layer."""
        rows = torch.arange(len(self.positions), device=k.device)[:, None]
        self.layers[depth][:, rows, self.positions] = torch.stack([k, v])
        return self.layers[depth]

    def take(self, rows: Tensor) -> None:
        self.layers = [layer[:, rows] for layer in self.layers]
        self.lengths = self.lengths[rows]
