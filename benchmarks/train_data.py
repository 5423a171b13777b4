"""Generate the dataset for all configurations in benchmarks/train.py, and compute the FLOPs of its batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_lines import TrainLine, shape_of

from chatmill.ledger import Ledger
from chatmill.load.batch import Batch
from chatmill.load.loader import EpisodeLoader
from chatmill.rows import ORIGIN, OWN_ID, SPAN, File, Rows
from chatmill.store.metadata import Metadata, write_metadata
from chatmill.store.write import SplitWriter
from chatmill.train.config import TrainConfig

BLOCK, SMALL_BLOCK = 4096, 64
VOCABULARY, SMALL_VOCABULARY = 50304, 512
"""Every model's vocabulary contains these ids, so that all models can share one dataset."""
STEPS, ROWS = 40, 8
"""The largest numbers of steps and rows that any configuration uses."""


@dataclass(frozen=True)
class Trial:
    """A benchmark configuration, and the size of its run."""

    line: TrainLine
    data: Path
    small: bool = False
    layers: int | None = None
    """Number of layers in runs that only compile; these runs take two steps."""

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def shape(self) -> dict[str, Any]:
        return shape_of(self.line, small=self.small, layers=self.layers)

    @property
    def block_size(self) -> int:
        return SMALL_BLOCK if self.small else BLOCK

    @property
    def warmup(self) -> int:
        return 1 if self.small or self.layers else self.line.warmup

    @property
    def steps(self) -> int:
        return 1 if self.layers else 2 if self.small else self.line.steps

    def config(self, **keys: Any) -> TrainConfig:
        """Return the loader config, which is the same for chatmill and for the other trainers."""
        packing = "bins" if self.line.packed else "none"
        load = {
            "batch_size": 2 if self.small else self.line.rows,
            "block_size": self.block_size,
            "packing": packing,
            "use_loss_mask": True,
        }
        return TrainConfig.from_mapping({**load, **keys})

    def batches(self, *, timed: bool) -> Iterator[Batch]:
        loader = EpisodeLoader(self.data, self.config())
        yield from itertools.islice(loader, self.warmup if timed else 0, self.warmup + self.steps)
        loader.close()


def write_dataset(path: Path, *, small: bool) -> None:
    """Write conversations of lognormal length, whose turns are random tokens."""
    block, vocabulary = (SMALL_BLOCK, SMALL_VOCABULARY) if small else (BLOCK, VOCABULARY)
    rng = np.random.default_rng(0)
    scale = block / BLOCK
    mean = 600 * scale
    count = int(STEPS * ROWS * block / mean)
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.32, 0.8, count), 8, block).astype(np.int64)
    # The lengths of user and assistant turns have the ratio 40:60. The last turn is cut to fit the length of its
    # conversation.
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
    ids = rng.integers(0, vocabulary, int(lengths.sum())).astype(np.uint32)
    files = (File("made", "generator"),)
    rows = Rows(ids, np.concatenate(tables), np.array(firsts), origins, np.arange(count + 1), files)
    with SplitWriter(path / "train", vocab_size=vocabulary, shard_tokens=50_000_000) as writer:
        writer.append(rows)
        info = writer.close()
    about = Metadata(
        vocab_size=vocabulary,
        format={},
        tokenizer={"name": "generator", "sha256": "0" * 64},
        special_token_ids={},
        pad_token_id=0,
        splits={"train": info},
        ledger=Ledger(),
        config={},
    )
    write_metadata(path, about, tokenizer_state={})


def real_tokens(batch: Batch) -> torch.Tensor:
    """Return the mask of tokens that are not padding."""
    return batch.segments < (batch.episode_ids >= 0).sum(dim=1)[:, None]


def operations(trial: Trial) -> float:
    """Return the number of FLOPs in the timed steps.

    Layers run on all tokens, the output head only on tokens in the loss mask, and attention only within conversations.
    Frozen weights have no weight gradients. Checkpointed layers run forward twice.
    """
    sizes = trial.config(**trial.shape).sizes(0)
    attention = sizes.n_embd * sizes.head_size * (2 * sizes.n_head + 2 * sizes.kv_heads)
    layers = sizes.n_layer * (attention + 3 * sizes.n_embd * sizes.ffn)
    head = sizes.n_embd * sizes.vocab_size
    width = sizes.n_layer * sizes.n_head * sizes.head_size
    passes = 2 if trial.line.precision.base else 3
    again = 1 if trial.line.checkpointing else 0
    total = 0.0
    for batch in trial.batches(timed=True):
        real = real_tokens(batch)
        total += 2.0 * (passes + again) * layers * int(real.sum()) + 2.0 * passes * head * int(batch.loss_mask.sum())
        # Attention takes two matrix products forward and five backward, for each pair of tokens that attend to each
        # other.
        total += 2.0 * (7 + 2 * again) * width * int((batch.positions + 1)[real].sum())
    return total
