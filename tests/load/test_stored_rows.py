from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from load_fixtures import talks, write_plain_files, write_rows, write_source
from plain_rows import build, rows_

from chatmill.errors import DataError
from chatmill.load.batch import HashedRows
from chatmill.load.digests import sha256_rows
from chatmill.load.loader import EpisodeLoader
from chatmill.load.plan import Window
from chatmill.load.stored_rows import _batch, look_up, row_table
from chatmill.rows import OWN_ID, Part

pytestmark = pytest.mark.skipif(_batch is None, reason="the C extension is not built")


def both(loader, episodes, first):
    plan, rows = loader.plan("train"), Window(np.array(episodes, dtype=np.int64), np.array(first, dtype=np.int64))
    assert type(look_up(plan, rows)).__name__ == "StoredRows"
    return [table.build(0, rows.num_rows, hashed_rows(rows)) for table in (look_up(plan, rows), row_table(plan, rows))]


def hashed_rows(rows):
    """Request the digests of two steps if the number of rows is even, otherwise of one step."""
    return HashedRows([2**40, 7] if rows.num_rows % 2 == 0 else [2**40], 3)


def assert_equal(mine, other):
    for name, one, two in zip(mine.batch._fields, mine.batch, other.batch, strict=True):
        # Truncated segments leave trailing columns of -1 in `episode_ids`.
        one = one[:, : two.shape[1]] if name == "episode_ids" else one
        assert one.dtype == two.dtype, name
        np.testing.assert_array_equal(one, two, err_msg=name)
    assert (mine.batch.episode_ids[:, other.batch.episode_ids.shape[1] :] == -1).all()
    np.testing.assert_array_equal(mine.counts, other.counts)
    np.testing.assert_array_equal(mine.num_segments, other.num_segments)
    steps, first_row = hashed_rows(Window(np.empty(0), np.empty(len(mine.counts) + 1)))
    assert other.digests is None
    np.testing.assert_array_equal(mine.digests, sha256_rows(other.batch, steps, first_row))


@settings(max_examples=150)
@given(
    plain=rows_,
    more=rows_,
    data=st.data(),
    shard_tokens=st.sampled_from([1, 12, 1000]),
    block_size=st.integers(1, 12),
    use_loss_mask=st.booleans(),
)
def test_rows_and_counts_equal_those_of_numpy(plain, more, data, shard_tokens, block_size, use_loss_mask):
    rows = build([*plain, *more, [((None, 1), [([5, 6], 1, 0, 1.0, 0, -1)])]])
    rows.spans["target"] = OWN_ID
    for span in np.flatnonzero(rows.spans["weight"] == 0):
        rows.spans["part"][span] = data.draw(st.sampled_from([Part.CONTENT, Part.PAD]))
    with tempfile.TemporaryDirectory() as folder:
        target = write_rows(Path(folder) / "d", {"train": rows}, vocab_size=2**32, shard_tokens=shard_tokens)
        config = {"block_size": block_size, "use_loss_mask": use_loss_mask, "episode_min_tokens": 0}
        loader = EpisodeLoader(target, config, tensors=False)
        episodes, first, filled = [], [0], 0
        for episode in data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12)):
            kept = min(int(rows.lengths[episode]), block_size + 1)
            if filled + kept > block_size + 1 or data.draw(st.booleans()):
                first.append(len(episodes))
                filled = 0
            episodes.append(episode)
            filled += kept
        assert_equal(*both(loader, episodes, [*first, len(episodes), len(episodes)]))


def test_rows_of_uint16_ids_caches_and_other_programs_equal_those_of_numpy(tmp_path):
    rows = talks(3, 40)
    episodes = [rows.ids[a:b].tolist() for a, b in zip(rows.row_start[:-1], rows.row_start[1:], strict=True)]
    masks = [rows.mask()[a:b].tolist() for a, b in zip(rows.row_start[:-1], rows.row_start[1:], strict=True)]
    write_source(tmp_path / "caches", "only", {"train": rows, "val": talks(4, 3)})
    for target in (
        write_rows(tmp_path / "narrow", {"train": rows}),
        tmp_path / "caches" / "only",
        write_plain_files(tmp_path / "theirs", episodes, masks),
        write_plain_files(tmp_path / "unmasked", episodes, None),
    ):
        config = {"block_size": 40, "use_loss_mask": target.name != "unmasked", "pad_token_id": 3}
        loader = EpisodeLoader(target, {**config, "token_dtype": "uint16"}, tensors=False)
        mine, other = both(loader, [7, 31, 2, 39, 0], [0, 1, 3, 5])
        assert_equal(mine, other)
        # Empty rows would be equal too, so check the token counts. test_batches.py compares all values with an oracle.
        assert mine.counts[:, 1].tolist() == [len(episodes[7]), len(episodes[31] + episodes[2]),
                                              len(episodes[39] + episodes[0])]  # fmt: skip


@pytest.mark.parametrize("vocab_size", [300, 2**32])
def test_digests_of_long_rows_are_those_of_numpy(tmp_path, vocab_size):
    rng = np.random.default_rng(0)
    rows = talks(3, 200)
    rows.ids[:] = rng.integers(0, vocab_size, len(rows.ids))
    # Tokens with weight 0 or -0 have no label. Tokens without a label get the weight 0, which differs from -0 in its
    # bytes.
    rows.spans["weight"] = rng.choice([0, -0.0, 0.25, 1, 1, 1], len(rows.spans))
    target = write_rows(tmp_path / "d", {"train": rows}, vocab_size=vocab_size)
    loader = EpisodeLoader(target, {"block_size": 500}, tensors=False)
    first, filled = [0], 0
    for episode, length in enumerate(rows.lengths.tolist()):
        if filled + length > 501:
            first.append(episode)
            filled = 0
        filled += length
    assert len(first) > 4
    mine, other = both(loader, range(200), [*first, 200])
    assert_equal(mine, other)


def test_threads_that_build_batches_at_the_same_time_get_the_same_digests(tmp_path):
    target = write_rows(tmp_path / "d", {"train": talks(3, 200)})
    plan = EpisodeLoader(target, {"block_size": 2000}, tensors=False).plan("train")
    # Windows of different sizes need different amounts of memory.
    windows = [Window(np.arange(size * 10), np.arange(0, size * 10 + 1, 10)) for size in (1, 2, 5, 16, 20)]

    def digests(window):
        return look_up(plan, window).build(0, window.num_rows, HashedRows([7], 3)).digests

    expected = [digests(window) for window in windows]
    with ThreadPoolExecutor(4) as pool:
        for number, made in enumerate(pool.map(digests, windows * 60)):
            np.testing.assert_array_equal(made, expected[number % len(windows)])


def test_spans_that_do_not_tile_their_tokens_are_refused(tmp_path):
    target = write_rows(tmp_path / "d", {"train": talks(1, 8)}, shard_tokens=1000)
    path = target / "train" / "shard_00000" / "spans.bin"
    right = path.read_bytes()
    for length in (right[15 * 5] + 1, right[15 * 5] - 1, 0, 255):
        path.write_bytes(right[: 15 * 5] + bytes([length]) + right[15 * 5 + 1 :])
        loader = EpisodeLoader(target, {"batch_size": 8, "block_size": 40}, tensors=False)
        with pytest.raises(DataError, match=r"spans\.bin: spans do not exactly cover the tokens of their rows; the"):
            loader.get_batch()
