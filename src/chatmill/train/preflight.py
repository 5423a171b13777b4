"""Preflight checks: make or open the model, and check that the data fits it before anything is computed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chatmill.errors import DataError, one_line
from chatmill.load.loader import EpisodeLoader
from chatmill.load.plan import Cursor, LoadPlan
from chatmill.load.source import DataSource
from chatmill.plain_file import read_plain
from chatmill.store.layout import TOKENIZER_STATE, TOKENS
from chatmill.store.metadata import Metadata
from chatmill.store.primer_cache import PrimerCache
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.config import TrainConfig
from chatmill.train.gpt import GPT
from chatmill.train.load_model import open_model
from chatmill.train.memory import available_memory, check_memory
from chatmill.train.model import CausalModel
from chatmill.train.model_files import check_folder
from chatmill.train.sharded_tensors import file_info

TRAINING = "training.json"
"""The file in a model folder that says how the model was trained: tokenizer, format and data."""
TOKENIZER_JSON = "tokenizer.json"
WEIGHTS = ".safetensors"
SCAN = 1 << 24


def make_model(
    config: TrainConfig, vocab_size: int, *, compute: torch.dtype | None, device: torch.device
) -> CausalModel:
    """The model of a config, in float32 on the CPU: fresh, from a folder, or with fresh adapters.

    `MemoryError` if the host cannot hold a fresh one, with gradients and optimizer where `device` is the host.
    """
    torch.manual_seed(config.seed)
    # On the host: weights, gradients, and AdamW's two moments. Sharded ranks have the weights whole for a moment.
    tensors = 4 if device.type == "cpu" and config.parallel != "fsdp" else 1
    if config.init_from_model is None:
        sizes = config.sizes(vocab_size)
        if 4 * tensors * sizes.num_parameters > available_memory():
            raise MemoryError
        return GPT(sizes, compute=compute)
    folder = model_folder(config.init_from_model)
    model = open_model(folder, compute=compute)
    adapters = config.lora_sizes()
    model = model if adapters is None else model.with_lora(adapters, folder)
    if tensors > 1:
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        check_memory(4 * (tensors - 1) * trained, folder, what="training the model, with AdamW's moments,")
    return model


def weights_hash(folder: Path) -> str:
    """One hash over all weight files of a model folder."""
    check_folder(folder)
    paths = sorted(path for path in folder.iterdir() if path.suffix == WEIGHTS)
    hashes = [[path.name, file_info(path).sha256] for path in paths]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def check_fit(config: TrainConfig, loader: EpisodeLoader, model: CausalModel, *, tokenizer_sha256: str | None) -> None:
    """Raise `DataError` with everything that keeps the model from being trained on this data.

    `tokenizer_sha256` is the tokenizer that the model was trained with, if known.
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
    """The hash of the tokenizer of the model that a config starts from, if known."""
    if config.init_from_model is None:
        return None
    folder = model_folder(config.init_from_model)
    if training := trained_with(folder):
        return training.get("tokenizer_sha256")
    metadata = loader.sources[0].dataset.metadata
    own = folder / TOKENIZER_JSON
    if metadata is None or not own.is_file() or loader.sources[0].dataset.tokenizer_state().get("added_tokens"):
        # Tokens added for the data change the hash of its tokenizer, and that is intended.
        return None
    return file_info(own).sha256


def unknown_ids(dataset_dir: Path, sources: Sequence[DataSource], model: CausalModel) -> Iterator[str]:
    """The fault of data with ids outside the model's vocabulary, if it has some."""
    size = data_vocab_size(sources)
    if size > model.vocab_size:
        yield (
            f"{dataset_dir}: has token ids up to {size - 1}, the model knows {model.vocab_size}; "
            "use the tokenizer of the model, or a model with a larger vocabulary"
        )


def padding_of(loader: EpisodeLoader) -> int:
    """The padding token, which need not be a token of the data."""
    return loader.plan(loader.split).pad_token_id


def data_vocab_size(sources: Sequence[DataSource]) -> int:
    """The vocabulary size of the data: from its metadata, else from its largest token id."""
    if sources[0].vocab_size is not None:
        return sources[0].vocab_size
    return 1 + max(_largest(source) for source in sources)


def _largest(source: DataSource) -> int:
    splits = [source.dataset[split] for split in source.dataset.splits]
    arrays = (split.array(number, TOKENS) for split in splits for number in range(len(split.shards)))
    parts = (tokens[at : at + SCAN] for tokens in arrays for at in range(0, len(tokens), SCAN))
    return max((int(np.max(part)) for part in parts), default=0)


def trained_with(folder: Path) -> dict[str, Any]:
    """What a model folder says of its training; empty if another program wrote it."""
    path = folder / TRAINING
    training = read_optional(path, "remove it, or save the model again")
    if not isinstance(training, dict) or not isinstance(training.get("tokenizer_sha256"), str | None):
        raise DataError(f"{path}: is no object with a text as tokenizer_sha256; remove it, or save the model again")
    return training


def read_optional(path: Path, advice: str) -> Any:
    """The JSON value of a file; an empty object if there is no such file."""
    try:
        return json.loads(read_plain(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {advice}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({one_line(str(error))}); {advice}") from None


def about_model(loader: EpisodeLoader, *, step: int) -> dict[str, bytes]:
    """Files for a model folder, from which prompts can be written just as in training."""
    source = loader.sources[0]
    about: dict[str, Any] = {"dataset": str(loader.dataset_dir), "dataset_sha256": loader.sha256}
    about |= {"tokenizer_sha256": source.tokenizer_sha256, "step": step}
    metadata = source.dataset.meta if isinstance(source.dataset, PrimerCache) else source.dataset.metadata
    if metadata is not None:
        tokenizer = {"tokenizer": dict(metadata.tokenizer)} if isinstance(metadata, Metadata) else {}
        about |= {"format": metadata.format, **tokenizer, "special_token_ids": dict(metadata.special_token_ids)}
    about_files = {TRAINING: (json.dumps(about, indent=1) + "\n").encode()}
    state = source.path / TOKENIZER_STATE
    return {**about_files, TOKENIZER_STATE: state.read_bytes()} if state.is_file() else about_files


def one_pass(plan: LoadPlan) -> tuple[int, int] | None:
    """Steps of one epoch, and the episodes at its end that fill no batch; None for an order that has none.

    `UsageError` if an epoch does not fill a batch.
    """
    if plan.order.length is None:
        return None
    plan.step(Cursor())
    if plan.config.packing != "none":
        steps = left_out = 0
        for step in plan.one_epoch():
            steps, left_out = steps + 1, len(step.dropped)
        return steps, left_out
    steps, remainder = divmod(plan.order.length, plan.config.batch_size)
    return (steps, remainder) if plan.drop_last else (steps + (remainder > 0), 0)
