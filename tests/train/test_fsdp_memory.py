from __future__ import annotations

import ctypes
import gc
import json
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from train_fixtures import config, ranks

from chatmill.train import sharded_save
from chatmill.train.distributed import World
from chatmill.train.sharded_load import open_for_shards
from chatmill.train.sharded_save import can_save_in_shards, save_in_shards
from chatmill.train.sharded_tensors import TensorEntry, write_tensors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM, LlamaConfig

STATUS = Path("/proc/self/status")
HIDDEN, VOCAB = 1536, 512
M_MMAP_THRESHOLD = -3
PEEK = 0.002
"""Seconds between two measurements of the memory of a process."""


def write_model(folder: Path, *, layers: int, hidden: int) -> tuple[int, int]:
    shape = {"vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    config = LlamaConfig(**shape, num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    folder.mkdir()
    config.save_pretrained(folder)
    del state["lm_head.weight"]
    weight_map = {}
    for number, (name, tensor) in enumerate(state.items(), start=1):
        weight_map[name] = f"model-{number:05d}-of-{len(state):05d}.safetensors"
        values = iter([torch.full(tensor.shape, 0.01, dtype=tensor.dtype)])
        entries = [TensorEntry(name, tuple(tensor.shape), tensor.dtype)]
        write_tensors(folder / weight_map[name], entries, values, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    sizes = [tensor.nbytes for tensor in state.values()]
    return sum(sizes), max(sizes)


def rss_anon() -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


@contextmanager
def watched() -> Iterator[list[int]]:
    """Yield a list; after the `with` block, its last item is the peak growth of anonymous memory in the block."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, growth, done = rss_anon(), [0], threading.Event()

    def look() -> None:
        while not done.wait(PEEK):
            growth.append(max(growth[-1], rss_anon() - before))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield growth
    finally:
        done.set()
        thread.join()
        growth.append(max(growth[-1], rss_anon() - before))


def open_and_save(world: World, folder: Path, settings: dict[str, Any], saved: Path) -> list[int]:
    changes = {"init_from_model": str(folder), "dtype": "bfloat16", **settings}
    with watched() as opening:
        made = open_for_shards(config(**changes), VOCAB, compute=torch.bfloat16, world=world)
        assert made.note is None
        world.distribute(made.model, sharded=True, compute=torch.bfloat16, values=made.values)
    world.together(lambda: saved.mkdir() if world.is_first else None)
    with watched() as saving:
        if can_save_in_shards(made.model):
            assert save_in_shards(saved, made.model, world, save_dtype="auto") is not None
    return [opening[-1], saving[-1]]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, int, int]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "toy", layers=1, hidden=64)
    return folder, *write_model(folder / "model", layers=2, hidden=HIDDEN)


@pytest.mark.skipif(not STATUS.exists(), reason="memory usage is read from /proc")
@pytest.mark.parametrize(
    ("count", "settings"),
    [(2, {"lora": {"r": 2}}), (4, {"optimizer": "adamw_bf16"})],
    ids=["2 ranks, adapters", "4 ranks"],
)
def test_a_rank_holds_only_its_shard_and_one_tensor(models, tmp_path, count, settings):
    folder, size, largest = models

    def work(rank: int) -> list[int]:
        # Return freed blocks to the system at once; otherwise they would count as memory in use.
        assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
        sharded_save.SHARD_BYTES = largest
        world = World(rank, count, torch.device("cpu"))
        # Warm up, because the first run imports modules and makes allocations, such as the workspace of BLAS.
        torch.ones(VOCAB, VOCAB) @ torch.ones(VOCAB, VOCAB)
        open_and_save(world, folder / "toy", settings, tmp_path / "toy")
        return open_and_save(world, folder / "model", settings, tmp_path / "saved")

    growths = ranks(count, work)
    opening, saving = zip(*growths, strict=True)
    bound = size / count + largest
    assert max(opening) <= bound, f"{growths} bytes for a model of {size}; largest tensor {largest}"
    # The growth must include the shard; otherwise the measurement is wrong.
    assert min(opening[1:]) >= 0.9 * size / count, growths
    # Allow for buffers of files and sockets, in addition to one tensor.
    assert max(saving) <= 1.5 * largest, growths
    if "lora" not in settings:
        assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > count
