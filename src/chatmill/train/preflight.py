"""Before the first step: the data held against the model, and the model made or opened.

What does not fit is one line, before anything is computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from chatmill.errors import DataError, UsageError
from chatmill.load.loader import EpisodeLoader
from chatmill.load.plan import Cursor, LoadPlan
from chatmill.load.source import DataSource
from chatmill.store.layout import TOKENIZER_STATE, TOKENS
from chatmill.store.primer_cache import PrimerCache
from chatmill.train.checkpoint import model_folder
from chatmill.train.config import TrainConfig
from chatmill.train.gpt import GPT
from chatmill.train.load_model import open_model
from chatmill.train.model import CausalModel
from chatmill.train.sharded_tensors import file_info

TRAINING = "training.json"
"""What a model's folder says of how the model was trained: with which tokenizer, format and data."""
TOKENIZER_JSON = "tokenizer.json"
WEIGHTS = (".safetensors", ".bin")
SCAN = 1 << 24


def make_model(
    config: TrainConfig, vocab_size: int, *, compute: torch.dtype | None, device: torch.device
) -> CausalModel:
    """The model that a config asks for, in float32 on the CPU: fresh, opened, or with fresh adapters.

    `MemoryError` if the host cannot hold a fresh one, with gradients and optimizer where `device` is the host.
    """
    torch.manual_seed(config.seed)
    if config.init_from_model is None:
        sizes = config.sizes(vocab_size)
        # On the host: weights, gradients, and AdamW's two moments. Sharded ranks have the weights whole for a moment.
        tensors = 4 if device.type == "cpu" and config.parallel != "fsdp" else 1
        if 4 * tensors * sizes.num_parameters > available_memory():
            raise MemoryError
        return GPT(sizes, compute=compute)
    folder = model_folder(config.init_from_model)
    model = open_model(folder, compute=compute)
    adapters = config.lora_sizes()
    if adapters is None:
        return model
    from chatmill.train.hf import HFModel
    from chatmill.train.lora import LoraModel

    if type(model) is not HFModel:
        raise UsageError(f"{folder}: is no Hugging Face model, and lora is given; adapters go onto one")
    return LoraModel.on(model, adapters)


def available_memory() -> float:
    """Bytes that this process could still fill. Linux hands out more, and ends the process that fills it."""
    try:
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        return sum(int(size) << 10 for name, size, *_ in lines if name in ("MemAvailable:", "SwapFree:"))
    except OSError:
        return float("inf")


def weights_hash(folder: Path) -> str:
    """The hash that stands for all files of weights in a model's folder."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS)
    said = [[path.name, file_info(path).sha256] for path in paths]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def check_fit(config: TrainConfig, loader: EpisodeLoader, model: CausalModel, *, tokenizer_sha256: str | None) -> None:
    """Raise `DataError` for data that the model cannot be trained on, with all that is wrong.

    `tokenizer_sha256` is what is known of the tokenizer that the model was trained with.
    """
    faults = list(unknown_ids(loader.dataset_dir, loader.sources, model))
    if not faults and (pad := padding_of(loader)) >= model.vocab_size:
        faults.append(f"rows are filled up with token {pad}, the model knows {model.vocab_size}; set pad_token_id")
    if config.block_size > model.max_positions:
        faults.append(
            f"block_size is {config.block_size}, the model has {model.max_positions} positions; lower block_size"
        )
    mine = loader.sources[0].tokenizer_sha256
    if config.check_tokenizer and mine is not None and tokenizer_sha256 not in (None, mine):
        faults.append(
            f"{loader.dataset_dir}: was made with tokenizer {mine[:12]}…, "
            f"the model with {str(tokenizer_sha256)[:12]}…; "
            "prepare the data with the model's tokenizer, or set check_tokenizer to false if both are the same"
        )
    if faults:
        raise DataError("; ".join(faults))


def tokenizer_of(config: TrainConfig, loader: EpisodeLoader) -> str | None:
    """The hash of the tokenizer of the model that a config begins with, as far as it can be told."""
    if config.init_from_model is None:
        return None
    folder = model_folder(config.init_from_model)
    said = trained_with(folder)
    if said:
        return said.get("tokenizer_sha256")
    metadata = loader.sources[0].dataset.metadata
    own = folder / TOKENIZER_JSON
    if metadata is None or not own.is_file() or loader.sources[0].dataset.tokenizer_state().get("added_tokens"):
        # Tokens that were added for the data make its tokenizer another one than the model's, and are right there.
        return None
    return file_info(own).sha256


def unknown_ids(dataset_dir: Path, sources: Sequence[DataSource], model: CausalModel) -> Iterator[str]:
    """What is wrong with data that has ids which the model does not know."""
    size = data_vocab_size(sources)
    if size > model.vocab_size:
        yield (
            f"{dataset_dir}: has token ids up to {size - 1}, the model knows {model.vocab_size}; "
            "use the tokenizer of the model, or a model with a larger vocabulary"
        )


def padding_of(loader: EpisodeLoader) -> int:
    """What rows are filled up with, which need not be a token of the data."""
    return loader.plan(loader.split).pad_token_id


def data_vocab_size(sources: Sequence[DataSource]) -> int:
    """One more than the largest id of the data: as it says, else as all its tokens do."""
    if sources[0].vocab_size is not None:
        return sources[0].vocab_size
    return 1 + max(_largest(source) for source in sources)


def _largest(source: DataSource) -> int:
    largest = 0
    for split in source.dataset.splits:
        episodes = source.dataset[split]
        for number in range(len(episodes.shards)):
            tokens = episodes.array(number, TOKENS)
            for at in range(0, len(tokens), SCAN):
                largest = max(largest, int(np.max(tokens[at : at + SCAN])))
    return largest


def trained_with(folder: Path) -> dict[str, Any]:
    """What a model's folder says of its training; nothing if another program wrote it."""
    path = folder / TRAINING
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error}); remove it, or save the model again") from None
    if not isinstance(found, dict) or not isinstance(found.get("tokenizer_sha256"), str | None):
        raise DataError(f"{path}: is no object with a text as tokenizer_sha256; remove it, or save the model again")
    return found


def about_model(loader: EpisodeLoader, *, step: int) -> dict[str, bytes]:
    """Files that go with a model, so that its answers are asked for just as it was trained."""
    source = loader.sources[0]
    about: dict[str, Any] = {
        "dataset": str(loader.dataset_dir),
        "dataset_sha256": loader.sha256,
        "tokenizer_sha256": source.tokenizer_sha256,
        "step": step,
    }
    if isinstance(source.dataset, PrimerCache):
        meta = source.dataset.meta
        about |= {"format": meta.format, "special_token_ids": dict(meta.special_token_ids)}
    elif source.dataset.metadata is not None:
        metadata = source.dataset.metadata
        about |= {
            "format": metadata.format,
            "tokenizer": dict(metadata.tokenizer),
            "special_token_ids": dict(metadata.special_token_ids),
        }
    found = {TRAINING: (json.dumps(about, indent=1) + "\n").encode()}
    state = source.path / TOKENIZER_STATE
    return {**found, TOKENIZER_STATE: state.read_bytes()} if state.is_file() else found


class EpochSteps(NamedTuple):
    """One epoch of an order."""

    steps: int
    left_out: int
    """Episodes at its end that fill no batch."""


def one_pass(plan: LoadPlan) -> EpochSteps | None:
    """One pass over the data; None for an order that has none. `UsageError` if it does not fill a batch."""
    if plan.order.length is None:
        return None
    plan.step(Cursor())
    if plan.config.packing != "none":
        steps = left_out = 0
        for step in plan.one_epoch():
            steps, left_out = steps + 1, len(step.dropped)
        return EpochSteps(steps, left_out)
    steps, rest = divmod(plan.order.length, plan.config.batch_size)
    return EpochSteps(steps, rest) if plan.drop_last else EpochSteps(steps + (rest > 0), 0)
