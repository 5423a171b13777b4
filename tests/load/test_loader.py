from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
import torch
from load_fixtures import SMALL, same, talks, write_plain_files, write_rows

from chatmill.errors import DataError, UsageError
from chatmill.fit import pack
from chatmill.load.batch import Batch
from chatmill.load.loader import EpisodeLoader
from chatmill.rows import Rows
from chatmill.store.layout import INDEX, MASK, ORIGINS, SPANS, TOKENS, shard_name


def test_a_missing_split_is_an_error_and_not_replaced_by_another(tmp_path):
    target = write_rows(tmp_path / "d", {"train": talks(1, 8)})
    loader = EpisodeLoader(target, SMALL)
    with pytest.raises(DataError, match="has no split val; expected train"):
        loader.get_batch("val")
    assert loader.splits == ("train",)
    empty = write_rows(tmp_path / "e", {"train": talks(1, 8), "val": talks(1, 0)})
    with pytest.raises(DataError, match="the split val is empty"):
        EpisodeLoader(empty, SMALL, split="val")


def test_a_padding_token_outside_the_vocabulary_is_refused(dataset):
    with pytest.raises(DataError, match=r"pad_token_id is 1000; expected an id below 1000"):
        EpisodeLoader(dataset, {**SMALL, "pad_token_id": 1000})


@pytest.mark.parametrize(
    ("rank", "world_size", "what"),
    [
        (0, 3, "batch_size 4 cannot be split across 3 ranks"),
        (2, 2, "rank is 2; expected 0 to 1"),
        (-1, 1, "rank is -1; expected 0 to 0"),
    ],
)
def test_an_invalid_rank_or_world_size_is_refused(dataset, rank, world_size, what):
    with pytest.raises(UsageError, match=what):
        EpisodeLoader(dataset, SMALL, rank=rank, world_size=world_size)
    with pytest.raises(UsageError, match="across 2 ranks with 4 accumulation steps each; expected a multiple of 8"):
        EpisodeLoader(dataset, {**SMALL, "gradient_accumulation_steps": 4}, world_size=2)


def test_epochs_are_refused_for_an_order_without_epochs(dataset):
    with pytest.raises(UsageError, match="epochs is 2, but the order random/1 has no epochs"):
        EpisodeLoader(dataset, {**SMALL, "batch_sampling_mode": "random"}, epochs=2)


def begins_inside_an_answer(rows: Rows, row: int, capacity: int) -> bool:
    mask = rows[row : row + 1].mask().tolist()
    return len(mask) > capacity and mask[-capacity] and mask[-capacity - 1]


def test_truncated_and_trained_tokens_are_counted(tmp_path):
    rows = talks(4, 6, longest=12)
    target = write_rows(tmp_path / "d", {"train": rows})
    loader = EpisodeLoader(target, {"batch_size": 4, "block_size": 6, "use_loss_mask": True, "epoch_drop_last": False})
    loader.get_batch()
    batches = [loader.get_batch()]
    lengths = rows.lengths
    assert loader.counts()._asdict() == {
        "rows": 6,
        "tokens": int(np.minimum(lengths, 7).sum()),
        "trained": int(loader.counts().trained),
        "cut_episodes": int((lengths > 7).sum()),
        "cut_tokens": int(np.maximum(lengths - 7, 0).sum()),
        "answer_cut": sum(begins_inside_an_answer(rows, row, 7) for row in range(6)),
    }
    assert 0 < loader.counts().answer_cut < 6
    again = EpisodeLoader(target, loader.config)
    assert loader.counts().trained == sum(int(batch.loss_mask.sum()) for batch in islice(again, 2))
    assert batches[0].x.shape == (4, 6)


def test_batches_are_writable_tensors_of_the_documented_types(dataset):
    batch = EpisodeLoader(dataset, SMALL).get_batch()
    assert {name: (array.dtype, tuple(array.shape)) for name, array in batch._asdict().items()} == {
        "x": (torch.int64, (4, 16)),
        "y": (torch.int64, (4, 16)),
        "loss_mask": (torch.bool, (4, 16)),
        "weights": (torch.float32, (4, 16)),
        "positions": (torch.int32, (4, 16)),
        "segments": (torch.int32, (4, 16)),
        "episode_ids": (torch.int64, (4, 1)),
    }
    assert all(array.is_contiguous() for array in batch)
    for array in batch:
        array.zero_()
    moved = EpisodeLoader(dataset, SMALL, device="cpu").get_batch()
    plain = EpisodeLoader(dataset, SMALL, tensors=False).get_batch()
    assert same(moved.each(lambda tensor: tensor.numpy()), plain)


def test_a_batch_is_split_for_gradient_accumulation(dataset):
    batch = EpisodeLoader(dataset, SMALL, tensors=False).get_batch()
    parts = batch.split(2)
    assert same(Batch(*map(np.concatenate, zip(*parts, strict=True))), batch)
    with pytest.raises(ValueError, match="4 rows into 3 equal parts"):
        batch.split(3)


def test_batches_do_not_depend_on_how_many_are_built_together(dataset, monkeypatch):
    config = {**SMALL, "packing": "bins", "epoch_drop_last": False}
    together = list(EpisodeLoader(dataset, config, epochs=3, tensors=False))
    monkeypatch.setattr("chatmill.load.batch_builder.LOOKUP_BATCHES", 1)
    alone = list(EpisodeLoader(dataset, config, epochs=3, tensors=False, ahead=0))
    assert len(together) == len(alone)
    assert all(map(same, together, alone))


def test_damage_is_reported_at_every_attempt_and_the_cursor_does_not_move(tmp_path):
    target = write_plain_files(tmp_path / "d", [[5, 6, 7], [8, 9], [1, 2]], None)
    index = np.fromfile(target / "train" / shard_name(0) / INDEX, dtype="<u8").reshape(-1, 2)
    index[1] = 6, 2
    index.tofile(target / "train" / shard_name(0) / INDEX)
    loader = EpisodeLoader(
        target, {"batch_size": 1, "block_size": 4, "epoch_shuffle": False, "pad_token_id": 0, "episode_min_tokens": 0}
    )
    for _ in range(2):
        with pytest.raises(
            DataError, match="an entry points past the last token; the file was changed; run chatmill verify"
        ):
            list(islice(loader, 3))
    assert loader.cursor().step == 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_damaged_byte_in_the_origins_is_harmless_or_reported(tmp_path, packed):
    rows = talks(1, 4)
    made = write_rows(tmp_path / "d", {"train": pack(rows, 60) if packed else rows})
    path = made / "train" / shard_name(0) / ORIGINS
    whole = path.read_bytes()
    said = set()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        try:
            list(EpisodeLoader(made, {**SMALL, "batch_size": 1}, epochs=1, tensors=False, ahead=0))
        except DataError as fault:
            said.add(str(fault))
    right = f"; the file was changed; run chatmill verify {made} --full"
    assert said == {
        f"{path}: segments are out of order{right}",
        f"{path.with_name(SPANS)}: spans do not exactly cover the tokens of their rows{right}",
    }


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_epoch_beyond_the_last_seed_fails_only_when_it_is_reached(dataset, ahead):
    config = {**SMALL, "epoch_seed": 2**32 - 1}
    loader = EpisodeLoader(dataset, config, tensors=False, ahead=ahead)
    first = list(EpisodeLoader(dataset, config, epochs=1, tensors=False))
    assert all(map(same, [loader.get_batch() for _ in first], first))
    with pytest.raises(UsageError, match="seed 4294967295 plus epoch 1 is 4294967296"):
        loader.get_batch()
    assert loader.cursor().step == len(first)


def test_the_documented_snippet_reconstructs_the_order_of_the_loader(tmp_path):
    def get_episode_order(epoch_seed: int, epoch: int, num_episodes: int) -> np.ndarray:
        effective_seed = epoch_seed + epoch
        rng = np.random.RandomState(effective_seed)
        return rng.permutation(num_episodes)

    target = write_rows(tmp_path / "d", {"train": talks(1, 504)}, shard_tokens=2000)
    loader = EpisodeLoader(target, {"batch_size": 8, "block_size": 32, "epoch_seed": 42}, epochs=2, tensors=False)
    found = np.concatenate([batch.episode_ids[:, 0] for batch in loader])
    assert found[:10].tolist() == [173, 274, 489, 72, 305, 76, 475, 140, 469, 498]
    assert found.tolist() == [*get_episode_order(42, 0, 504), *get_episode_order(42, 1, 504)]


LARGE = """
import json, sys
from pathlib import Path
sys.modules["torch"] = None
from chatmill.load.loader import EpisodeLoader
config = {"batch_size": 64, "block_size": 8, "batch_sampling_mode": "feistel", "episode_min_tokens": 0}
loader = EpisodeLoader(sys.argv[1], {**config, "pad_token_id": 0}, ahead=0)
plan, seen = loader.plan("train"), []
for _ in range(40):
    seen += plan.step(loader.cursor()).episodes.tolist()
    loader.get_batch()
state = loader.state_dict()
state["cursors"]["train"] |= {"epoch": 3, "window": 12345, "row": 6789}
loader.load_state_dict(state)
late = plan.step(loader.cursor()).episodes.tolist()
loader.get_batch()
print(json.dumps({
    "episodes": plan.num_episodes,
    "distinct": len(set(seen)),
    "largest": max(seen),
    "found": plan.order.find(3, late[0]) == 12345 * 2**16 + 6789,
    "memory": 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]),
}))
"""


def test_a_billion_episodes_are_loaded_in_constant_memory(tmp_path):
    """The files are sparse, and all episodes except the last are empty."""
    count = 10**9
    shard = tmp_path / "d" / "train" / shard_name(0)
    shard.mkdir(parents=True)
    for name, size in ((INDEX, 16 * count), (TOKENS, 2 * 100), (MASK, 100)):
        with (shard / name).open("wb") as file:
            file.truncate(size)
    with (shard / INDEX).open("r+b") as file:
        file.seek(16 * (count - 1))
        file.write(np.array([0, 100], dtype="<u8").tobytes())
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(tmp_path / "d")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["episodes"], told["distinct"], told["found"]) == (count, 40 * 64, True)
    assert told["largest"] > 0.99 * count
    assert told["memory"] < 150e6


def test_shards_are_mapped_as_they_are_needed(tmp_path, monkeypatch):
    monkeypatch.setattr("chatmill.load.batch_builder.LOOKUP_BATCHES", 1)
    target = write_rows(tmp_path / "d", {"train": talks(1, 40)}, shard_tokens=1)
    loader = EpisodeLoader(target, {**SMALL, "batch_size": 2, "epoch_shuffle": False}, tensors=False, ahead=0)
    train = loader.sources[0].dataset["train"]
    assert (len(train.shards), train.array.cache_info().currsize) == (40, 0)
    loader.get_batch()
    # A batch of two episodes maps four files (index, tokens, spans, origins) in each of two shards.
    assert train.array.cache_info().currsize == 8
