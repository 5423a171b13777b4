"""Estimate how much GPU memory, or host memory on a CPU, a training run needs on each rank, before the run starts.

    weights, gradients, optimizer    exact: counted from the shapes of all weights and of the optimizer's state
    activations                      counted from a forward pass without memory (activations.py)
    workspace                        the logits of a chunk and their gradients, or the backward pass of one layer

Memory can peak in the loss, in the backward pass of the last or the first layer, in the gradient of the embedding, or
in the optimizer step; the estimate is the highest of these peaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from chatmill.errors import ChatmillError, UsageError
from chatmill.train.config import TrainConfig
from chatmill.train.load_model import compute_dtype
from chatmill.train.loss import GPU_LOGIT_BYTES, LOGIT_BYTES, MULTIPLE
from chatmill.train.model_shape import ModelShape, WeightShape, layers_of, shape_of_model
from chatmill.train.optimizers import OPTIMIZER_BYTES, fresh_state, make_optimizer

GIB = 2**30
KEPT_BY_COMPILED = 1.02
"""Measured activations of a compiled layer, divided by the counted activations. Fitted to the run 0.6b-own-adamw in
benchmarks/results/gpu.json.
"""
BACKWARD = 0.03
"""Temporary memory in the backward pass of a layer, divided by the activations that the layer keeps. Fitted to the run
8b-hf-lora in benchmarks/results/gpu.json.
"""
CUDA_CONTEXT = 0.6 * GIB
"""GPU memory that the CUDA context uses, in bytes; torch does not count it."""
NCCL = 0.4 * GIB
"""GPU memory that NCCL uses for communication between ranks, in bytes."""
ENTROPY_COPIES = 5
"""Number of float32 copies that the loss makes of a chunk of logits on a CPU. The GPU kernel computes the loss in
place, without copies.
"""
KEPT_BY_FLOAT8 = 0.8
"""Activations that a compiled layer keeps with float8, divided by those without float8. Fitted to the run 1.7b-own-fp8
in benchmarks/results/gpu.json. With float8, torch recomputes more activations.
"""
WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, WORKSPACE, GATHERED, CONTEXT = "activations", "workspace", "gathered", "CUDA"


@dataclass(frozen=True)
class MemoryPart:
    """Memory use of one category, such as gradients or activations, in bytes."""

    size: float
    """Maximum number of bytes in this category during a training step."""
    at_peak: float
    """Number of bytes in this category at the point where the total memory use peaks."""


@dataclass(frozen=True)
class Estimate:
    """Estimated memory use of a training run, in bytes per rank."""

    parts: dict[str, MemoryPart]
    peak: str
    """The point in a training step at which memory use is highest."""
    on_gpu: bool
    ranks: int
    rows: int
    """Rows per micro-batch on each rank."""
    block_size: int
    host: float = 0.0
    """Bytes of host memory per rank for offloaded layer inputs."""
    approximate: str | None = None
    """Why the activation memory is only approximate; None if the activations were counted."""

    @property
    def total(self) -> float:
        return sum(part.at_peak for part in self.parts.values())

    @property
    def tensors(self) -> float:
        """Memory use at the peak in bytes, excluding CUDA memory that torch does not count."""
        return self.total - (self.parts[CONTEXT].at_peak if CONTEXT in self.parts else 0.0)

    @property
    def state(self) -> float:
        """Number of bytes of weights, gradients and optimizer state, which are computed exactly."""
        return sum(self.parts[name].size for name in (WEIGHTS, GRADIENTS, OPTIMIZER))

    def to_json(self) -> dict[str, Any]:
        return {
            "total": round(self.total),
            "parts": {
                name: {"bytes": round(part.size), "at_peak": round(part.at_peak)} for name, part in self.parts.items()
            },
            "peak": self.peak,
            "device": "cuda" if self.on_gpu else "cpu",
            "ranks": self.ranks,
            "rows": self.rows,
            "block_size": self.block_size,
            "host": round(self.host),
            "approximate": self.approximate,
        }


@dataclass(frozen=True)
class _Layer:
    """Memory use of one layer for a micro-batch, in bytes."""

    kept: float
    """Activations kept from the forward to the backward pass."""
    input: float
    casts: float


@dataclass(frozen=True)
class _Counted:
    """The memory use of a model for a micro-batch of one row, cached so that similar configs can be compared
    quickly.
    """

    weights: tuple[WeightShape, ...]
    state: dict[str, tuple[int, int]]
    """Bytes of optimizer state for each trained weight, in tensors and in scalars. FSDP shards the tensors but not the
    scalars.
    """
    layers: tuple[_Layer, ...]
    """Byte counts of each layer for one row."""
    outside: float
    head: WeightShape
    """The weight of the output head, of shape (vocabulary, width)."""
    is_tied: bool
    """Whether the head is tied to the embedding."""
    approximate: str | None

    @property
    def vocab_size(self) -> int:
        return self.head.shape[0]

    @property
    def width(self) -> int:
        return self.head.shape[1]


@dataclass
class Estimator:
    """Estimates the memory use of training runs on GPUs or CPUs. The byte counts of each model are cached."""

    on_gpu: bool
    vocab_size: int | None = None
    """Vocabulary size of the data; required only for new models."""
    _counted: dict[tuple[Any, ...], _Counted] = field(default_factory=dict)

    def __call__(self, config: TrainConfig, *, ranks: int = 1) -> Estimate:
        """Estimate the memory use of a run on each rank. Raise `UsageError` if `batch_size` cannot be divided equally
        among ranks and micro-batches.
        """
        per_step = ranks * config.gradient_accumulation_steps
        if config.batch_size % per_step:
            raise UsageError(
                f"batch_size {config.batch_size} cannot be divided among {ranks} ranks with "
                f"{config.gradient_accumulation_steps} micro-batches each; expected a multiple of {per_step}"
            )
        compute = compute_dtype(config.dtype, torch.device("cuda" if self.on_gpu else "cpu"))
        compiled = self.on_gpu if config.compile is None else config.compile
        key = (
            *(config.init_from_model, config.optimizer, config.quantize, config.block_size, compute, compiled),
            _checkpoints(config),
            repr(config.lora),
            repr(config.sizes(self.vocab_size or 1)) if config.init_from_model is None else None,
        )
        if key not in self._counted:
            self._counted[key] = _count(config, self.vocab_size, compute, on_gpu=self.on_gpu, compiled=compiled)
        return _peak(config, self._counted[key], compute, ranks=ranks, on_gpu=self.on_gpu, compiled=compiled)


def _checkpoints(config: TrainConfig) -> bool:
    return config.activation_checkpointing or config.activation_offload


def _count(
    config: TrainConfig, vocab_size: int | None, compute: torch.dtype | None, *, on_gpu: bool, compiled: bool
) -> _Counted:
    shape = shape_of_model(config, vocab_size, compute=compute)
    size = 4 if compute is None else compute.itemsize
    if shape.model is None:
        return _approximate(shape, config, size, "a model of this architecture cannot be built without its weights")
    head = shape.model.head().weight
    is_tied = any(isinstance(each, nn.Embedding) and each.weight is head for each in shape.model.modules())
    names = {id(parameter): name for name, parameter in shape.model.named_parameters()}
    shape.model.train()
    of_head = next(each for each in shape.weights if each.name == names[id(head)])
    state = _state_bytes(shape, config)
    layers, outside, why = _kept_by_layers(
        shape, config.block_size, size, on_gpu=on_gpu, compiled=compiled, recompute=not _checkpoints(config)
    )
    return _Counted(shape.weights, state, layers, outside, of_head, is_tied, why)


def _kept_by_layers(
    shape: ModelShape, length: int, size: int, *, on_gpu: bool, compiled: bool, recompute: bool
) -> tuple[tuple[_Layer, ...], float, str | None]:
    """Return how many bytes of activations each layer keeps for the backward pass of one row, and how many are kept
    outside the layers. If the numbers are approximate, also return the reason.

    `recompute` has the same meaning as in `CausalModel.compile_blocks`.
    """
    from chatmill.train.activations import count_activations

    model, scale = shape.model, 1.0
    assert model is not None
    try:
        try:
            counted = count_activations(model, 1, length, on_gpu=on_gpu)
        except RuntimeError:
            # Some operators, such as those for mixture-of-experts layers, support fake tensors only in bfloat16.
            counted, scale = count_activations(model.bfloat16(), 1, length, on_gpu=on_gpu), size / 2
    except ChatmillError:
        raise
    except Exception as error:
        # Fall back to an approximation if the architecture uses operations that fake tensors do not support.
        return _by_matrices(shape.weights, length, size), 0.0, f"counting failed ({type(error).__name__})"
    if not counted.layers:
        return _by_matrices(shape.weights, length, size), 0.0, "the layers of this architecture cannot be located"
    layers = []
    for each in counted.layers:
        kept: float
        if not compiled:
            kept, casts = each.eager, each.casts
        elif recompute:
            kept, casts = KEPT_BY_COMPILED * each.compiled, 0
        else:
            kept, casts = KEPT_BY_COMPILED * each.compiled_inputs, each.casts
        layers.append(_Layer(scale * kept, scale * each.input, casts))
    return tuple(layers), scale * counted.outside, None


def _approximate(shape: ModelShape, config: TrainConfig, size: int, why: str) -> _Counted:
    """Approximate the byte counts from the shapes of the weights. The largest matrix outside the layers is assumed to
    be the output head.
    """
    outside = [each for each in shape.weights if each.layer is None and len(each.shape) == 2]
    head = max(outside, key=lambda each: each.size, default=WeightShape("", (1, 1), 4, False, None))
    each_value = OPTIMIZER_BYTES[config.optimizer].state
    state = {each.name: (each_value * each.size, 0) for each in shape.weights if each.trained}
    layers = _by_matrices(shape.weights, config.block_size, size)
    return _Counted(shape.weights, state, layers, 0.0, head, len(outside) == 1, why)


def _by_matrices(weights: Sequence[WeightShape], length: int, size: int) -> tuple[_Layer, ...]:
    """Approximate the activations that a layer keeps for the backward pass by the inputs and outputs of all its weight
    matrices.
    """
    widths: dict[int, int] = {}
    inputs: dict[int, int] = {}
    for each in weights:
        if each.layer is not None and len(each.shape) >= 2:
            widths[each.layer] = widths.get(each.layer, 0) + sum(each.shape[-2:])
            inputs[each.layer] = min(inputs.get(each.layer, 1 << 62), *each.shape[-2:])
    # Approximate the hidden size of a layer by the smallest dimension of its matrices.
    return tuple(
        _Layer(float(length * size * widths[layer]), float(length * size * inputs[layer]), 0.0)
        for layer in sorted(widths)
    )


def _state_bytes(shape: ModelShape, config: TrainConfig) -> dict[str, tuple[int, int]]:
    """Return the size of the optimizer state of each trained weight in bytes, separately for tensors and scalars. The
    state is created by the real optimizer on fake tensors.
    """
    from chatmill.train.activations import few_fake_layers

    assert shape.model is not None
    sizes: dict[tuple[Any, ...], tuple[int, int]] = {}
    layers = layers_of(shape.model)
    # Keep all layers for Muon, because it calls `model.blocks`, which locates the layers by their expected count.
    with few_fake_layers(shape.model, of_each=len(layers) if config.optimizer == "muon" else 1):
        inside = {id(each) for layer in layers for each in layer.parameters()}
        optimizer = make_optimizer(shape.model, config)
        for parameter in shape.model.parameters():
            key = tuple(parameter.shape), parameter.itemsize, id(parameter) in inside
            if parameter.requires_grad and key not in sizes:
                state = fresh_state(optimizer, parameter).values()
                numbers = sum(tensor.nbytes for tensor in state if not tensor.ndim)
                sizes[key] = sum(tensor.nbytes for tensor in state) - numbers, numbers
    trained = (each for each in shape.weights if each.trained)
    return {each.name: sizes[each.shape, each.bytes_each, each.layer is not None] for each in trained}


def _peak(
    config: TrainConfig,
    counted: _Counted,
    compute: torch.dtype | None,
    *,
    ranks: int,
    on_gpu: bool,
    compiled: bool,
) -> Estimate:
    """Find the point in a training step at which memory use is highest, and return the estimate for that point."""
    rows = config.batch_size // ranks // config.gradient_accumulation_steps
    tokens, size = rows * config.block_size, 4 if compute is None else compute.itemsize
    sharded = config.parallel == "fsdp" and ranks > 1
    shards = ranks if sharded else 1
    trained = [each for each in counted.weights if each.trained]
    weights = sum(each.bytes * each.share(shards) for each in counted.weights)
    optimizer = 0.0
    for each in trained:
        state, numbers = counted.state[each.name]
        optimizer += state * each.share(shards) + numbers

    def gradients_of(chosen: Callable[[WeightShape], bool]) -> float:
        return sum(each.bytes * each.share(shards) for each in trained if chosen(each))

    gradients = gradients_of(lambda each: True)
    # Gradients exist before the backward pass if they are summed over micro-batches or stored in DDP buckets.
    early = config.gradient_accumulation_steps > 1 or (ranks > 1 and not sharded)
    checkpointing = _checkpoints(config)
    # Do not count cast weights with FSDP, which casts weights when it gathers them and then frees the copies.
    part = rows * (KEPT_BY_FLOAT8 if config.fp8 and not checkpointing else 1.0)
    layers = [_Layer(part * e.kept, rows * e.input, 0.0 if sharded else e.casts) for e in counted.layers]
    kept = [e.input if checkpointing else e.kept + e.casts for e in layers]
    offloaded = sum(kept) if config.activation_offload and on_gpu else 0.0
    if offloaded:
        kept = [0.0] * (len(kept) - 2) + kept[-2:]
    hidden = tokens * counted.width * size
    outside = rows * counted.outside + hidden
    largest = max((each.size for each in counted.weights if each.layer is not None), default=0)
    packed = largest * size if config.quantize != "none" else 0.0

    def backward(layer: _Layer, number: int) -> float:
        own = gradients_of(lambda each: each.layer == number) if early else 0.0
        again = layer.kept + layer.casts if checkpointing else 0.0
        return again + layer.kept * BACKWARD + own + packed

    head = counted.width * counted.vocab_size
    head_gradient = head * counted.head.bytes_each / shards if counted.head.trained else 0.0
    at_loss = _loss(counted, tokens, size, on_gpu=on_gpu)
    steps = _optimizer_workspace(config, trained, on_gpu=on_gpu)
    last, first = (layers[-1], layers[0]) if layers else (_Layer(0, 0, 0),) * 2
    before_first = gradients_of(lambda each: each.layer != 0)
    second = counted.head.bytes_each * head if counted.is_tied and counted.head.trained else 0.0
    start = gradients if early else 0.0
    # List the gradients, activations and workspace at each point where memory use may peak.
    moments = {
        "the loss": (start, sum(kept) + outside, at_loss),
        "the backward pass of the last layer": (
            max(start, head_gradient),
            sum(kept) + outside,
            hidden + backward(last, len(layers) - 1),
        ),
        "the backward pass of the first layer": (
            max(start, before_first),
            (kept[0] if kept else 0.0) + rows * counted.outside,
            hidden + backward(first, 0),
        ),
        "the gradient of the embedding": (gradients, 0.0, second + hidden),
        "the optimizer step": (gradients, 0.0, steps),
    }
    gathered = _gathered(counted.weights, size if compute is not None else None) if sharded else 0.0
    peak = max(moments, key=lambda name: sum(moments[name]) - (gathered if name == "the optimizer step" else 0.0))
    at_peak = moments[peak]
    parts = {
        WEIGHTS: MemoryPart(weights, weights),
        GRADIENTS: MemoryPart(gradients, at_peak[0]),
        OPTIMIZER: MemoryPart(optimizer, optimizer),
        ACTIVATIONS: MemoryPart(sum(kept) + outside, at_peak[1]),
        WORKSPACE: MemoryPart(max(each[2] for each in moments.values()), at_peak[2]),
    }
    if sharded:
        parts[GATHERED] = MemoryPart(gathered, 0.0 if peak == "the optimizer step" else gathered)
    if on_gpu:
        context = CUDA_CONTEXT + (NCCL if ranks > 1 else 0.0)
        parts[CONTEXT] = MemoryPart(context, context)
    return Estimate(
        parts,
        peak,
        on_gpu=on_gpu,
        ranks=ranks,
        rows=rows,
        block_size=config.block_size,
        host=offloaded,
        approximate=counted.approximate,
    )


def _loss(counted: _Counted, tokens: int, size: int, *, on_gpu: bool) -> float:
    """Return the bytes that the output head and the cross-entropy loss need for one chunk of tokens, if all tokens are
    trained.
    """
    positions = -(-tokens // MULTIPLE) * MULTIPLE
    limit = GPU_LOGIT_BYTES if on_gpu else LOGIT_BYTES
    chunk = min(positions, max(1, limit // (size * counted.vocab_size * MULTIPLE)) * MULTIPLE)
    logits = chunk * counted.vocab_size * (size if on_gpu else size + 4 * ENTROPY_COPIES)
    matrix = counted.vocab_size * counted.width
    cast = matrix * size if counted.head.bytes_each != size else 0.0
    # Count the weight gradient, which is summed in float32, and the weight gradient of one chunk.
    gradient = matrix * (4 + size) if counted.head.trained else 0.0
    # Add the selected hidden states, their gradient in float32, and the hidden-state gradient of one chunk.
    return logits + cast + gradient + positions * counted.width * (size + 4) + chunk * counted.width * size


def _optimizer_workspace(config: TrainConfig, trained: Sequence[WeightShape], *, on_gpu: bool) -> float:
    """Return the maximum size of the temporary tensors in an optimizer step, in bytes."""
    largest = max((each.size for each in trained), default=0)
    matrix = max((each.size for each in trained if each.layer is not None and len(each.shape) == 2), default=0)
    match config.optimizer:
        case "adafactor":
            return 12.0 * largest
        case "muon":
            # Count float32 updates, and four bfloat16 matrices for the Newton-Schulz iteration.
            return 12.0 * matrix
        case "adamw8bit" | "adamw_bf16" if not on_gpu:
            return 40.0 * min(largest, 1 << 20)
        case _:
            return 0.0


def _gathered(weights: Sequence[WeightShape], size: int | None) -> float:
    """Return the number of bytes that FSDP needs for gathered weights and unreduced gradients. FSDP gathers all weights
    outside the layers, and the weights of two layers at a time in the compute dtype.
    """
    layers: dict[int, float] = {}
    for each in weights:
        if each.layer is not None:
            copies = 2 * (size or each.bytes_each) + (((size or each.bytes_each) + 4) if each.trained else 0)
            layers[each.layer] = layers.get(each.layer, 0.0) + each.size * copies
    outside = sum(each.bytes + (4.0 * each.size if each.trained else 0.0) for each in weights if each.layer is None)
    return outside + max(layers.values(), default=0.0)
