"""Create or open the model, and check before training starts that the model can be trained on the dataset."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chatmill.errors import DataError, one_line
from chatmill.load.loader import EpisodeLoader
from chatmill.load.source import DataSource
from chatmill.plain_file import read_plain
from chatmill.remote.urls import Place, Url
from chatmill.store.layout import TOKENIZER_STATE, TOKENS
from chatmill.store.metadata import Metadata
from chatmill.store.primer_cache import PrimerCache
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.config import TrainConfig
from chatmill.train.gpt import GPT
from chatmill.train.load_model import open_model
from chatmill.train.memory import available_memory
from chatmill.train.model import CausalModel, WeightPrecision
from chatmill.train.model_files import check_folder
from chatmill.train.optimizers import weights_of
from chatmill.train.sharded_tensors import file_info

TRAINING = "training.json"
"""The file in a model folder that records the tokenizer, chat format and dataset that the model was trained with."""
TOKENIZER_JSON = "tokenizer.json"
WEIGHTS = ".safetensors"
SCAN = 1 << 24


def make_model(config: TrainConfig, vocab_size: int, *, compute: torch.dtype | None) -> CausalModel:
    """Create the model of a training config on the CPU: a new model, or a model from a folder, with new LoRA adapters
    if the config asks for them. Without adapters, the weights have the dtype that the optimizer requires.

    Raises `MemoryError` if a new model does not fit into host memory.
    """
    torch.manual_seed(config.seed)
    if config.init_from_model is None:
        sizes = config.sizes(vocab_size)
        # Check the memory for float32 weights, because new weights are initialized in float32.
        if 4 * sizes.num_parameters > available_memory():
            raise MemoryError
        return GPT(sizes, compute=compute).to(getattr(torch, weights_of(config)))
    folder = model_folder(config.init_from_model)
    adapters = config.lora_sizes()
    weights: WeightPrecision = (
        weights_of(config) if adapters is None else "nf4" if config.quantize == "nf4" else "stored"
    )
    model = open_model(folder, compute=compute, weights=weights)
    return model if adapters is None else model.with_lora(adapters, folder)


def weights_hash(folder: Path) -> str:
    """Return a single hash of all weight files in a model folder."""
    check_folder(folder)
    paths = sorted(path for path in folder.iterdir() if path.suffix == WEIGHTS)
    hashes = [[path.name, file_info(path).sha256] for path in paths]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def check_fit(config: TrainConfig, loader: EpisodeLoader, model: CausalModel, *, tokenizer_sha256: str | None) -> None:
    """Raise a `DataError` that lists all reasons why the model cannot be trained on this data.

    `tokenizer_sha256` is the hash of the tokenizer that the model was trained with, if known.
    """
    faults = list(unknown_ids(loader.dataset_dir, loader.sources, model))
    if not faults and (pad := padding_of(loader)) >= model.vocab_size:
        faults.append(
            f"rows are padded with token {pad}, but the model's vocabulary size is {model.vocab_size}; set pad_token_id"
        )
    if config.block_size > model.max_positions:
        faults.append(
            f"block_size is {config.block_size}, but the model has {model.max_positions} positions; lower block_size"
        )
    mine = loader.sources[0].tokenizer_sha256
    if config.check_tokenizer and mine is not None and tokenizer_sha256 not in (None, mine):
        faults.append(
            f"{loader.dataset_dir}: was prepared with tokenizer {mine[:12]}…, but the model was trained with "
            f"{str(tokenizer_sha256)[:12]}…; prepare the data with the model's tokenizer, or set check_tokenizer to "
            f"false if both give the same token ids"
        )
    if faults:
        raise DataError("; ".join(faults))


def tokenizer_of(config: TrainConfig, loader: EpisodeLoader) -> str | None:
    """Return the hash of the tokenizer that the initial model was trained with, or None if it is unknown."""
    if config.init_from_model is None:
        return None
    folder = model_folder(config.init_from_model)
    if training := trained_with(folder):
        return training.get("tokenizer_sha256")
    metadata = loader.sources[0].dataset.metadata
    own = folder / TOKENIZER_JSON
    if metadata is None or not own.is_file() or loader.sources[0].dataset.tokenizer_state().get("added_tokens"):
        # Do not compare hashes if tokens were added for the data, because added tokens change the hash.
        return None
    return file_info(own).sha256


def unknown_ids(dataset_dir: Place, sources: Sequence[DataSource], model: CausalModel) -> Iterator[str]:
    """Yield an error message if the dataset contains token ids outside the model's vocabulary."""
    size = data_vocab_size(sources)
    if size > model.vocab_size:
        yield (
            f"{dataset_dir}: has token ids up to {size - 1}, but the model's vocabulary size is {model.vocab_size}; "
            "use the tokenizer of the model, or a model with a larger vocabulary"
        )


def padding_of(loader: EpisodeLoader) -> int:
    """Return the id of the token that pads rows. The dataset does not have to contain this token."""
    return loader.plan(loader.split).pad_token_id


def data_vocab_size(sources: Sequence[DataSource]) -> int:
    """Return the vocabulary size from the dataset metadata or, without metadata, the largest token id in the dataset
    plus 1.
    """
    if sources[0].vocab_size is not None:
        return sources[0].vocab_size
    return 1 + max(_largest(source) for source in sources)


def _largest(source: DataSource) -> int:
    splits = [source.dataset[split] for split in source.dataset.splits]
    arrays = (split.array(number, TOKENS) for split in splits for number in range(len(split.shards)))
    parts = (tokens[at : at + SCAN] for tokens in arrays for at in range(0, len(tokens), SCAN))
    return max((int(np.max(part)) for part in parts), default=0)


def trained_with(folder: Path) -> dict[str, Any]:
    """Read training.json from a model folder. Return an empty dict for a model without this file, such as a model that
    another program saved.
    """
    path = folder / TRAINING
    training = read_optional(path, "remove the file, or save the model again")
    if not isinstance(training, dict) or not isinstance(training.get("tokenizer_sha256"), str | None):
        raise DataError(
            f"{path}: expected an object with a string as tokenizer_sha256; remove the file, or save the model again"
        )
    return training


def base_of(folder: Path) -> dict[str, str] | None:
    """Return the folder of the base model of LoRA adapters and the hash of its weights, or None if training.json does
    not record them.
    """
    match trained_with(folder).get("base"):
        case None:
            return None
        case {"folder": str(place), "sha256": str(sha256)} if re.fullmatch("[0-9a-f]{64}", sha256):
            return {"folder": place, "sha256": sha256}
        case other:
            raise DataError(
                f"{folder / TRAINING}: base is {one_line(json.dumps(other))}; expected the folder of a model and the "
                "sha256 of its weights"
            )


def read_optional(path: Path, advice: str) -> Any:
    """Read the JSON value in a file; return an empty dict if the file does not exist."""
    try:
        return json.loads(read_plain(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {advice}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({one_line(str(error))}); {advice}") from None


def about_model(
    loader: EpisodeLoader, *, step: int, base: Mapping[str, str] | None = None, more: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """Return the contents of training.json and tokenizer_state.json for a model folder, by file name. These files
    describe how to render prompts exactly as in training.

    `base` is the folder and the weight hash of the base model, if the model consists of LoRA adapters. `more` contains
    additional entries of training.json.
    """
    source = loader.sources[0]
    about: dict[str, Any] = {"dataset": str(loader.dataset_dir), "dataset_sha256": loader.sha256}
    about |= {"tokenizer_sha256": source.tokenizer_sha256, "step": step}
    metadata = source.dataset.meta if isinstance(source.dataset, PrimerCache) else source.dataset.metadata
    if metadata is not None:
        tokenizer = {"tokenizer": dict(metadata.tokenizer)} if isinstance(metadata, Metadata) else {}
        about |= {"format": metadata.format, **tokenizer, "special_token_ids": dict(metadata.special_token_ids)}
    about |= {} if base is None else {"base": dict(base)}
    about |= more or {}
    about_files = {TRAINING: (json.dumps(about, indent=1) + "\n").encode()}
    state = source.path / TOKENIZER_STATE
    if isinstance(state, Url):
        return {**about_files, TOKENIZER_STATE: source.dataset.stored.read(state)}
    return {**about_files, TOKENIZER_STATE: state.read_bytes()} if state.is_file() else about_files
