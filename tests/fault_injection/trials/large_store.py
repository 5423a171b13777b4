"""Write and read a dataset that is larger than the memory limit of the process (RLIMIT_DATA); memory-mapped files do
not count toward this limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from store_fixtures import finish

from chatmill.errors import DataError
from chatmill.rows import ORIGIN, OWN_ID, SPAN, File, Part, Role, Rows, Rule, offsets
from chatmill.store.publish import publish, staging_for
from chatmill.store.read import open_dataset
from chatmill.store.verify import verify_dataset
from chatmill.store.write import SplitWriter
from fault_injection.processes import apart, limited, load_torch
from fault_injection.trial import Tally, Trial

VOCAB, ROW, ROWS = 100_000, 1024, 2048
"""A vocabulary for which token ids need four bytes, and the size of a slab, which has 8 MiB of token ids."""
SHARE = 4
"""Minimum ratio of the dataset's size to the memory limit."""


def slab(number: int) -> Rows:
    """Return random rows with the seed `number`; half of the tokens in each row are trained."""
    spans = np.zeros(2 * ROWS, dtype=SPAN)
    spans["length"], spans["target"], spans["part"] = ROW // 2, OWN_ID, Part.CONTENT
    spans["role"] = np.tile([Role.USER, Role.ASSISTANT], ROWS)
    spans["weight"] = np.tile([0.0, 1.0], ROWS)
    spans["rule"] = Rule.ROLE
    origins = np.zeros(ROWS, dtype=ORIGIN)
    origins["line"] = np.arange(1, ROWS + 1) + number * ROWS
    ids = np.random.default_rng(number).integers(0, VOCAB, ROWS * ROW, dtype=np.uint32)
    files = (File("made", "made.jsonl"),)
    return Rows(ids, spans, offsets(np.full(ROWS, 2)), origins, offsets(np.full(ROWS, 1)), files)


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    from chatmill.load.loader import EpisodeLoader

    load_torch()
    dataset, count = folder / "x", size * ROWS
    room = size * ROWS * ROW * 5 // SHARE

    def write() -> str:
        staging = staging_for(dataset)
        with SplitWriter(staging / "train", vocab_size=VOCAB, shard_tokens=8 * ROWS * ROW) as writer:
            for number in range(size):
                writer.append(slab(seed + number))
            info = writer.close()
        metadata = finish(staging, {"train": info}, vocab_size=VOCAB)
        publish(staging, dataset, overwrite=False)
        return metadata.sha256

    def read() -> bool:
        episodes = open_dataset(dataset)["train"]
        for number in range(size):
            right, stored = slab(seed + number), episodes.rows(np.arange(number * ROWS, (number + 1) * ROWS))
            if not np.array_equal(stored.ids, right.ids) or not np.array_equal(stored.mask(), right.mask()):
                return False
            for one in np.random.default_rng(number).integers(0, ROWS, 8):
                wanted = right.ids[one * ROW : (one + 1) * ROW]
                if not np.array_equal(episodes.tokens(number * ROWS + int(one)), wanted):
                    return False
        return True

    def sweep() -> bool:
        tokens = sum(len(rows.ids) for rows in open_dataset(dataset)["train"].sweep())
        return tokens == count * ROW

    def load() -> bool:
        config = {"batch_size": 64, "block_size": ROW, "use_loss_mask": True, "epoch_seed": seed}
        with_all = EpisodeLoader(dataset, config, tensors=False, epochs=1)
        seen = np.concatenate([batch.episode_ids[:, 0] for batch in _batches(with_all)])
        return len(seen) == count and len(np.unique(seen)) == count

    def check() -> bool:
        if faults := verify_dataset(dataset, full=True).faults:
            raise DataError(faults[0])
        return True

    steps = {"written": write, "read": read, "swept": sweep, "loaded in random order": load, "verified": check}
    for name, step in steps.items():
        ended = apart(limited(step, room), cpu_seconds=600)
        if ended.value is False:
            tally.is_wrong(f"{name}: the rows differ from the stored ones")
        else:
            tally.judge(survived=bool(ended.value), lost=f"{name}: {ended.refused or ended.broke or 'killed'}")
    tally.notes["bytes in the dataset"] = sum(path.stat().st_size for path in dataset.rglob("*") if path.is_file())
    tally.notes["bytes of memory allowed for the process"] = room


def _batches(loader: Any) -> Iterator[Any]:
    yield from loader


TRIAL = Trial(
    "dataset larger than memory",
    "Writes, reads, loads and verifies a dataset that is four times as large as the memory limit of the process. "
    "The rows that are read must be equal to the rows that were written",
    work,
    full=120,
    short=24,
)
