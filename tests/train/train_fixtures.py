from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from child_processes import end_children, start_child
from safetensors.torch import load_file

from chatmill.cli.main import main as chatmill
from chatmill.ledger import Ledger
from chatmill.rows import offsets, rows_from_mask
from chatmill.store.layout import INDEX, MASK, TOKENS, shard_name
from chatmill.store.metadata import Metadata, write_metadata
from chatmill.store.write import SplitWriter
from chatmill.train.config import TrainConfig
from chatmill.train.loop import train_model
from chatmill.train.result import TrainResult

SMALL: dict[str, Any] = {
    "batch_size": 4,
    "block_size": 48,
    "use_loss_mask": True,
    "n_layer": 1,
    "n_embd": 16,
    "n_head": 2,
    "n_ffn": 32,
    "max_positions": 64,
    "learning_rate": 0.01,
    "warmup_iters": 2,
    "eval_interval": 0,
    "save_interval": 4,
    "max_iters": 8,
    "device": "cpu",
    "audit_dir": None,
}


def run_chatmill(*args: str) -> None:
    output, argv = io.StringIO(), sys.argv
    sys.argv = ["chatmill", *args]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), contextlib.suppress(SystemExit):
            chatmill()
    finally:
        sys.argv = argv


def sums(count: int, *, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    lines = []
    for a, b in rng.integers(0, 50, (count, 2)).tolist():
        messages = [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": f"{a + b}"}]
        lines.append(json.dumps({"messages": messages}))
    return "\n".join(lines) + "\n"


def prepare(folder: Path, name: str, *flags: str, seed: int = 0, count: int = 60) -> Path:
    source = folder / f"{name}.jsonl"
    source.write_text(sums(count, seed=seed))
    run_chatmill("prepare", str(source), "-o", str(folder / name), "--workers", "1", *flags)
    assert (folder / name / "dataset_metadata.json").is_file()
    return folder / name


def write_files(target: Path, episodes: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]) -> Path:
    """Write only the documented files of a dataset, as another program would."""
    shard = target / "train" / shard_name(0)
    shard.mkdir(parents=True)
    np.array([id for ids in episodes for id in ids], dtype="<u2").tofile(shard / TOKENS)
    lengths = np.array([len(ids) for ids in episodes], dtype="<u8")
    np.stack([offsets(lengths)[:-1].astype("<u8"), lengths], axis=1).tofile(shard / INDEX)
    np.array([bit for mask in masks for bit in mask], dtype="u1").tofile(shard / MASK)
    return target


def write_blocks(target: Path, blocks: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]) -> Path:
    ids = np.array(blocks, dtype=np.uint32)
    rows = rows_from_mask(ids.ravel(), np.array(masks).ravel(), np.full(len(ids), ids.shape[1]))
    with SplitWriter(target / "train", vocab_size=1000, shard_tokens=1 << 20) as writer:
        writer.append(rows)
        split = writer.close()
    metadata = Metadata(
        vocab_size=1000,
        format={},
        tokenizer={"name": "numbers", "sha256": "0" * 64},
        special_token_ids={},
        pad_token_id=0,
        splits={"train": split},
        ledger=Ledger(),
        config={"fit": "blocks", "max_tokens": ids.shape[1], "train_on": "assistant", "pack": None},
    )
    write_metadata(target, metadata, tokenizer_state={})
    return target


def config(**changes: Any) -> TrainConfig:
    return TrainConfig.from_mapping({**SMALL, **changes})


def trained(
    dataset: Path, out_dir: Path, *, name: str = "run", resume: str | None = None, **changes: Any
) -> TrainResult:
    return train_model(
        config(**changes), model_name=name, dataset_dir=dataset, out_dir=out_dir, resume=resume, quiet=True
    )


def weights(checkpoint: Path) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in load_file(checkpoint / "model" / "model.safetensors").items()}


def curve(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def ranks(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work` on each rank of a process group of `count` processes; return the results, which must be JSON
    values.
    """
    with tempfile.TemporaryDirectory() as folder:

        def run_rank(rank: int) -> None:
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count)
            (Path(folder) / str(rank)).write_text(json.dumps(work(rank)))
            dist.destroy_process_group()

        codes = end_children([start_child(functools.partial(run_rank, rank)) for rank in range(count)])
        assert codes == [0] * count
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(count)]
