"""Count the bytes that a forward pass keeps for the backward pass, without computing or allocating any tensors.

The model runs once on fake tensors, which have shapes and dtypes but no storage. Hooks record each tensor that autograd
saves. Of the layers with identical weight shapes, at most two run, because they save the same number of bytes. Counting
fails if an architecture uses operations that do not support fake tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chatmill.train.gpt import GPT
from chatmill.train.hf import HFModel
from chatmill.train.model import CausalModel
from chatmill.train.model_shape import layers_of
from chatmill.train.quiet import quiet_logs

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_grouped_mm")
"""Operators whose results a compiled layer keeps."""
ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable")
"""Attention operators. A compiled layer keeps the results of these operators and, on a GPU, also their inputs."""
OUTSIDE = -1
"""Layer index for tensors that are created outside the layers."""
COUNTED = "chatmill_counted"


@dataclass(frozen=True)
class LayerBytes:
    """Number of bytes that one layer keeps until its backward pass."""

    eager: int
    """Bytes of activations that autograd saves."""
    compiled: int
    """Bytes of activations that a compiled layer keeps; it recomputes the results of elementwise operators."""
    compiled_inputs: int
    """Like `compiled`, but the layer also keeps the inputs of matrix products, as torch does by default."""
    input: int
    """Bytes of the layer's input, which is all that activation checkpointing keeps."""
    casts: int
    """Bytes of weight copies in compute precision that an eager layer keeps."""


@dataclass(frozen=True)
class ActivationBytes:
    """Number of bytes that a forward pass of a model keeps until the backward pass."""

    layers: tuple[LayerBytes, ...]
    outside: int
    """Bytes kept outside the layers or shared by several layers, such as masks, rotary angles and the final norm."""


def count_activations(model: CausalModel, rows: int, length: int, *, on_gpu: bool) -> ActivationBytes:
    """Count the bytes that a forward pass over tokens of shape (rows, length) keeps for the backward pass.

    The weights of `model` are replaced with fake tensors. With `on_gpu`, assume FlexAttention, which does not
    materialize the mask.
    """
    blocks = layers_of(model)
    shapes = [_shape_of(block) for block in blocks]
    # Run two layers of each shape and use the counts of the second. The first layer of the model is a special case,
    # because its input is not the output of another layer.
    with few_fake_layers(model, of_each=2) as counted, quiet_logs(logging.ERROR):
        recorder = _Recorder(model, [blocks[index] for index in counted], on_gpu=on_gpu)
        with recorder.running():
            x, positions, segments = (torch.zeros(rows, length, dtype=torch.long) for _ in range(3))
            if isinstance(model, HFModel):
                model._attend_by(_registered(recorder) if on_gpu and model.uses_flex() else "sdpa")
                model._states(x, positions)
            elif isinstance(model, GPT) and on_gpu:
                # Without a mask, SDPA saves the same tensors as FlexAttention.
                model._run(x, positions, None, None)
            else:
                model.hidden(x, positions, segments)
    kept = recorder.layers()
    by_shape = {shapes[index]: kept[number] for number, index in enumerate(counted)}
    return ActivationBytes(tuple(by_shape[shape] for shape in shapes), recorder.outside())


def _use_fake_weights(model: nn.Module) -> None:
    fakes: dict[int, Any] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    is_weight = isinstance(tensor, nn.Parameter)
                    fakes[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_weight else fake
                table[name] = fakes[id(tensor)]


def _shape_of(block: nn.Module) -> tuple[Any, ...]:
    """Return a key for a layer; layers with equal keys keep the same number of bytes."""
    weights = ((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())
    return type(block).__name__, getattr(block, "attention_type", None), *weights


@contextmanager
def few_fake_layers(model: CausalModel, *, of_each: int) -> Iterator[list[int]]:
    """Give the model fake weights, and keep at most `of_each` layers with equal weight shapes; yield their indices."""
    blocks = layers_of(model)
    shapes = [_shape_of(block) for block in blocks]
    kept = [index for index, shape in enumerate(shapes) if shapes[:index].count(shape) < of_each]
    replaced = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ModuleList) and 0 < len(blocks) == len(child) and child[0] is blocks[0]:
                setattr(module, name, nn.ModuleList(blocks[index] for index in kept))
                replaced.append((module, name, child))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            _use_fake_weights(model)
            yield kept
    finally:
        for module, name, child in replaced:
            setattr(module, name, child)


class _Recorder(TorchDispatchMode):
    """Records the tensors that autograd saves in each layer, and the inputs from which each tensor was computed."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], *, on_gpu: bool) -> None:
        super().__init__()
        self._on_gpu = on_gpu
        self._blocks = blocks
        self._where = OUTSIDE
        self._sizes: dict[int, int] = {}
        self._alive: list[Any] = []
        self._born: dict[int, int] = {}
        self._parents: dict[int, list[int]] = {}
        """Maps each tensor that a compiled layer can recompute to the inputs of the operator that computed it."""
        self._stored: set[int] = set()
        """Tensors that a compiled layer keeps."""
        self._multiplied: set[int] = set()
        """Inputs of matrix products, attention and custom operators, which a compiled layer materializes."""
        self._same: dict[int, int] = {}
        """Maps repeated casts of a tensor to the first cast; a compiled layer casts only once."""
        self._cast_to: dict[tuple[int, torch.dtype], int] = {}
        self._weights = {self._key(each) for each in chain(model.parameters(), model.buffers())}
        self._casts: set[int] = set()
        """Tensors computed only from weights, such as weights cast to compute precision."""
        self._saved: list[dict[int, None]] = [{} for _ in (*blocks, OUTSIDE)]
        self._inputs = [0] * len(blocks)

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            # Keep the storage alive, because the address of a freed storage could be reused.
            self._alive.append(storage)
            self._sizes[key] = storage.nbytes()
            self._born[key] = self._where
        return key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [self._key(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        library, _, name = func._schema.name.partition("::")
        is_computed = name in PRODUCTS or name in ATTENTION or library != "aten"
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (key := self._key(tensor)) not in inputs:
                if inputs and all(each in self._weights or each in self._casts for each in inputs):
                    self._casts.add(key)
                if func is torch.ops.aten._to_copy.default:
                    first = self._cast_to.setdefault((inputs[0], tensor.dtype), key)
                    if self._sizes[first] == self._sizes[key]:
                        self._same[key] = first
                if is_computed:
                    self.store(key, *(inputs if self._on_gpu and name in ATTENTION else ()))
                    self._multiplied.update(inputs)
                else:
                    self._parents[key] = inputs
        return out

    def store(self, *keys: int) -> None:
        """Record that a compiled layer keeps the tensors with these keys."""
        self._stored.update(keys)

    def store_tensors(self, *tensors: Any) -> None:
        self.store(*(self._key(each) for each in tensors if isinstance(each, Tensor)))

    @contextmanager
    def running(self) -> Iterator[None]:
        hooks = []
        for number, block in enumerate(self._blocks):
            hooks += [
                block.register_forward_pre_hook(self._enter(number), with_kwargs=True),
                block.register_forward_hook(self._leave),
            ]
        try:
            with torch.enable_grad(), saved_tensors_hooks(self._save, lambda tensor: tensor), self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, number: int) -> Any:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            # A compiled layer cannot recompute its own inputs.
            self.store_tensors(*tensors)
            if tensors:
                self._inputs[number] = tensors[0].nbytes
                # A layer keeps its input for the backward pass, so count the input as part of the layer.
                self._born[self._key(tensors[0])] = number
            self._where = number

        return enter

    def _leave(self, *_: Any) -> None:
        self._where = OUTSIDE

    def _save(self, tensor: Tensor) -> Tensor:
        key = self._key(tensor)
        if key not in self._weights:
            self._saved[self._where][key] = None
        return tensor

    def layers(self) -> list[LayerBytes]:
        return [self._layer(number) for number in range(len(self._blocks))]

    def _layer(self, number: int) -> LayerBytes:
        own = {key for key in self._saved[number] if self._born[key] != OUTSIDE}
        casts = own & self._casts
        eager = own - casts
        compiled, with_inputs = (self._cut(eager, stored) for stored in (self._stored, self._stored | self._multiplied))
        return LayerBytes(self._size(eager), compiled, with_inputs, self._inputs[number], self._size(casts))

    def _cut(self, needed: set[int], stored: set[int]) -> int:
        """Return the minimum number of bytes to keep so that all needed tensors can be recomputed.

        Like torch.compile, find a minimum cut. In the graph, each tensor is an edge, and the capacity of the edge is
        the size of the tensor in bytes. Cutting an edge means keeping its tensor.
        """
        import networkx  # type: ignore[import-untyped]

        graph = networkx.DiGraph()
        waiting, seen = [self._same.get(key, key) for key in needed], set[int]()
        for key in waiting:
            graph.add_edge((key, "out"), "backward")
        while waiting:
            key = waiting.pop()
            if key in seen:
                continue
            seen.add(key)
            graph.add_edge((key, "in"), (key, "out"), capacity=self._sizes[key])
            if key in stored or key not in self._parents:
                graph.add_edge("forward", (key, "in"))
                continue
            for each in (self._same.get(parent, parent) for parent in self._parents[key]):
                if each not in self._weights and each not in self._casts and self._born[each] != OUTSIDE:
                    graph.add_edge((each, "out"), (key, "in"))
                    waiting.append(each)
        return networkx.minimum_cut_value(graph, "forward", "backward") if needed else 0

    def outside(self) -> int:
        shared = {key for saved in self._saved for key in saved if self._born[key] == OUTSIDE}
        return self._size(shared | set(self._saved[OUTSIDE]))

    def _size(self, keys: set[int]) -> int:
        return sum(self._sizes[key] for key in keys)


class _FlexAttention(torch.autograd.Function):
    """Stand-in for FlexAttention that saves the same tensors: queries, keys, values, output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise AssertionError("only the forward pass is counted")


def _registered(recorder: _Recorder) -> str:
    """Register `_FlexAttention` as a transformers attention function; return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        q, k = q.to(v.dtype), k.to(v.dtype)
        out = _FlexAttention.apply(q, k, v)
        # A compiled layer keeps the inputs and the output of FlexAttention for the backward pass.
        recorder.store_tensors(q, k, v, out)
        # transformers expects a result of shape (rows, length, heads, size).
        return out.transpose(1, 2), None

    AttentionInterface.register(COUNTED, attention)
    AttentionMaskInterface.register(COUNTED, lambda *args, **kwargs: None)
    return COUNTED
