from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from load_fixtures import SMALL, expected, listed, same, talks, write_plain_files, write_rows, write_source

from chatmill.errors import DataError, UsageError
from chatmill.load.loader import EpisodeLoader
from chatmill.store.layout import TOKENS, shard_name


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
    """The source `long` has long rows, which are truncated. The source `short` has short rows, some of which are
    skipped.
    """
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
        DataError, match=r"is neither a dataset .* nor a folder of caches; expected a folder that chatmill prepare or "
    ):
        EpisodeLoader(tmp_path, SMALL)
    with pytest.raises(DataError, match="no such folder"):
        EpisodeLoader(tmp_path / "none", SMALL)


def test_ids_of_two_widths_are_not_read_together(tmp_path):
    narrow = write_plain_files(tmp_path / "all" / "narrow", [[5, 6, 7]], [[1, 1, 1]]) / "train" / shard_name(0)
    wide = write_plain_files(tmp_path / "all" / "wide", [[5, 6, 7]], [[1, 1, 1]]) / "train" / shard_name(0)
    np.array([5, 6, 7], dtype="<u4").tofile(wide / TOKENS)
    config = {"batch_size": 1, "block_size": 4, "pad_token_id": 0, "mix_sft": {"narrow": 1.0, "wide": 1.0}}
    with pytest.raises(DataError) as raised:
        EpisodeLoader(tmp_path / "all", config)
    assert str(raised.value) == (
        f"{wide}: has token ids of 32 bits, but {narrow} has token ids of 16 bits; rebuild one of them"
    )
