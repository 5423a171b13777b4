"""Estimate whether a run fits into memory, suggest changes that would make it fit, and stop runs that cannot fit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from chatmill.errors import ChatmillError, UsageError
from chatmill.load.loader import EpisodeLoader
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.config import TrainConfig
from chatmill.train.distributed import World
from chatmill.train.estimate import CONTEXT, CUDA_CONTEXT, GATHERED, GIB, Estimate, Estimator
from chatmill.train.load_model import MODEL_FAMILIES
from chatmill.train.memory import available_memory
from chatmill.train.model_files import is_adapter, model_type, read_model_files
from chatmill.train.optimizers import OPTIMIZER_BYTES
from chatmill.train.preflight import data_vocab_size, padding_of

MARGIN = 0.85
"""A run stops with an error unless this fraction of its estimated memory is available. Estimates are within 15 percent
of measured memory.
"""
MOST_RANKS, SHORTEST_ROW = 1024, 128
NAMES = {
    CONTEXT: "CUDA",
    GATHERED: "gathered by FSDP",
}
FIT_COLUMNS = ("GiB", "size", "at the peak")
SHOWN = 3
"""Maximum number of changes that an error message suggests."""


class DoesNotFitError(ChatmillError):
    """Raised if a run needs more memory than is available."""


@dataclass(frozen=True)
class Change:
    """A change to the config of a run or to its number of ranks, and the memory estimate after the change."""

    keys: Mapping[str, Any]
    ranks: int
    estimate: Estimate

    def flags(self, ranks: int) -> str:
        values = (
            (name, json.dumps(value) if not isinstance(value, str) else value) for name, value in self.keys.items()
        )
        text = [
            f"--{name}" + ("" if value == "true" else f" '{value}'" if " " in value else f" {value}")
            for name, value in values
        ]
        return " ".join(text) + (f" on {self.ranks} GPUs" if self.ranks != ranks else "")


@dataclass(frozen=True)
class Fit:
    """The memory estimate for a run, the available memory, and the changes that would make the run fit."""

    estimate: Estimate
    available: float | None
    """Bytes available on each GPU, or on the host for each rank; None if unknown."""
    changes: tuple[Change, ...] = ()

    @property
    def fits(self) -> bool | None:
        return None if self.available is None else self.estimate.total <= self.available

    @property
    def is_refused(self) -> bool:
        """Whether the available memory is less than 85 percent of the estimate, or less than the weights, gradients and
        optimizer state need.
        """
        if self.available is None:
            return False
        return MARGIN * self.estimate.total > self.available or self.estimate.state > self.available

    def to_json(self) -> dict[str, Any]:
        ranks = self.estimate.ranks
        changes = [
            {
                "flags": each.flags(ranks),
                "keys": dict(each.keys),
                "ranks": each.ranks,
                "total": round(each.estimate.total),
            }
            for each in self.changes
        ]
        available = None if self.available is None else round(self.available)
        return {**self.estimate.to_json(), "available": available, "fits": self.fits, "changes": changes}

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the estimate as table rows: name, GiB, and GiB at the peak."""
        parts = self.estimate.parts.items()
        table = [(NAMES.get(name, name), _gib(part.size), _gib(part.at_peak)) for name, part in parts]
        return [*table, ("total", "", _gib(self.estimate.total))]

    def notes(self) -> Iterator[str]:
        run, where = self.estimate, "GPU" if self.estimate.on_gpu else "rank"
        count = f"{run.ranks} {where}s" if run.ranks > 1 else f"1 {where}"
        yield f"{count}, {run.rows} rows of {run.block_size} tokens at a time; memory use peaks at {run.peak}"
        if run.host:
            yield f"offloaded layer inputs take {_gib(run.host)} GiB of host memory for each GPU"
        if run.approximate is not None:
            yield f"activations are approximate: {run.approximate}"
        if self.available is None:
            yield "pass --gpu_memory GIB to check whether the run fits"
            return
        there = f"{_gib(self.available)} GiB"
        if self.fits:
            yield f"fits: {there} available"
            if not run.on_gpu:
                yield "this is an estimate for the CPU; pass --gpu_memory GIB to estimate the run on a GPU"
            return
        yield f"does not fit: {there} available" if self.is_refused else f"may not fit: {there} available"
        fitting = [each for each in self.changes if each.estimate.total <= self.available]
        for each in fitting:
            yield f"fits with {each.flags(run.ranks)}: {_gib(each.estimate.total)} GiB"
        if not fitting:
            yield "no change or combination of changes makes the run fit"

    def refusal(self) -> str:
        """Explain why the run does not fit, and which changes would make it fit."""
        run = self.estimate
        assert self.available is not None
        where = "on each GPU" if run.ranks > 1 and run.on_gpu else "on the GPU" if run.on_gpu else "of host memory"
        fitting = [each for each in self.changes if each.estimate.total <= self.available][:SHOWN]
        shown = [f"{each.flags(run.ranks)} ({_gib(each.estimate.total)} GiB)" for each in fitting]
        advice = f"the run would fit with {' or '.join(shown)}" if shown else "use a smaller model or more memory"
        return (
            f"the run needs about {_gib(run.total)} GiB {where}, but {_gib(self.available)} GiB are available; "
            f"{advice}; "
            "pass --estimate to see the details, or --check_memory false to run anyway"
        )


def fit_run(estimator: Estimator, config: TrainConfig, *, ranks: int, available: float | None) -> Fit:
    """Estimate the memory of a run; if the run does not fit, find changes that would make it fit, cheapest first."""
    fit = Fit(estimator(config, ranks=ranks), available)
    if fit.fits is not False:
        return fit
    assert available is not None
    changes = list(_changes(estimator, config, ranks, available))
    if all(each.estimate.total > available for each in changes if each.ranks == ranks):
        changes += _together(estimator, config, ranks, available)
    return replace(fit, changes=tuple(changes))


def _changes(estimator: Estimator, config: TrainConfig, ranks: int, available: float) -> Iterator[Change]:
    """Yield individual changes that reduce memory use, cheapest first."""

    def change(**keys: Any) -> Change | None:
        return _change(estimator, config, keys, ranks)

    steps = [
        count
        for count in range(config.gradient_accumulation_steps + 1, config.batch_size // ranks + 1)
        if config.batch_size % (ranks * count) == 0
    ]
    yield from _first_fitting((change(gradient_accumulation_steps=count) for count in steps), available)
    singles: list[dict[str, Any]] = []
    if not config.activation_checkpointing and not config.activation_offload:
        singles.append({"activation_checkpointing": True})
    if not config.activation_offload and estimator.on_gpu:
        singles.append({"activation_offload": True})
    if config.lora is None and not (config.init_from_model and is_adapter(model_folder(config.init_from_model))):
        smaller = [name for name in ("adamw_bf16", "adamw8bit") if _bytes(name) < _bytes(config.optimizer)]
        singles += [{"optimizer": name} for name in smaller]
    singles += _adapter_keys(config)
    for keys in singles:
        if (made := change(**keys)) is not None:
            yield made
    yield from _first_fitting(_more_gpus(estimator, config, {}, ranks), available)
    sizes = []
    size = config.block_size // 2
    while size >= SHORTEST_ROW:
        sizes.append(size)
        size //= 2
    yield from _first_fitting((change(block_size=each) for each in sizes), available)


def _together(estimator: Estimator, config: TrainConfig, ranks: int, available: float) -> Iterator[Change]:
    """Find a combination of changes that makes the run fit: add changes one by one, then remove unnecessary ones."""

    def fitting(keys: Mapping[str, Any]) -> Change | None:
        made = _change(estimator, config, keys, ranks)
        return made if made is not None and made.estimate.total <= available else None

    options: list[dict[str, Any]] = [{"gradient_accumulation_steps": config.batch_size // ranks}]
    options += [{"activation_checkpointing": True}, *([{"activation_offload": True}] if estimator.on_gpu else [])]
    if config.lora is None:
        options.append({"optimizer": "adamw8bit"})
    keys: dict[str, Any] = {}
    for option in [*options, *_adapter_keys(config)]:
        keys |= option
        if "lora" in option:
            # Adapters have little optimizer state, so the memory-saving optimizer is not needed.
            keys.pop("optimizer", None)
        if (best := fitting(keys)) is not None:
            for name in ("activation_offload", "activation_checkpointing", "gradient_accumulation_steps"):
                best = fitting({each: value for each, value in best.keys.items() if each != name}) or best
            yield best
            return
    keys = {name: value for option in options[1:] for name, value in option.items()}
    yield from (
        each
        for each in _first_fitting(_more_gpus(estimator, config, keys, ranks), available)
        if each.estimate.total <= available
    )


def _adapter_keys(config: TrainConfig) -> list[dict[str, Any]]:
    """Return the config keys for LoRA and for QLoRA, except those that the run already uses or does not support."""
    if config.init_from_model is None or config.fp8 or config.quantize != "none":
        return []
    folder = model_folder(config.init_from_model)
    if is_adapter(folder) or model_type(folder) in MODEL_FAMILIES:
        return []
    adapters = [] if config.lora is not None else [{"lora": {"r": 16}}]
    quantized = {"quantize": "nf4"} if config.lora is not None else {"lora": {"r": 16}, "quantize": "nf4"}
    return [*adapters, *([quantized] if config.parallel == "ddp" else [])]


def _more_gpus(
    estimator: Estimator, config: TrainConfig, keys: Mapping[str, Any], ranks: int
) -> Iterator[Change | None]:
    """Yield changes that enable FSDP, with an increasing number of GPUs."""
    if not estimator.on_gpu or config.quantize != "none" or config.optimizer in ("adafactor", "muon"):
        return
    count = 2 if ranks == 1 or config.parallel == "fsdp" else ranks
    while count <= min(MOST_RANKS, config.batch_size):
        if count > ranks or (count == ranks and config.parallel != "fsdp"):
            yield _change(estimator, config, {**keys, "parallel": "fsdp"}, count)
        count *= 2


def _change(estimator: Estimator, config: TrainConfig, keys: Mapping[str, Any], ranks: int) -> Change | None:
    try:
        return Change(dict(keys), ranks, estimator(replace(config, **keys), ranks=ranks))
    except UsageError:
        # Skip a change if the new config is invalid or its rows cannot be divided among the ranks.
        return None


def _first_fitting(changes: Iterator[Change | None], available: float) -> Iterator[Change]:
    """Yield the first change that makes the run fit, or the last change if no change makes it fit."""
    last = None
    for each in changes:
        last = each or last
        if each is not None and each.estimate.total <= available:
            break
    if last is not None:
        yield last


def _bytes(optimizer: str) -> int:
    return OPTIMIZER_BYTES[optimizer].total


# Memory check.


def estimate_run(config: TrainConfig, *, gpus: int | None = None, gpu_memory: float | None = None) -> Fit:
    """Estimate whether a run fits on `gpus` GPUs of `gpu_memory` GiB each, or by default on this machine.

    >>> config = TrainConfig(n_layer=28, n_embd=1024, n_head=16, n_ffn=3072, vocab_size=151936, block_size=4096)
    >>> fit = estimate_run(config, gpu_memory=24)
    >>> fit.fits, [change.flags(1) for change in fit.changes][0]
    (False, '--gradient_accumulation_steps 2')
    """
    config, _ = config.with_accumulation()
    elsewhere = gpus is not None or gpu_memory is not None
    if config.device == "cpu" and elsewhere:
        raise UsageError(
            f"device is cpu, but --{'gpus' if gpus else 'gpu_memory'} applies to GPUs; remove one of these flags"
        )
    is_here = torch.cuda.is_available()
    on_gpu = config.device == "cuda" or elsewhere or (config.device == "auto" and is_here)
    ranks = gpus or int(os.environ.get("WORLD_SIZE", 1))
    available: float | None = None
    if gpu_memory is not None:
        available = gpu_memory * GIB
    elif is_here or not on_gpu:
        available = memory_here(torch.device("cuda" if on_gpu else "cpu"))
    estimator = Estimator(on_gpu=on_gpu, vocab_size=_data_vocab_size(config))
    return fit_run(estimator, config, ranks=ranks, available=available)


def _data_vocab_size(config: TrainConfig) -> int | None:
    if config.dataset_dir is None:
        return None
    with closing(EpisodeLoader(config.dataset_dir, config)) as loader:
        return max(data_vocab_size(loader.sources), padding_of(loader) + 1)


def memory_here(device: torch.device) -> float:
    """Return the bytes available to a run on this device: GPU memory that other processes do not use, or host memory
    per rank.
    """
    if device.type != "cuda":
        return available_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    free, total = torch.cuda.mem_get_info(device)
    # Count the memory that CUDA and torch already use in this process as available, because the estimate includes it.
    return min(total, free + torch.cuda.memory_reserved(device) + CUDA_CONTEXT)


def check_run_memory(config: TrainConfig, vocab_size: int, world: World) -> None:
    """Raise `DoesNotFitError` if a run cannot fit into the memory of its device; called before the model is loaded."""
    if not config.check_memory:
        return
    available = memory_here(world.device)
    try:
        on_gpu = world.device.type == "cuda"
        if _upper_bound(config, vocab_size, world.size, on_gpu=on_gpu) < available / 2:
            return
        estimator = Estimator(on_gpu=on_gpu, vocab_size=vocab_size)
        fit = fit_run(estimator, config, ranks=world.size, available=available)
    except Exception:
        # A failed estimate must not stop a run. If the model itself has a problem, loading it reports the problem.
        return
    if fit.is_refused:
        raise DoesNotFitError(fit.refusal())


def _upper_bound(config: TrainConfig, vocab_size: int, ranks: int, *, on_gpu: bool) -> float:
    """Compute an upper bound on a run's memory in bytes from weight shapes alone. This estimate is quick to compute and
    is sufficient for most runs.
    """
    rows = config.batch_size // ranks // config.gradient_accumulation_steps
    if config.init_from_model is None:
        sizes = config.sizes(vocab_size)
        heads = (sizes.n_head + sizes.kv_heads) * sizes.head_size
        widths = sizes.n_layer * (5 * sizes.n_embd + 3 * sizes.ffn + 2 * heads) + sizes.n_embd + sizes.vocab_size
        count = sizes.num_parameters
    else:
        tensors = _stored(model_folder(config.init_from_model))
        count = sum(each.size for each in tensors)
        widths = sum(sum(each.shape[-2:]) for each in tensors if len(each.shape) > 1)
    # Count 20 bytes per weight, four times the float32 inputs and outputs of all matrices, and a float32 mask. On a
    # GPU, add 3 GiB for the logits.
    tokens = rows * config.block_size
    return 20.0 * count + 16.0 * tokens * widths + 4.0 * tokens * config.block_size + 3.0 * GIB * on_gpu


def _stored(folder: Path) -> list[Any]:
    if is_adapter(folder):
        from chatmill.train.lora import base_folder

        folder = base_folder(folder)
    return list(read_model_files(folder).tensors.values())


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}"
