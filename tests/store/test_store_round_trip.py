from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_rows import build, rows_, unbuild
from store_fixtures import contents, equal, finish, some_rows, write_dataset, write_split

from chatmill.errors import DataError
from chatmill.rows import EMPTY, NO_FILE, File, Rows, concat
from chatmill.store import episodes as episodes_module
from chatmill.store.layout import lower_bound
from chatmill.store.mapped import MappedFile
from chatmill.store.read import is_dataset, open_dataset
from chatmill.store.write import CHUNK_TOKENS, SplitWriter

cuts_ = st.lists(st.integers(0, 4), max_size=4)


def split_at(rows: Rows, cuts: list[int]) -> list[Rows]:
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    return [rows[a:b] for a, b in pairwise(edges)]


@given(rows_, cuts_, st.integers(1, 20), st.data())
def test_any_choice_of_episodes_reads_back_as_written(plain, cuts, shard_tokens, data):
    rows = build(plain)
    with tempfile.TemporaryDirectory() as folder:
        staging = Path(folder) / "x"
        info = write_split(staging / "train", split_at(rows, cuts), vocab_size=2**32, shard_tokens=shard_tokens)
        finish(staging, {"train": info}, vocab_size=2**32)
        episodes = open_dataset(staging)["train"]
        numbers = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=40) if len(rows) else st.just([]))
        found = episodes.rows(numbers)
        found.check()
        assert unbuild(found) == [unbuild(rows)[number] for number in numbers]
        assert np.array_equal(found.origins["key"], rows.take(numbers).origins["key"])
        assert episodes.lengths.tolist() == rows.lengths.tolist()
        assert episodes.lengths_of(numbers).tolist() == rows.lengths[numbers].tolist()
        for number in range(len(rows)):
            assert episodes.tokens(number).tolist() == rows[number : number + 1].ids.tolist()
            assert episodes.mask(number).tolist() == rows[number : number + 1].mask().tolist()
        swept = list(episodes.sweep(tokens=data.draw(st.integers(1, 30))))
        assert equal(concat(swept) if swept else EMPTY, rows)


@given(rows_, cuts_, cuts_, st.integers(1, 20))
def test_shard_bytes_do_not_depend_on_how_rows_are_chunked(plain, one, other, shard_tokens):
    rows = build(plain)
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for name, cuts in (("one", one), ("other", other)):
            parts = split_at(rows, cuts)
            if name == "other":
                # If a process has already read other files, these files are listed first in its file table.
                parts = [concat([Rows(**vars_of(EMPTY), files=(File("s", "z"), *rows.files[::-1])), p]) for p in parts]
            info = write_split(Path(folder) / name, parts, vocab_size=2**32, shard_tokens=shard_tokens)
            found.append((info, contents(Path(folder) / name)))
        assert found[0] == found[1]


def vars_of(rows: Rows) -> dict:
    return {name: getattr(rows, name) for name in ("ids", "spans", "first_span", "origins", "first_segment")}


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 12))
def test_a_shard_ends_before_the_row_that_would_exceed_its_size(lengths, shard_tokens):
    expected: list[list[int]] = []
    for length in lengths:
        if not expected or sum(expected[-1]) + length > shard_tokens:
            expected.append([])
        expected[-1].append(length)
    plain = [[((None, 0), [([1] * length, 0, 0, 1.0, 0, -1)] if length else [])] for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        info = write_split(Path(folder) / "train", [build(plain)], vocab_size=9, shard_tokens=shard_tokens)
        finish(Path(folder), {"train": info}, vocab_size=9)
        episodes = open_dataset(folder)["train"]
        found = [episodes.array(number, "episodes.idx")["length"].tolist() for number in range(len(episodes.shards))]
    assert found == expected
    assert [(shard.shortest, shard.longest) for shard in info.shards] == [(min(part), max(part)) for part in expected]


def test_rows_longer_than_a_slab_are_written_whole(tmp_path):
    long = [((None, 0), [(list(range(7)) * (CHUNK_TOKENS // 7 + 1), 0, 0, 1.0, 0, -1)])]
    rows = build([long, long, [((None, 1), [([1], 0, 0, 0.0, 0, -1)])]])
    info = write_split(tmp_path / "train", [rows], vocab_size=7, shard_tokens=10 * CHUNK_TOKENS)
    finish(tmp_path, {"train": info}, vocab_size=7)
    assert [shard.num_episodes for shard in info.shards] == [3]
    assert equal(open_dataset(tmp_path)["train"].rows([0, 1, 2]), rows)


@pytest.mark.parametrize(("vocab_size", "width"), [(65536, 2), (65537, 4)])
def test_the_token_width_follows_from_the_vocabulary_size(tmp_path, vocab_size, width):
    rows = build([[((None, 0), [([0, vocab_size - 1], 0, 0, 1.0, 0, -1)])]])
    metadata = write_dataset(tmp_path / "x", {"train": rows}, vocab_size=vocab_size)
    assert (tmp_path / "x/train/shard_00000/tokens.bin").stat().st_size == 2 * width
    assert metadata.dtype.itemsize == width
    assert open_dataset(tmp_path / "x")["train"].tokens(0).tolist() == [0, vocab_size - 1]


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([([1], 0, 0, 1.0, 0, -1), ([1, 10], 0, 0, 1.0, 0, -1)], "a:812: token id 10; expected an id below 10"),
        ([([1], 0, 0, 1.0, 0, -1), ([1], 0, 0, 1.0, 0, 11)], "a:812: target 11; expected an id below 10"),
    ],
)
def test_an_id_beyond_the_vocabulary_is_refused_with_its_position(tmp_path, spans, said):
    rows = build([[(("a", 811), [([2], 0, 0, 1.0, 0, -1)]), (("a", 812), spans)]])
    with SplitWriter(tmp_path / "train", vocab_size=10, shard_tokens=100) as writer, pytest.raises(DataError) as error:
        writer.append(rows)
    assert str(error.value) == said


def test_files_on_disk_follow_the_specification(tmp_path):
    """Read the files of a dataset with numpy only, as another program would."""
    rows = build(
        [
            [(("a", 1), [([5, 6], 1, 0, 0.0, 0, -1), ([7], 2, 1, 1.0, 0, -1)])],
            [((None, 2), [([8, 9], 2, 0, 0.5, 0, 3)]), (("b", 9), [([4], 2, 0, 0.0, 0, -1)])],
        ]
    )
    write_dataset(tmp_path / "x", {"train": rows})
    shard = tmp_path / "x/train/shard_00000"
    assert np.fromfile(shard / "tokens.bin", "<u2").tolist() == [5, 6, 7, 8, 9, 4]
    assert np.fromfile(shard / "mask.bin", "u1").tolist() == [0, 0, 1, 1, 1, 0]
    assert np.fromfile(shard / "episodes.idx", "<u8").reshape(-1, 2).tolist() == [[0, 3], [3, 3]]
    span = np.dtype([("length", "<u4"), ("message", "<u4"), ("weight", "<f4"), ("codes", "u1", (3,))])
    assert np.fromfile(shard / "spans.bin", span)["length"].tolist() == [2, 1, 2, 1]
    origin = np.dtype([("first_span", "<u8"), ("row", "<u8"), ("file", "<u4"), ("line", "<u8"), ("key", "<u8", (2,))])
    origins = np.fromfile(shard / "origins.bin", origin)
    assert origins["first_span"].tolist() == [0, 2, 3]
    assert origins["row"].tolist() == [0, 1, 1]
    assert origins["file"].tolist() == [0, NO_FILE, 1]
    assert origins["line"].tolist() == [1, 2, 9]
    assert np.fromfile(shard / "targets.bin", [("span", "<u8"), ("target", "<u4")]).tolist() == [(2, 3)]


def test_without_targets_there_is_no_targets_file(tmp_path):
    write_dataset(tmp_path / "x", {"train": some_rows(0, targets=False)})
    assert not list((tmp_path / "x").rglob("targets.bin"))


def test_the_same_rows_give_the_same_dataset_in_any_folder(tmp_path):
    (tmp_path / "deep").mkdir()
    one = write_dataset(tmp_path / "one", {"train": some_rows(1), "val": some_rows(2)})
    other = write_dataset(tmp_path / "deep/other", {"train": some_rows(1), "val": some_rows(2)})
    assert contents(tmp_path / "one") == contents(tmp_path / "deep/other")
    assert one.sha256 == other.sha256 == open_dataset(tmp_path / "one").sha256
    assert write_dataset(tmp_path / "third", {"train": some_rows(1), "val": some_rows(3)}).sha256 != one.sha256


def test_the_metadata_of_a_dataset_is_read_back(tmp_path):
    written = write_dataset(tmp_path / "x", {"train": some_rows(1), "val": EMPTY})
    dataset = open_dataset(tmp_path / "x")
    assert dataset.metadata == written
    assert dataset.splits == ("train", "val")
    assert len(dataset["val"]) == 0 and "val" in dataset and "test" not in dataset
    assert dataset.tokenizer_state() == {"kind": "bytes"}
    assert dataset.metadata.config == {"fit": "turns", "share": 1e-05}
    with pytest.raises(DataError, match="has no split test; expected train, val"):
        dataset["test"]
    assert is_dataset(tmp_path / "x") and not is_dataset(tmp_path)


def test_episodes_beyond_the_last_are_an_error(tmp_path):
    write_dataset(tmp_path / "x", {"train": some_rows(1)})
    episodes = open_dataset(tmp_path / "x")["train"]
    for number in (-1, len(episodes)):
        with pytest.raises(IndexError):
            episodes.rows([0, number])
        with pytest.raises(IndexError):
            episodes.tokens(number)


@pytest.mark.parametrize("most", [4, 1 << 15])
def test_many_shards_are_read_without_open_files(tmp_path, monkeypatch, most):
    monkeypatch.setattr(episodes_module, "MAPPED", most)
    rows = some_rows(5, count=60)
    write_dataset(tmp_path / "x", {"train": rows}, shard_tokens=20)
    episodes = open_dataset(tmp_path / "x")["train"]
    before, maps = len(list(Path("/proc/self/fd").iterdir())), MappedFile.live
    for order in (np.arange(60), np.arange(60)[::-1], np.random.default_rng(0).permutation(60)):
        assert equal(episodes.rows(order), rows.take(order))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert most > 4 or MappedFile.live - maps <= 4


def test_open_episodes_can_be_pickled(tmp_path):
    rows = some_rows(5)
    write_dataset(tmp_path / "x", {"train": rows})
    episodes = open_dataset(tmp_path / "x")["train"]
    assert episodes.lengths.tolist() == rows.lengths.tolist()
    assert equal(pickle.loads(pickle.dumps(episodes)).rows(range(len(rows))), rows)  # noqa: S301


def test_a_dataset_replaced_while_it_is_read_is_not_mixed_with_the_new_one(tmp_path):
    write_dataset(tmp_path / "x", {"train": some_rows(5)})
    episodes = open_dataset(tmp_path / "x")["train"]
    travelled = pickle.dumps(episodes)
    write_dataset(tmp_path / "x", {"train": some_rows(6)}, overwrite=True)
    for old in (episodes, pickle.loads(travelled)):  # noqa: S301
        with pytest.raises(DataError, match="was replaced while it was being read; open it again"):
            old.rows([0])


@given(st.lists(st.integers(0, 30), max_size=80), st.integers(0, 31), st.integers(0, 80))
def test_lower_bound_equals_searchsorted(column, value, low):
    strided = np.zeros(len(column), dtype=[("odd", "u1"), ("row", "<u8")])["row"]
    strided[:] = sorted(column)
    low = min(low, len(column))
    assert lower_bound(strided, value, low) == max(low, np.searchsorted(sorted(column), value))


def test_reading_requires_only_numpy():
    """Container images for training often contain only numpy, torch and safetensors."""
    absent = ["msgspec", "typer", "rich", "tokenizers", "jinja2", "torch"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import chatmill.store.read, chatmill.store.verify"
    subprocess.run([sys.executable, "-c", code], check=True)
