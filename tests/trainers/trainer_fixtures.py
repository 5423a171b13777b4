"""Functions for tests with other trainers: datasets, models, chatmill's batches and losses, and a rank launcher.

The fixtures `plain`, `weighted` and `model_folder` of conftest.py are created here. torchtitan's environment does not
have transformers, so transformers is imported only where a model is created.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chatmill import EpisodeLoader, InputSource, Job, TrainConfig, prepare_dataset, train_model

VOCAB = 512
"""Vocabulary size of the model; the tokenizer `bytes` with ChatML's control tokens has fewer ids."""
UNPACKED: dict[str, Any] = {"batch_size": 4, "block_size": 128, "use_loss_mask": True}
PACKED: dict[str, Any] = {**UNPACKED, "packing": "bins"}
RATE = 1e-3
STEPS = 20
"""Number of steps whose losses are compared."""
WORDS = ["mill", "stone", "grain", "water", "wheel", "flour", "sack", "miller", "bread", "oven", "salt", "yeast"]


def write_dataset(folder: Path, *, weights: Sequence[float] = (), count: int = 260, val_split: float = 0.1) -> Path:
    rng = random.Random(7)
    lines = []
    for number in range(count):
        messages: list[dict[str, Any]] = []
        for role in ("user", "assistant") * rng.randint(1, 2):
            messages.append({"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))})
            if weights and role == "assistant":
                messages[-1]["weight"] = weights[(number + len(messages)) % len(weights)]
        lines.append(json.dumps({"messages": messages}))
    source = folder.with_suffix(".jsonl")
    source.write_text("\n".join(lines) + "\n")
    prepare_dataset(Job((InputSource((str(source),)),), val_split=val_split, shard_tokens=3000), folder)
    return folder


def save_model(folder: Path) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=256, pad_token_id=0, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


def open_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="sdpa")


def own_batches(
    dataset: Path, config: Mapping[str, Any], steps: int, *, rank: int = 0, world_size: int = 1
) -> list[dict[str, np.ndarray]]:
    loader = EpisodeLoader(dataset, config, rank=rank, world_size=world_size, tensors=False)
    batches = [batch._asdict() for batch in islice(loader, steps)]
    loader.close()
    return batches


def own_losses(dataset: Path, model: Path, config: Mapping[str, Any], *, steps: int = STEPS) -> list[float]:
    """Return the loss of each step of chatmill's own loop: AdamW at a constant learning rate, in float32, on one rank.

    Runs with more ranks or with gradient accumulation must have the same losses.
    """
    return own_run(dataset, model, config, steps=steps)[0]


def own_run(
    dataset: Path, model: Path, config: Mapping[str, Any], *, steps: int = STEPS
) -> tuple[list[float], float | None]:
    adamw = {"beta1": 0.9, "beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.0, "grad_clip": 0.0}
    run = {"max_iters": steps, "learning_rate": RATE, "lr_schedule": "constant", "warmup_iters": 0, "device": "cpu"}
    quiet = {"check_tokenizer": False, "eval_interval": steps, "save_interval": 0, "audit_dir": None}
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        result = train_model(
            TrainConfig.from_mapping(
                {**config, **adamw, **run, **quiet, "dtype": "float32", "init_from_model": str(model)}
            ),
            model_name="own",
            dataset_dir=dataset,
            out_dir=folder,
            watch=lambda record: losses.append(record.loss),
            quiet=True,
        )
    return losses, result.val_loss


# Ranks.

TIME_LIMIT = 300
"""Time limit in seconds for all processes of a test together."""
RANK = """
import importlib, pickle, sys, warnings
warnings.simplefilter("ignore")
module, function, arguments, result = sys.argv[1:]
with open(arguments, "rb") as file:
    arguments = pickle.load(file)
value = getattr(importlib.import_module(module), function)(**arguments)
with open(result, "wb") as file:
    pickle.dump(value, file)
"""


def ranks(count: int, function: str, **arguments: Any) -> list[Any]:
    """Run `module:function` in `count` processes, with the environment of torchrun, and return all results."""
    module, name = function.split(":")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as files:
        Path(folder, "arguments").write_bytes(pickle.dumps(arguments))
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "PYTHONPATH": path}
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        outputs = [files.enter_context(Path(folder, f"output-{rank}").open("w+")) for rank in range(count)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, module, name, f"{folder}/arguments", f"{folder}/result-{rank}"],
                env={**os.environ, **world, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        try:
            codes = [process.wait(TIME_LIMIT) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert codes == [0] * count, "\n".join(Path(output.name).read_text() for output in outputs)
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(count)]  # noqa: S301


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]
