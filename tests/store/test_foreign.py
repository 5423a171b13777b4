from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chatmill.errors import DataError
from chatmill.rows import Role, Rule
from chatmill.store.read import is_dataset, open_dataset
from chatmill.store.verify import SplitCounts, verify_dataset

EPISODES = [([5, 6, 7], [0, 1, 1]), ([], []), ([8, 9], [1, 1]), ([1, 2], [0, 0])]


def write(folder: Path, episodes, *, dtype: str = "<u2", mask: bool = True) -> None:
    folder.mkdir(parents=True)
    lengths = [len(ids) for ids, _ in episodes]
    np.array([i for ids, _ in episodes for i in ids], dtype).tofile(folder / "tokens.bin")
    np.array([[sum(lengths[:n]), length] for n, length in enumerate(lengths)], "<u8").tofile(folder / "episodes.idx")
    if mask:
        np.array([m for _, masks in episodes for m in masks], "u1").tofile(folder / "mask.bin")


def plain(folder: Path, split: str = "train") -> list:
    episodes = open_dataset(folder)[split]
    rows = episodes.rows(range(len(episodes)))
    rows.check()
    assert [episodes.tokens(n).tolist() for n in range(len(rows))] == [r.ids.tolist() for r in each(rows)]
    assert [episodes.mask(n).tolist() for n in range(len(rows))] == [r.mask().astype(int).tolist() for r in each(rows)]
    return [(r.ids.tolist(), r.mask().astype(int).tolist()) for r in each(rows)]


def each(rows):
    return [rows[number : number + 1] for number in range(len(rows))]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_a_flat_dataset_opens_and_its_width_is_taken_from_the_mask(tmp_path, dtype):
    write(tmp_path / "train", EPISODES, dtype=dtype)
    write(tmp_path / "val", EPISODES[:1], dtype=dtype)
    assert is_dataset(tmp_path)
    assert plain(tmp_path) == EPISODES
    assert plain(tmp_path, "val") == EPISODES[:1]
    assert open_dataset(tmp_path).sha256 is None
    assert verify_dataset(tmp_path, full=True).faults == ()
    assert verify_dataset(tmp_path, full=False).splits["train"] == SplitCounts(4, 7, 4, 1)


def test_episodes_are_numbered_over_all_shards(tmp_path):
    write(tmp_path / "train/shard_00000", EPISODES[:2])
    write(tmp_path / "train/shard_00001", EPISODES[2:])
    (tmp_path / "dataset_metadata.json").write_text('{"schema_version": 3, "num_train_episodes": 4}')
    assert plain(tmp_path) == EPISODES
    assert open_dataset(tmp_path)["train"].rows([3, 0, 3]).ids.tolist() == [1, 2, 5, 6, 7, 1, 2]


def test_without_a_mask_every_token_is_trained(tmp_path):
    write(tmp_path / "train", EPISODES, mask=False)
    assert plain(tmp_path) == [(ids, [1] * len(ids)) for ids, _ in EPISODES]


def test_spans_are_runs_of_the_given_mask(tmp_path):
    write(tmp_path / "train", EPISODES)
    rows = open_dataset(tmp_path)["train"].rows([0, 1, 2, 3])
    assert rows.spans["length"].tolist() == [1, 2, 2, 2]
    assert rows.spans["weight"].tolist() == [0, 1, 1, 0]
    assert set(rows.spans["rule"].tolist()) == {Rule.GIVEN} and set(rows.spans["role"].tolist()) == {Role.NONE}
    assert rows.first_span.tolist() == [0, 2, 2, 3, 4]


def test_an_index_out_of_order_opens(tmp_path):
    write(tmp_path / "train", EPISODES)
    np.array([[3, 2], [0, 3], [5, 2], [0, 0]], "<u8").tofile(tmp_path / "train/episodes.idx")
    assert plain(tmp_path) == [EPISODES[2], EPISODES[0], EPISODES[3], ([], [])]
    assert verify_dataset(tmp_path, full=False).faults == ()


def test_tokens_outside_episodes_and_in_several_are_counted(tmp_path):
    write(tmp_path / "train", EPISODES)
    np.array([[5, 2], [0, 2], [1, 2]], "<u8").tofile(tmp_path / "train/episodes.idx")
    assert plain(tmp_path) == [EPISODES[3], ([5, 6], [0, 1]), ([6, 7], [1, 1])]
    result = verify_dataset(tmp_path, full=True)
    assert (result.faults, result.splits["train"]) == ((), SplitCounts(3, 7, 2, 1, uncovered=2, shared=1))


def test_verify_names_an_index_entry_beyond_the_tokens(tmp_path):
    write(tmp_path / "train", EPISODES)
    np.array([[2**63, 2**63 + 1], [0, 7]], "<u8").tofile(tmp_path / "train/episodes.idx")
    said = f"{tmp_path}/train/episodes.idx: episode 0 ends after the last of the 7 tokens"
    assert verify_dataset(tmp_path, full=False).faults == (said,)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


FAULTS = {
    "tokens cut": (
        lambda t: cut(t / "tokens.bin", 13),
        "tokens.bin: is 13 bytes, but mask.bin is 7 bytes; expected 14 or 28",
    ),
    "mask cut": (lambda t: cut(t / "mask.bin", 6), "mask.bin: is 6 bytes; expected 7, one per token"),
    "index cut": (lambda t: cut(t / "episodes.idx", 60), "episodes.idx: is 60 bytes; expected a multiple of 16"),
    "no tokens": (
        lambda t: (t / "tokens.bin").unlink(),
        "tokens.bin: no such file, but every shard must have this file; copy the dataset again",
    ),
    "a huge index": (
        lambda t: np.array([[2**63, 2**63 + 1]], "<u8").tofile(t / "episodes.idx"),
        "tokens.bin: is 14 bytes and mask.bin is 7 bytes, but episodes.idx ends at token 18446744073709551617",
    ),
    "flat and sharded": (
        lambda t: write(t / "shard_00000", EPISODES),
        "has both episodes.idx and shard folders; expected only one",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_inconsistent_files_are_refused_when_opened(tmp_path, fault):
    change, said = FAULTS[fault]
    write(tmp_path / "train", EPISODES)
    change(tmp_path / "train")
    with pytest.raises(DataError) as error:
        open_dataset(tmp_path)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["shard_00000", "shard_00002"], "train: shard_00001 is missing; expected shards numbered from 0 without gaps"),
        (["shard_00000", "shard_x"], "shard_x: expected a name like shard_00000"),
    ],
)
def test_a_missing_shard_is_refused(tmp_path, names, said):
    for name in names:
        write(tmp_path / "train" / name, EPISODES)
    with pytest.raises(DataError) as error:
        open_dataset(tmp_path)
    assert said in str(error.value)


def test_shards_of_two_widths_are_refused(tmp_path):
    write(tmp_path / "train/shard_00000", EPISODES)
    write(tmp_path / "train/shard_00001", EPISODES, dtype="<u4")
    with pytest.raises(DataError, match="some shards have 2-byte tokens and some have 4-byte tokens; expected one"):
        open_dataset(tmp_path)


def test_a_mask_with_invalid_values_is_named(tmp_path):
    write(tmp_path / "train", [([5, 6], [0, 3])])
    said = f"{tmp_path}/train/mask.bin: the mask of token 1 is 3; expected 0 or 1"
    assert verify_dataset(tmp_path, full=False).faults == (said,)
