from __future__ import annotations

import copy
import json
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from load_fixtures import expected, listed, same, talks, write_plain_files, write_rows, write_source
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from chatmill.errors import DataError, UsageError
from chatmill.fit import pack
from chatmill.load.batch import Batch
from chatmill.load.digests import sha256_rows
from chatmill.load.loader import EpisodeLoader
from chatmill.rows import Rows
from chatmill.store.layout import INDEX, MASK, ORIGINS, SPANS, TOKENS, shard_name

SMALL = {"batch_size": 4, "block_size": 16, "use_loss_mask": True, "epoch_seed": 3}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("loader") / "d", {"train": talks(1, 30), "val": talks(2, 9)})


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("caches")
    for seed, name in enumerate(("primer", "oasst1", "dolly15k")):
        write_source(folder, name, {"train": talks(10 + seed, 20 + seed), "val": talks(20 + seed, 4)})
    return folder


def test_a_dataset_of_another_program_is_read_with_and_without_a_mask(tmp_path):
    episodes = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    masks = [[0, 1, 1], [0, 0], [1, 0, 1, 1]]
    masked = write_plain_files(tmp_path / "masked", episodes, masks)
    config = {"batch_size": 3, "block_size": 4, "epoch_shuffle": False, "pad_token_id": 0}
    with pytest.raises(DataError, match="does not record an end-of-turn token; set pad_token_id"):
        EpisodeLoader(masked, {**config, "pad_token_id": None})
    batch = EpisodeLoader(masked, {**config, "use_loss_mask": True}, tensors=False).get_batch()
    assert batch.x.tolist() == [[5, 6, 7, 0], [8, 9, 0, 0], [10, 11, 12, 13]]
    assert batch.y.tolist() == [[6, 7, -100, -100], [-100] * 4, [-100, 12, 13, -100]]
    assert batch.positions.tolist() == [[0, 1, 2, 0], [0, 1, 0, 1], [0, 1, 2, 3]]
    assert batch.segments.tolist() == [[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
    assert EpisodeLoader(masked, config, tensors=False).get_batch().y.tolist() == [
        [6, 7, -100, -100],
        [9, -100, -100, -100],
        [11, 12, 13, -100],
    ]
    bare = write_plain_files(tmp_path / "bare", episodes, None)
    with pytest.raises(DataError, match=r"has no mask.bin, but use_loss_mask is true"):
        EpisodeLoader(bare, {**config, "use_loss_mask": True})
    assert same(
        EpisodeLoader(bare, config, tensors=False).get_batch(), EpisodeLoader(masked, config, tensors=False).get_batch()
    )


def test_the_end_of_turn_token_is_found_in_tokenizer_files_of_another_program(tmp_path):
    folder = write_plain_files(tmp_path / "d", [[5, 6, 7]], None)
    (folder / "dataset_metadata.json").write_text(json.dumps({"num_train_episodes": 1}))
    (folder / "tokenizer_state.json").write_text(json.dumps({"special_token_ids": {"eot": 9}}))
    batch = EpisodeLoader(folder, {"batch_size": 1, "block_size": 5}, tensors=False).get_batch()
    assert batch.x.tolist() == [[5, 6, 7, 9, 9]]


def test_the_cache_of_one_source_is_read_like_a_dataset_of_the_same_rows(tmp_path):
    rows = talks(5, 12)
    cache = write_source(tmp_path, "primer", {"train": rows, "val": talks(6, 3)})
    loader = EpisodeLoader(cache, {**SMALL, "epoch_shuffle": False}, tensors=False)
    assert listed(loader.get_batch()) == expected(rows, [[0], [1], [2], [3]], block_size=16)


def test_a_folder_of_caches_is_mixed_as_documented_by_default(root):
    loader = EpisodeLoader(root, {**SMALL, "batch_size": 10}, tensors=False)
    assert loader.config.mix_sft == {"dolly15k": 0.2, "oasst1": 0.7, "primer": 0.1}
    sizes = [22, 21, 20]
    edges = np.cumsum([0, *sizes])
    for batch in islice(loader, 12):
        source = np.searchsorted(edges, batch.episode_ids[:, 0], side="right") - 1
        assert np.bincount(source, minlength=3).tolist() == [2, 7, 1]


@pytest.mark.parametrize("kind", ["known", "plain"])
@pytest.mark.parametrize("by", ["tokens", "trained_tokens"])
def test_a_mix_by_tokens_has_the_requested_shares_in_batches(tmp_path, by, kind):
    """One source has long rows, which are truncated. The other has short rows, some of which are skipped."""
    long, short = talks(1, 60, longest=90), talks(2, 80, longest=9)
    if kind == "known":
        write_source(tmp_path, "long", {"train": long})
        write_rows(tmp_path / "short", {"train": short})
    for name, rows in {"long": long, "short": short}.items() if kind == "plain" else ():
        ids, masks = (np.split(flat, rows.row_start[1:-1]) for flat in (rows.ids, rows.mask()))
        write_plain_files(tmp_path / name, ids, masks)
    config = {
        "batch_size": 10,
        "block_size": 30,
        "use_loss_mask": True,
        "mix_sft": {"long": 3, "short": 2},
        "mix_by": by,
        "episode_min_tokens": 5,
        "pad_token_id": 3,
    }
    loader = EpisodeLoader(tmp_path, config, tensors=False)
    given = np.zeros(2)
    for batch in islice(loader, 1200):
        amount = batch.loss_mask.sum(axis=1) if by == "trained_tokens" else (batch.segments == 0).sum(axis=1)
        np.add.at(given, (batch.episode_ids[:, 0] >= 60).astype(int), amount)
    # A row of n tokens has n - 1 inputs and at most n - 1 labels, so the shares are approximate.
    assert given / given.sum() == pytest.approx([0.6, 0.4], abs=0.01)


def test_every_split_of_a_mix_has_its_own_order_and_pass(root):
    loader = EpisodeLoader(root, {**SMALL, "batch_size": 10}, tensors=False)
    batch = loader.get_batch("val")
    edges = [0, 4, 8, 12]
    source = np.searchsorted(edges, batch.episode_ids[:, 0], side="right") - 1
    assert np.bincount(source, minlength=3).tolist() == [2, 7, 1]
    passed = np.concatenate([batch.episode_ids[:, 0] for batch in loader.one_pass("val")])
    assert passed.tolist() == [*range(12), *[-1] * 8]


def test_the_order_of_sources_in_a_config_does_not_matter(root):
    one, other = ({"oasst1": 2, "primer": 1}, {"primer": 1, "oasst1": 2})
    loaders = [EpisodeLoader(root, {**SMALL, "mix_sft": mix}, tensors=False) for mix in (one, other)]
    assert all(map(same, *(islice(loader, 8) for loader in loaders)))
    assert loaders[0].state_dict() == loaders[1].state_dict()


def test_the_error_for_a_missing_source_has_its_build_command(root, tmp_path):
    write_source(tmp_path, "primer", {"train": talks(1, 5), "val": talks(2, 2)})
    with pytest.raises(DataError) as caught:
        EpisodeLoader(tmp_path, SMALL)
    assert str(caught.value) == (
        f"{tmp_path}: mix_sft has dolly15k, which is not built; "
        f"{tmp_path}: mix_sft has oasst1, which is not built; "
        f"build it with chatmill build-sft-dolly15k --out-dir {tmp_path}"
    )


@pytest.mark.parametrize(
    ("mix", "what"),
    [
        ({"primer": 1, "../secret": 1}, "is not a source name"),
        ({"primer": 1, "mine": 1}, r"mix_sft has mine, which is not built; build it with chatmill prepare … -o"),
    ],
)
def test_a_mix_of_missing_sources_is_refused(root, mix, what):
    with pytest.raises((DataError, UsageError), match=what):
        EpisodeLoader(root, {**SMALL, "mix_sft": mix})


def test_a_mix_over_one_dataset_is_refused(dataset):
    with pytest.raises(UsageError, match="is a dataset of one source, but mix_sft has a, b; expected the folder that"):
        EpisodeLoader(dataset, {**SMALL, "mix_sft": {"a": 1, "b": 1}})


def test_sources_of_different_tokenizers_are_refused(tmp_path):
    write_source(tmp_path, "primer", {"train": talks(1, 5)})
    write_source(tmp_path, "oasst1", {"train": talks(1, 5)}, vocab_size=2000)
    with pytest.raises(DataError, match="was built with a different tokenizer than"):
        EpisodeLoader(tmp_path, {**SMALL, "mix_sft": {"primer": 1, "oasst1": 1}})


def test_a_folder_without_a_dataset_or_caches_is_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"is not a dataset .* or a folder of caches; expected a folder that chatmill prepare or "
    ):
        EpisodeLoader(tmp_path, SMALL)
    with pytest.raises(DataError, match="no such folder"):
        EpisodeLoader(tmp_path / "none", SMALL)


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


def test_counts_of_truncated_and_trained_tokens(tmp_path):
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


def test_ids_of_two_widths_are_not_read_together(tmp_path):
    narrow = write_plain_files(tmp_path / "all" / "narrow", [[5, 6, 7]], [[1, 1, 1]]) / "train" / shard_name(0)
    wide = write_plain_files(tmp_path / "all" / "wide", [[5, 6, 7]], [[1, 1, 1]]) / "train" / shard_name(0)
    np.array([5, 6, 7], dtype="<u4").tofile(wide / TOKENS)
    config = {"batch_size": 1, "block_size": 4, "pad_token_id": 0, "mix_sft": {"narrow": 1.0, "wide": 1.0}}
    with pytest.raises(DataError) as raised:
        EpisodeLoader(tmp_path / "all", config)
    assert str(raised.value) == (
        f"{wide}: has token ids of 32 bits, but {narrow} has 16; expected the same width; rebuild one of them"
    )


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_epoch_beyond_the_last_seed_fails_only_when_it_is_reached(dataset, ahead):
    config = {**SMALL, "epoch_seed": 2**32 - 1}
    loader = EpisodeLoader(dataset, config, tensors=False, ahead=ahead)
    first = list(EpisodeLoader(dataset, config, epochs=1, tensors=False))
    assert all(map(same, [loader.get_batch() for _ in first], first))
    with pytest.raises(UsageError, match="seed 4294967295 plus epoch 1 is 4294967296"):
        loader.get_batch()
    assert loader.cursor().step == len(first)


def slowly(loader: EpisodeLoader) -> threading.Thread:
    """Take batches slowly until the loader starts a thread to prefetch them; return the thread."""
    known = set(threading.enumerate())
    while not (new := set(threading.enumerate()) - known):
        loader.get_batch()
        time.sleep(0.05)
    return new.pop()


def test_prefetched_batches_that_were_not_returned_do_not_count(dataset, monkeypatch):
    monkeypatch.setattr("chatmill.load.batch_builder.LOOKUP_BATCHES", 1)
    loader = EpisodeLoader(dataset, SMALL, tensors=False, ahead=3)
    slowly(loader)
    time.sleep(0.2)
    other = EpisodeLoader(dataset, SMALL, tensors=False, ahead=0)
    other.load_state_dict(loader.state_dict())
    for _ in range(9):
        assert same(loader.get_batch(), other.get_batch())
    assert loader.state_dict() == other.state_dict()


def test_the_thread_ends_when_the_loader_is_garbage_collected(dataset, monkeypatch):
    monkeypatch.setattr("chatmill.load.batch_builder.LOOKUP_BATCHES", 1)
    loader = EpisodeLoader(dataset, SMALL, ahead=1)
    thread = slowly(loader)
    del loader
    thread.join()


def test_closing_a_loader_ends_its_thread_and_it_can_still_be_used(dataset, monkeypatch):
    monkeypatch.setattr("chatmill.load.batch_builder.LOOKUP_BATCHES", 1)
    loader = EpisodeLoader(dataset, SMALL, tensors=False, ahead=1)
    thread = slowly(loader)
    before = loader.cursor()
    loader.close()
    thread.join()
    loader.get_batch()
    assert loader.cursor().step == before.step + 1


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_torch_data_loader_returns_the_same_batches_with_any_number_of_workers(dataset, workers):
    plain = list(EpisodeLoader(dataset, {**SMALL, "packing": "bins"}, epochs=4))
    loader = EpisodeLoader(dataset, {**SMALL, "packing": "bins"}, epochs=4)
    found = list(DataLoader(loader, batch_size=None, num_workers=workers))
    assert len(found) == len(plain)
    for one, other in zip(found, plain, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning", "ignore:'set_vital':UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_resumes_from_any_step(dataset, workers):
    def made() -> StatefulDataLoader:
        loader = EpisodeLoader(dataset, SMALL, epochs=2)
        return StatefulDataLoader(loader, batch_size=None, num_workers=workers)

    undisturbed = [batch.episode_ids.tolist() for batch in EpisodeLoader(dataset, SMALL, epochs=2)]
    for step in (0, 3, 8, len(undisturbed)):
        first = made()
        begun = [batch.episode_ids.tolist() for batch in islice(iter(first), step)]
        state = copy.deepcopy(first.state_dict())
        after = made()
        after.load_state_dict(state)
        assert begun + [batch.episode_ids.tolist() for batch in after] == undisturbed, step


def test_a_loader_is_pickled_without_prefetched_batches(dataset):
    loader = EpisodeLoader(dataset, SMALL, tensors=False)
    list(islice(loader, 3))
    other = copy.deepcopy(loader)
    assert same(other.get_batch(), loader.get_batch())


class Heard:
    def __init__(self) -> None:
        self.told: list = []
        self.digests: list = []

    def loaded(self, loader) -> None:
        self.told.append("loaded")

    def epoch_started(self, plan, epoch) -> None:
        self.told.append(("start", plan.split, epoch))

    def delivered(self, plan, step, digest, given) -> None:
        self.told.append(step.at.step)
        self.digests.append(digest.tolist())

    def epoch_completed(self, plan, epoch, step) -> None:
        self.told.append(("complete", epoch, sorted(step.dropped.tolist())))


def test_a_listener_is_called_when_batches_are_returned(dataset):
    heard = Heard()
    loader = EpisodeLoader(dataset, {**SMALL, "batch_size": 8, "epoch_shuffle": False}, listener=heard, ahead=2)
    assert heard.told == ["loaded"]
    list(islice(loader, 4))
    rest = list(range(24, 30))
    assert heard.told == ["loaded", ("start", "train", 0), 0, 1, 2, ("complete", 0, rest), ("start", "train", 1), 3]


def test_digests_of_ranks_add_up_to_the_digest_of_the_global_batch(dataset):
    whole, parts = Heard(), [Heard(), Heard()]
    EpisodeLoader(dataset, SMALL, listener=whole).get_batch()
    for rank in range(2):
        EpisodeLoader(dataset, SMALL, rank=rank, world_size=2, listener=parts[rank]).get_batch()
    total = sum(np.array(part.digests[0], dtype=np.uint64) for part in parts)
    assert total.tolist() == whole.digests[0]
    batch = EpisodeLoader(dataset, SMALL, tensors=False).get_batch()
    assert sha256_rows(batch, [0], 0).sum(axis=0, dtype=np.uint64).tolist() == whole.digests[0]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_a_loader_with_a_listener_does_not_run_in_workers(dataset):
    loader = DataLoader(EpisodeLoader(dataset, SMALL, listener=Heard()), batch_size=None, num_workers=1)
    with pytest.raises(UsageError, match="set num_workers=0"):
        next(iter(loader))


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
