"""Training speed on one GPU: `python benchmarks/train.py [--steps N] [--only NAME ...] [--json]`.

Conversations of lognormal length (mean about 600, at most 4096, about 60 percent trained) go through chatmill's own
store, loader and loop, in rows of 4096. Beside it stands the usual way with Hugging Face: forward with labels, padded
or packed. Needs numpy, torch and safetensors, and transformers for the other side. `--small` tries the script out
anywhere. Exit 1 if a promise fails.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from chatmill.config import read_values  # noqa: E402
from chatmill.ledger import Ledger  # noqa: E402
from chatmill.load.loader import EpisodeLoader  # noqa: E402
from chatmill.rows import ORIGIN, OWN_ID, SPAN, File, Rows  # noqa: E402
from chatmill.store.metadata import Metadata, write_metadata  # noqa: E402
from chatmill.store.write import SplitWriter  # noqa: E402
from chatmill.train.config import TrainConfig  # noqa: E402
from chatmill.train.loop import train_model  # noqa: E402
from chatmill.train.model import CausalModel  # noqa: E402

QWEN = {
    "n_layer": 28,
    "n_embd": 1024,
    "n_head": 16,
    "n_kv_head": 8,
    "head_dim": 128,
    "n_ffn": 3072,
    "rope_theta": 1e6,
    "qk_norm": True,
}
MIDDLE = read_values(ROOT / "configs/sft1/150M.json")
SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_kv_head": 2, "head_dim": 16, "n_ffn": 128, "qk_norm": True}
TOKENS, MEMORY, SHARE, WAIT = 90_000, 60.0, 0.45, 0.01
"""Promised: real tokens a second and GiB for the 0.6 B model, and the 150 M one's share of the best product."""


@dataclass(frozen=True)
class Setting:
    """The size of everything."""

    vocab_size: int
    middle_vocab_size: int
    block_size: int
    rows: int
    hf_rows: int
    steps: int
    warmup: int
    device: str
    qwen: dict[str, Any]
    middle: dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """What some steps of training came to."""

    name: str
    tokens_per_s: float
    """Real tokens: padding counts for nothing."""
    trained_per_s: float
    step_ms: float
    gib: float
    wait: float | None = None
    """Share of the time in which data was waited for."""
    tflops: float | None = None
    """Of the operations that were really executed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed")
    parser.add_argument("--only", nargs="*", choices=list(WORKS), help="leave the others out")
    parser.add_argument("--small", action="store_true", help="tiny models, on the CPU if there is no GPU")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the dataset is written for the time of the run")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    if not gpu and not args.small:
        print("no GPU; --small tries the script out", file=sys.stderr)
        return 1
    setting = Setting(151936, 50304, 4096, 8, 4, args.steps, 6, "cuda", QWEN, MIDDLE)
    if args.small:
        setting = Setting(512, 512, 128, 4, 2, args.steps, 2, "cuda" if gpu else "cpu", SMALL, SMALL)
    name = torch.cuda.get_device_name() if gpu else "CPU"
    best = best_product() if gpu else None
    found: dict[str, Measured | str] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for work in args.only or WORKS:
            print(f"{work} …", file=sys.stderr, flush=True)
            try:
                found[work] = WORKS[work](setting, Path(folder))
            except (RuntimeError, ImportError) as error:
                # The other side may not fit; what it says stands in its line.
                found[work] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            gc.collect()
            if gpu:
                torch.cuda.empty_cache()
                torch._dynamo.reset()
    title = f"training; {name}, torch {torch.__version__}"
    if find_spec("transformers"):
        title += f", transformers {version('transformers')}"
    return report(title, best, found, as_json=args.json)


def report(title: str, best: float | None, found: dict[str, Measured | str], *, as_json: bool) -> int:
    kept = all(promises(best, found).values())
    if as_json:
        figures = {name: value if isinstance(value, str) else vars(value) for name, value in found.items()}
        print(json.dumps({"title": title, "best_tflops": best, "figures": figures, "promises": promises(best, found)}))
        return 0 if kept else 1
    print(title)
    if best is not None:
        print(f"best bf16 matrix product of this run: {best:.0f} TFLOP/s")
    print(f"{'':<44}{'real tok/s':>11}{'trained':>9}{'ms/step':>9}{'GiB':>7}{'wait':>8}{'TFLOP/s':>9}{'share':>7}")
    for value in found.values():
        print(value if isinstance(value, str) else line(value, best))
    for promise, holds in promises(best, found).items():
        print(f"{'kept  ' if holds else 'MISSED'}  {promise}")
    return 0 if kept else 1


def line(value: Measured, best: float | None) -> str:
    wait = "" if value.wait is None else f"{100 * value.wait:.2f} %"
    tflops = "" if value.tflops is None else f"{value.tflops:.0f}"
    share = "" if value.tflops is None or best is None else f"{100 * value.tflops / best:.0f} %"
    return (
        f"{value.name:<44}{value.tokens_per_s:>11,.0f}{value.trained_per_s:>9,.0f}{value.step_ms:>9.1f}"
        f"{value.gib:>7.1f}{wait:>8}{tflops:>9}{share:>7}"
    )


def promises(best: float | None, found: dict[str, Measured | str]) -> dict[str, bool]:
    if best is None:
        return {}
    held: dict[str, bool] = {}
    if isinstance(qwen := found.get("chatmill"), Measured):
        held[f"0.6 B: at least {TOKENS:,} real tokens/s"] = qwen.tokens_per_s >= TOKENS
        held[f"0.6 B: at most {MEMORY:.0f} GiB"] = qwen.gib <= MEMORY
        held[f"0.6 B: data waited for in less than {WAIT:.0%} of the time"] = (qwen.wait or 0) < WAIT
    if isinstance(middle := found.get("chatmill-150M"), Measured):
        held[f"150 M: at least {SHARE:.0%} of the best product"] = (middle.tflops or 0) >= SHARE * best
    return held


# The data.


def dataset(folder: Path, vocab_size: int, setting: Setting) -> Path:
    """Conversations of a user and an assistant in turns, of random tokens."""
    path = folder / f"data-{vocab_size}"
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    scale = setting.block_size / 4096
    wanted = (setting.steps + setting.warmup + 4) * 2 * setting.rows * setting.block_size
    mean = 600 * scale
    count = int(wanted / mean)
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.32, 0.8, count), 8, setting.block_size).astype(np.int64)
    # Turns of the user and of the assistant, 40 : 60; the last one is cut where its conversation ends.
    tables, firsts = [], [0]
    for length in lengths.tolist():
        turns = np.maximum(1, scale * rng.lognormal(np.log((40, 64)), 0.5, (length, 2))).astype(np.int64).ravel()
        stop = int(np.searchsorted(np.cumsum(turns), length)) + 1
        turns = turns[:stop]
        turns[-1] -= turns.sum() - length
        table = np.zeros(stop, dtype=SPAN)
        table["length"], table["weight"], table["target"] = turns, np.arange(stop) % 2, OWN_ID
        tables.append(table)
        firsts.append(firsts[-1] + stop)
    origins = np.zeros(count, dtype=ORIGIN)
    origins["line"] = np.arange(count)
    ids = rng.integers(0, vocab_size, int(lengths.sum())).astype(np.uint32)
    rows = Rows(
        ids, np.concatenate(tables), np.array(firsts), origins, np.arange(count + 1), (File("made", "generator"),)
    )
    with SplitWriter(path / "train", vocab_size=vocab_size, shard_tokens=50_000_000) as writer:
        writer.append(rows)
        info = writer.close()
    write_metadata(
        path,
        Metadata(
            vocab_size=vocab_size,
            format={},
            tokenizer={"name": "generator", "sha256": "0" * 64},
            special_token_ids={},
            pad_token_id=0,
            splits={"train": info},
            ledger=Ledger(),
            config={},
        ),
        tokenizer_state={},
    )
    return path


# chatmill.


def chatmill(setting: Setting, folder: Path) -> Measured:
    """The Qwen3-shaped model as chatmill's own GPT."""
    return ours("chatmill, own GPT of 0.6 B", setting, folder, setting.qwen, setting.vocab_size)


def chatmill_middle(setting: Setting, folder: Path) -> Measured:
    return ours("chatmill, own GPT of 150 M", setting, folder, setting.middle, setting.middle_vocab_size)


def chatmill_hf(setting: Setting, folder: Path) -> Measured:
    """transformers' Qwen3 in chatmill's loop: float32 weights, autocast."""
    from chatmill.train.hf import HFModel

    compute = torch.bfloat16 if setting.device == "cuda" else None
    model = HFModel(qwen3(setting, torch.float32), compute=compute)
    return ours("chatmill, transformers' Qwen3", setting, folder, setting.qwen, setting.vocab_size, model=model)


def ours(
    name: str,
    setting: Setting,
    folder: Path,
    shape: dict[str, Any],
    vocab_size: int,
    *,
    model: CausalModel | None = None,
) -> Measured:
    config = TrainConfig.from_mapping(
        {
            **shape,
            "vocab_size": vocab_size,
            "max_positions": setting.block_size,
            "batch_size": setting.rows,
            "block_size": setting.block_size,
            "packing": "bins",
            "use_loss_mask": True,
            "max_iters": setting.warmup + setting.steps,
            "eval_interval": 0,
            "save_interval": 0,
            "audit_dir": None,
            "device": setting.device,
        }
    )
    data = dataset(folder, vocab_size, setting)
    steps: list[Any] = []
    with memory(setting.device) as used:
        train_model(
            config,
            model_name=name.replace(" ", "-").replace("'", ""),
            dataset_dir=data,
            out_dir=folder,
            model=model,
            watch=steps.append,
            quiet=True,
        )
        gib = used()
    timed = steps[setting.warmup :]
    seconds = sum(step.seconds for step in timed)
    executed = None
    if model is None:
        pairs = [attended(batch) for batch in batches(data, config, setting)]
        executed = sum(
            operations(config, vocab_size, tokens=step.tokens, trained=step.trained, pairs=seen)
            for step, seen in zip(timed, pairs, strict=True)
        )
    return Measured(
        name,
        tokens_per_s=sum(step.tokens for step in timed) / seconds,
        trained_per_s=sum(step.trained for step in timed) / seconds,
        step_ms=1e3 * seconds / len(timed),
        gib=gib,
        wait=sum(step.data_wait for step in timed) / seconds,
        tflops=None if executed is None else executed / seconds / 1e12,
    )


def operations(config: TrainConfig, vocab_size: int, *, tokens: int, trained: int, pairs: int) -> float:
    """Executed in one step, forward and backward: weights on all tokens, the head on trained ones alone, attention
    between tokens of one conversation, whose backward pass has five products where forward has two."""
    sizes = config.sizes(vocab_size)
    attention = sizes.n_embd * sizes.head_size * (2 * sizes.n_head + 2 * sizes.kv_heads)
    weights = sizes.n_layer * (attention + 3 * sizes.n_embd * sizes.ffn)
    head = sizes.n_embd * vocab_size
    inside = sizes.n_layer * sizes.n_head * sizes.head_size * pairs
    return 6.0 * (weights * tokens + head * trained) + 3.5 * 4 * inside


def attended(batch: Any) -> int:
    """Pairs of tokens of which one sees the other."""
    real = batch.segments < (batch.episode_ids >= 0).sum(dim=1)[:, None]
    return int((batch.positions + 1)[real].sum())


def batches(data: Path, config: TrainConfig, setting: Setting) -> Iterator[Any]:
    """The batches of the timed steps, once more."""
    loader = EpisodeLoader(data, config)
    yield from itertools.islice(loader, setting.warmup, setting.warmup + setting.steps)
    loader.close()


# The other side.


def qwen3(setting: Setting, dtype: torch.dtype) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = setting.qwen
    config = Qwen3Config(
        vocab_size=setting.vocab_size,
        hidden_size=shape["n_embd"],
        intermediate_size=shape["n_ffn"],
        num_hidden_layers=shape["n_layer"],
        num_attention_heads=shape["n_head"],
        num_key_value_heads=shape["n_kv_head"],
        head_dim=shape["head_dim"],
        tie_word_embeddings=True,
        max_position_embeddings=setting.block_size,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).to(dtype)


def hf_padded(setting: Setting, folder: Path) -> Measured:
    """One conversation a row, as many rows as chatmill has, filled up to the longest of them."""
    return theirs("transformers, padded to the longest", setting, folder, packing="none", rows=setting.rows)


def hf_packed(setting: Setting, folder: Path) -> Measured:
    """Packed rows; transformers keeps conversations apart by their positions."""
    return theirs("transformers, packed, SDPA", setting, folder, packing="bins", rows=setting.hf_rows)


def theirs(name: str, setting: Setting, folder: Path, *, packing: str, rows: int) -> Measured:
    """bfloat16 weights and states, forward with labels, fused AdamW: the fastest that this way has to offer."""
    count = max(3, setting.steps // 3)
    config = TrainConfig.from_mapping(
        {"batch_size": rows, "block_size": setting.block_size, "packing": packing, "use_loss_mask": True}
    )
    device = torch.device(setting.device)
    with memory(setting.device) as used:
        model = qwen3(setting, torch.bfloat16).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        loader = EpisodeLoader(dataset(folder, setting.vocab_size, setting), config)
        tokens = trained = 0
        began = 0.0
        for number, batch in enumerate(itertools.islice(loader, 2 + count)):
            if number == 2:
                synchronize(device)
                began, tokens, trained = time.perf_counter(), 0, 0
            real = batch.segments < (batch.episode_ids >= 0).sum(dim=1)[:, None]
            longest = int(real.sum(dim=1).max())
            # Labels are shifted inside: they stand one further to the right than y.
            labels = torch.full_like(batch.y, -100)
            labels[:, 1:] = batch.y[:, :-1]
            x, labels, positions = (part[:, :longest].to(device) for part in (batch.x, labels, batch.positions.long()))
            how = {"position_ids": positions} if packing == "bins" else {"attention_mask": real[:, :longest].to(device)}
            model(input_ids=x, labels=labels, use_cache=False, **how).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            tokens, trained = tokens + int(real.sum()), trained + int(batch.loss_mask.sum())
        synchronize(device)
        seconds = time.perf_counter() - began
        loader.close()
        return Measured(f"{name}, {rows} rows", tokens / seconds, trained / seconds, 1e3 * seconds / count, used())


# The machine.


@contextmanager
def memory(device: str) -> Iterator[Callable[[], float]]:
    """Asks for the most GiB that tensors took on the GPU while this was open."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    yield lambda: torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def best_product() -> float:
    """TFLOP/s of the fastest of a few large bf16 matrix products, of random numbers."""
    best = 0.0
    for size in (4096, 8192, 16384):
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in "ab")
        for _ in range(3):
            a @ b
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
        marks[0].record()
        for mark in marks[1:]:
            a @ b
            mark.record()
        torch.cuda.synchronize()
        taken = np.median([before.elapsed_time(after) for before, after in itertools.pairwise(marks)])
        best = max(best, 2 * size**3 / float(taken) / 1e9)
    return best


WORKS: dict[str, Callable[[Setting, Path], Measured]] = {
    "hf-padded": hf_padded,
    "hf-packed": hf_packed,
    "chatmill-hf": chatmill_hf,
    "chatmill": chatmill,
    "chatmill-150M": chatmill_middle,
}


if __name__ == "__main__":
    sys.exit(main())
