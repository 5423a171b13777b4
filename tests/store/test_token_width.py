"""The token width of another program's dataset is detected if it is unambiguous; otherwise, the user must specify it.

The tests write datasets with plain numpy, like the example scripts of the specification. Expected values are computed
from the written arrays.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.errors import DataError, UsageError
from chatmill.load import EpisodeLoader
from chatmill.store.read import open_dataset
from chatmill.store.verify import verify_dataset

ASKS = "set token_dtype in the config, or pass --token-dtype"
DTYPES = {"uint16": np.uint16, "uint32": np.uint32}


@dataclass
class Shard:
    tokens: np.ndarray
    mask: np.ndarray | None
    episodes: list[tuple[int, int]]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.tokens.tofile(folder / "tokens.bin")
        if self.mask is not None:
            self.mask.tofile(folder / "mask.bin")
        np.array(self.episodes, dtype=np.uint64).reshape(-1, 2).tofile(folder / "episodes.idx")

    def rows(self) -> list[list[int]]:
        return [self.tokens[start : start + length].tolist() for start, length in self.episodes]

    def masks(self) -> list[list[int]]:
        mask = np.ones(len(self.tokens), np.uint8) if self.mask is None else self.mask
        return [mask[start : start + length].tolist() for start, length in self.episodes]

    def may_be_uint32(self) -> bool:
        end = max((start + length for start, length in self.episodes), default=0)
        return self.tokens.nbytes % 4 == 0 and 4 * end <= self.tokens.nbytes

    def cover(self) -> np.ndarray:
        counts = np.zeros(len(self.tokens), int)
        for start, length in self.episodes:
            counts[start : start + length] += 1
        return counts


@st.composite
def shards(draw, dtype: str, masked: bool):
    size = draw(st.integers(0, 24))
    limit = 2 ** draw(st.sampled_from([4, 8 * np.dtype(dtype).itemsize]))
    tokens = np.array(draw(st.lists(st.integers(0, limit - 1), min_size=size, max_size=size)), DTYPES[dtype])
    mask = np.array(draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)), np.uint8) if masked else None
    within = draw(st.sampled_from([size, size, size // 2]))
    cuts = sorted(draw(st.lists(st.integers(0, within), max_size=5)))
    edges = [0, *cuts, within]
    episodes = [(a, b - a) for a, b in pairwise(edges)]
    kind = draw(st.sampled_from(["tiled", "gaps", "any order", "overlapping"]))
    if kind == "gaps":
        episodes = [each for each in episodes if draw(st.booleans())]
    elif kind == "any order":
        episodes = draw(st.permutations(episodes))
    elif kind == "overlapping":
        episodes += [(a, b - a) for a, b in (sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for _ in range(2))]
    return Shard(tokens, mask, episodes)


@st.composite
def stores(draw):
    dtype, masked = draw(st.sampled_from(["uint16", "uint32"])), draw(st.booleans())
    every = draw(st.lists(shards(dtype, masked), min_size=1, max_size=3))
    said = draw(st.sampled_from([None, None, None, f"np.{dtype}", "<u2" if dtype == "uint16" else "<u4"]))
    return dtype, every, said


def write(folder: Path, every: list[Shard], said: str | None = None) -> Path:
    if len(every) == 1:
        every[0].write(folder / "train")
    else:
        for number, shard in enumerate(every):
            shard.write(folder / "train" / f"shard_{number:05d}")
    if said is not None:
        metadata = {"schema": "episode_indexed_sft_v1", "tokens": {"dtype": said}, "mask": {"dtype": "uint8"}}
        (folder / "dataset_metadata.json").write_text(json.dumps(metadata))
    return folder


def read(folder: Path, token_dtype: str | None = None) -> tuple[list[list[int]], list[list[int]]]:
    episodes = open_dataset(folder, token_dtype=token_dtype)["train"]
    rows = episodes.rows(range(len(episodes)))
    rows.check()
    starts = np.cumsum([0, *rows.lengths])
    ids, mask = rows.ids.tolist(), rows.mask().astype(int).tolist()
    pairs = list(pairwise(starts))
    assert [episodes.tokens(number).tolist() for number in range(len(episodes))] == [ids[a:b] for a, b in pairs]
    return [ids[a:b] for a, b in pairs], [mask[a:b] for a, b in pairs]


@settings(max_examples=40)
@given(stores())
def test_the_ids_are_exact_or_the_store_is_refused_until_its_type_is_given(store):
    dtype, every, said = store
    filled = [shard for shard in every if len(shard.tokens)]
    is_settled = said is not None or every[0].mask is not None
    is_ambiguous = not is_settled and bool(filled) and all(shard.may_be_uint32() for shard in filled)
    right = [row for shard in every for row in shard.rows()], [mask for shard in every for mask in shard.masks()]
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name) / "d", every, said)
        if is_ambiguous:
            for opens in (lambda: open_dataset(folder), lambda: EpisodeLoader(folder, {"pad_token_id": 0})):
                with pytest.raises(DataError) as error:
                    opens()
                assert str(error.value).endswith(ASKS) and "\n" not in str(error.value)
            assert verify_dataset(folder, full=True).faults == (str(error.value),)
        else:
            assert dtype == "uint16" or is_settled or not filled
            assert read(folder) == right
        assert read(folder, dtype if filled else None) == right
        result = verify_dataset(folder, full=True, token_dtype=dtype if filled else None)
        counts, cover = result.splits["train"], np.concatenate([shard.cover() for shard in every])
        trained = np.concatenate([np.ones(len(s.tokens)) if s.mask is None else s.mask for s in every])
        assert result.faults == ()
        assert (counts.tokens, counts.uncovered, counts.shared) == (len(cover), (cover == 0).sum(), (cover > 1).sum())
        assert counts.trained == np.count_nonzero(trained[cover > 0])


def test_half_covered_uint16_without_a_mask_is_never_read_as_uint32(tmp_path):
    store = Shard(np.arange(8, dtype=np.uint16), None, [(0, 2), (2, 2)])
    folder = write(tmp_path / "d", [store])
    with pytest.raises(DataError, match=r"its tokens may be uint16 or uint32: there is no mask\.bin"):
        open_dataset(folder)
    assert read(folder, "uint16")[0] == [[0, 1], [2, 3]]
    (folder / "dataset_metadata.json").write_text('{"token_dtype": "uint16"}')
    assert read(folder)[0] == [[0, 1], [2, 3]]
    (folder / "dataset_metadata.json").write_text('{"num_train_tokens": 8}')
    assert read(folder)[0] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("metadata", "token_dtype", "said"),
    [
        ({"dtype": "uint32"}, "uint16", "token_dtype is uint16, but dataset_metadata.json records uint32"),
        ({"dtype": "int64"}, None, "dtype: int64 is an unsupported type; expected uint16 or uint32"),
        ({"dtype": ">u2"}, None, "dtype: >u2 is an unsupported type; expected uint16 or uint32, little-endian"),
        (
            {"dtype": "uint16", "token_dtype": "uint32"},
            None,
            "records several token types (dtype: uint16, token_dtype: uint32)",
        ),
        ({}, "uint8", "token_dtype is uint8; expected uint16 or uint32"),
    ],
)
def test_all_sources_of_the_type_must_agree(tmp_path, metadata, token_dtype, said):
    folder = write(tmp_path / "d", [Shard(np.arange(8, dtype=np.uint16), None, [(0, 4)])])
    (folder / "dataset_metadata.json").write_text(json.dumps(metadata))
    with pytest.raises((DataError, UsageError)) as error:
        open_dataset(folder, token_dtype=token_dtype)
    assert said in str(error.value)


@pytest.mark.parametrize("said", ["token_dtype", "metadata"])
def test_a_type_that_contradicts_the_files_is_refused(tmp_path, said):
    masked = write(tmp_path / "m", [Shard(np.arange(8, dtype=np.uint16), np.ones(8, np.uint8), [(0, 8)])])
    tiled = write(tmp_path / "t", [Shard(np.arange(8, dtype=np.uint16), None, [(0, 8)])])
    for folder, why in ((masked, "mask.bin is 8 bytes"), (tiled, "episodes.idx ends at token 8")):
        if said == "metadata":
            (folder / "dataset_metadata.json").write_text('{"dtype": "uint32"}')
        with pytest.raises(DataError) as error:
            open_dataset(folder, token_dtype="uint32" if said == "token_dtype" else None)
        assert f"but this file is 16 bytes and {why}; expected uint16" in str(error.value)


@pytest.mark.parametrize(
    ("metadata", "width"),
    [
        ({"dtype": "uint32"}, 4),
        ({"token_dtype": "numpy.uint16"}, 2),
        ({"tokens_dtype": "<class 'numpy.uint32'>"}, 4),
        ({"dtypes": {"tokens": "<u4", "mask": "|u1", "episodes": "<u8"}}, 4),
        ({"files": {"tokens.bin": {"dtype": "uint16"}, "mask.bin": {"dtype": "uint8"}}}, 2),
        ({"tokens.bin": "np.uint32", "episodes.idx": "np.uint64"}, 4),
        ({"bytes_per_token": 4, "mask_dtype": "uint8"}, 4),
        ({"dtype": "int32"}, 4),
        ({"num_train_tokens": 4, "model": {"dtype": "bfloat16"}}, 4),
    ],
)
def test_the_type_is_read_from_the_metadata_of_other_programs(tmp_path, metadata, width):
    folder = write(tmp_path / "d", [Shard(np.arange(1, 9, dtype=np.uint16), None, [(0, 4)])])
    (folder / "dataset_metadata.json").write_text(json.dumps(metadata))
    ids = np.arange(1, 9, dtype=np.uint16)
    assert read(folder)[0] == [(ids if width == 2 else ids.view(np.uint32))[:4].tolist()]


def test_batches_have_the_type_that_the_config_names(tmp_path):
    tokens = np.array([70000, 2, 3, 70001], np.uint32)
    folder = write(tmp_path / "d", [Shard(tokens, None, [(2, 2), (0, 2)])])
    config = {"pad_token_id": 0, "block_size": 2, "batch_size": 2, "epoch_shuffle": False}
    batch = EpisodeLoader(folder, {**config, "token_dtype": "uint32"}, tensors=False).get_batch()
    assert (batch.x.tolist(), batch.y.tolist()) == ([[3, 70001], [70000, 2]], [[70001, -100], [2, -100]])
    hashes = {name: EpisodeLoader(folder, {**config, "token_dtype": name}).sha256 for name in DTYPES}
    assert hashes["uint16"] != hashes["uint32"]


def test_a_dataset_written_by_the_specifications_script_opens(tmp_path):
    """The dataset format of https://github.com/chberclaz/MyPT: uint32 tokens, no shard folders, other metadata keys."""
    talks = [[50257, 10, 50258, 50275], [50259, 7, 8, 50260, 50275]]
    tokens, masks, episodes = [], [], []
    for talk in talks:
        episodes.append((len(tokens), len(talk)))
        tokens.extend(talk)
        masks.extend([0] * 2 + [1] * (len(talk) - 2))
    for split in ("train", "val"):
        Shard(np.array(tokens, np.uint32), np.array(masks, np.uint8), episodes).write(tmp_path / split)
    special = {"myPT_system_open": 50257, "myPT_system_close": 50258, "myPT_eot": 50275}
    state = {"token_kind": "gpt2", "chars": None, "base_vocab_size": 50257, "model_vocab_size": 50304}
    state |= {"special_token_encoder": {f"<{name}>": id for name, id in special.items()}}
    state |= {"special_tokens_by_name": special, "special_token_version": 1}
    (tmp_path / "tokenizer_state.json").write_text(json.dumps(state, indent=2))
    metadata = {"schema": "episode_indexed_sft_v1", "has_loss_mask": True, "num_train_episodes": 2}
    metadata |= {"num_val_episodes": 2, "num_train_tokens": 9, "num_val_tokens": 9, "vocab_size": 50304}
    (tmp_path / "dataset_metadata.json").write_text(json.dumps(metadata, indent=2))
    config = {"batch_size": 2, "block_size": 5, "epoch_shuffle": False, "use_loss_mask": True}
    batch = EpisodeLoader(tmp_path, config, tensors=False).get_batch()
    assert batch.x.tolist() == [[50257, 10, 50258, 50275, 50275], [50259, 7, 8, 50260, 50275]]
    assert batch.y.tolist() == [[-100, 50258, 50275, -100, -100], [-100, 8, 50260, 50275, -100]]
    assert verify_dataset(tmp_path, full=True).faults == ()


def test_a_mix_by_tokens_counts_the_tokens_in_episodes(tmp_path):
    """Episodes may overlap or leave gaps in the file, so count the tokens of the episodes, not those of the file."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 9, 60).astype(np.uint16)
    mask = (rng.random(60) < 0.5).astype(np.uint8)
    episodes = {"a": [(40, 5), (0, 9), (20, 12)], "b": [(0, 6), (3, 6), (30, 1)]}
    for name, ranges in episodes.items():
        write(tmp_path / name, [Shard(ids, mask, ranges)])
    config = {"pad_token_id": 0, "block_size": 7, "mix_sft": {"a": 1, "b": 1}, "use_loss_mask": True}
    for mix_by in ("tokens", "trained_tokens"):
        schedule = EpisodeLoader(tmp_path, {**config, "mix_by": mix_by}).plan("train").order.schedule
        sizes = {}
        for name, ranges in episodes.items():
            kept = [(max(s, s + n - 8), s + n) for s, n in ranges if n >= 2]
            first = 1 if mix_by == "trained_tokens" else 0
            counted = mask if first else np.ones(60)
            sizes[name] = sum(counted[a + first : b].sum() for a, b in kept) / len(kept)
        assert schedule.weights[0] / schedule.weights[1] == pytest.approx(sizes["b"] / sizes["a"])
