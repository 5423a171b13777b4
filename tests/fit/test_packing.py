from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_rows import build, origins_, spans_, unbuild

from chatmill.errors import DataError
from chatmill.fit import Bins, pack, pack_lengths
from chatmill.rows import EMPTY, concat

# A segment may be empty, but a whole row may not.
plain_rows = st.lists(
    st.lists(st.tuples(origins_, st.lists(spans_, max_size=3)), min_size=1, max_size=3).filter(
        lambda row: any(spans for _, spans in row)
    ),
    max_size=9,
)


@st.composite
def lengths_and_capacity(draw):
    capacity = draw(st.integers(1, 40))
    return draw(st.lists(st.integers(1, capacity), max_size=80)), capacity


def naive(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    space: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        fitting = [(space[b], b) for b in range(len(bins)) if space[b] >= lengths[row]]
        if fitting:
            _, best = min(fitting)
        else:
            best = len(bins)
            bins.append([])
            space.append(capacity)
        bins[best].append(row)
        space[best] -= lengths[row]
    return [sorted(rows) for rows in bins]


def listed(bins: Bins) -> list[list[int]]:
    return [bins.order[start:stop].tolist() for start, stop in zip(bins.first[:-1], bins.first[1:], strict=True)]


def tokens(row: list) -> int:
    return sum(len(ids) for _, spans in row for ids, *_ in spans)


@pytest.mark.parametrize(
    ("lengths", "capacity", "expected"),
    [
        ([3, 2, 4], 5, [[2], [0, 1]]),
        # The first row of length 3 goes into the bin with 3 free tokens, not into the bin with 4 free tokens.
        ([6, 7, 3, 3], 10, [[1, 2], [0, 3]]),
        # Two bins are equally full, so the bin opened first is used.
        ([6, 6, 2], 8, [[0, 2], [1]]),
        # The two bins have 1 free token each. The bin opened first is used, although the other bin was filled first.
        ([14, 12, 7, 5, 1], 20, [[0, 3, 4], [1, 2]]),
        # Five rows of length 2 need three bins; the row of length 1 goes into one of the two fuller bins.
        ([2, 2, 1, 2, 2, 2], 5, [[0, 1, 2], [3, 4], [5]]),
        ([5, 5], 5, [[0], [1]]),
        ([1], 1, [[0]]),
    ],
)
def test_the_longest_remaining_row_goes_into_the_fullest_bin_with_room(lengths, capacity, expected):
    assert listed(pack_lengths(lengths, capacity)) == expected


@given(lengths_and_capacity())
def test_bins_equal_naive_best_fit_decreasing(case):
    lengths, capacity = case
    assert listed(pack_lengths(lengths, capacity)) == naive(lengths, capacity)


@pytest.mark.parametrize("capacity", [64, 255, 256, 70_000])
def test_bins_of_thousands_of_rows_equal_naive_best_fit_decreasing(capacity):
    draw = np.random.default_rng(capacity)
    for lengths in (
        draw.integers(1, capacity + 1, 1500),
        draw.integers(1, capacity // 3, 1500),
        np.clip(draw.lognormal(np.log(capacity / 8), 1.0, 1500).astype(int), 1, capacity),
        np.repeat(draw.integers(1, capacity + 1, 30), 50),
    ):
        assert listed(pack_lengths(lengths, capacity)) == naive(lengths.tolist(), capacity)


@given(lengths_and_capacity(), st.integers(0, 2**64))
def test_every_row_is_in_one_bin_and_no_bin_is_over_capacity(case, seed):
    lengths, capacity = case
    bins = listed(pack_lengths(lengths, capacity, seed=seed))
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(rows and sum(lengths[row] for row in rows) <= capacity for rows in bins)


@given(lengths_and_capacity(), st.integers(0, 2**64))
def test_a_seed_permutes_bins_but_not_their_contents(case, seed):
    lengths, capacity = case
    shuffled = listed(pack_lengths(lengths, capacity, seed=seed))
    assert sorted(shuffled) == sorted(listed(pack_lengths(lengths, capacity)))
    assert shuffled == listed(pack_lengths(np.array(lengths, dtype=np.uint16), capacity, seed=(seed,)))


def test_the_order_of_a_seed_never_changes():
    ones = [1] * 8
    assert pack_lengths(ones, 1).order.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert pack_lengths(ones, 1, seed=7).order.tolist() == [3, 7, 4, 1, 2, 6, 0, 5]
    assert pack_lengths(ones, 1, seed=8).order.tolist() == [1, 7, 0, 5, 6, 3, 4, 2]
    assert pack_lengths(ones, 1, seed=(7, 1)).order.tolist() == [6, 0, 2, 1, 4, 5, 7, 3]


def test_no_rows_give_no_bins():
    assert listed(pack_lengths([], 4)) == []
    assert listed(pack_lengths([], 4, seed=1)) == []
    assert unbuild(pack(EMPTY, 4, seed=1)) == []


@pytest.mark.parametrize(
    ("lengths", "capacity", "fault"),
    [
        ([4, 5, 6], 4, r"row 1 has 5 tokens, more than the capacity of 4; truncate it or split it into blocks first"),
        ([1, 0], 4, r"row 1 has 0 tokens, but packing requires at least 1; drop the row first"),
        ([-3], 4, r"row 0 has -3 tokens, but packing requires at least 1; drop the row first"),
        ([], 0, r"capacity is 0; expected at least 1"),
    ],
)
def test_lengths_that_cannot_be_packed_raise_a_clear_error(lengths, capacity, fault):
    with pytest.raises(DataError, match=f"^{fault}$"):
        pack_lengths(lengths, capacity)


@pytest.mark.parametrize("seed", [-1, (1, -1)])
def test_a_negative_seed_is_refused(seed):
    with pytest.raises(DataError, match="expected at least 0"):
        pack_lengths([1, 1], 1, seed=seed)


@given(plain_rows, st.integers(0, 30))
def test_packing_moves_whole_rows_with_all_their_spans_weights_and_origins(plain, spare):
    lengths = [tokens(row) for row in plain]
    capacity = max(lengths, default=1) + spare
    packed = pack(build(plain), capacity)
    packed.check()
    assert unbuild(packed) == [[segment for row in rows for segment in plain[row]] for rows in naive(lengths, capacity)]


@given(plain_rows, st.integers(0, 30), st.integers(0, 2**32), st.integers(1, 4))
def test_packing_neither_loses_nor_adds_tokens(plain, spare, seed, window):
    rows = build(plain)
    packed = pack(rows, max(rows.lengths.max(initial=1) + spare, 1), seed=seed, window=window)
    assert sorted(packed.ids.tolist()) == sorted(rows.ids.tolist())
    assert packed.weights().sum() == rows.weights().sum()
    assert packed.lengths.sum() == rows.lengths.sum()


@given(plain_rows, st.integers(0, 30), st.integers(1, 4))
def test_windows_are_packed_independently(plain, spare, window):
    rows = build(plain)
    capacity = int(rows.lengths.max(initial=1)) + spare
    apart = concat([pack(rows[start : start + window], capacity) for start in range(0, len(rows), window)])
    assert unbuild(pack(rows, capacity, window=window)) == unbuild(apart)


@given(plain_rows, st.integers(0, 30), st.integers(0, 2**32), st.integers(1, 4))
def test_a_seed_permutes_each_window_differently(plain, spare, seed, window):
    rows = build(plain)
    capacity = int(rows.lengths.max(initial=1)) + spare
    expected = []
    for number, start in enumerate(range(0, len(rows), window)):
        bins = pack_lengths(rows.lengths[start : start + window], capacity, seed=(seed, number))
        expected += [[segment for row in chosen for segment in plain[start + row]] for chosen in listed(bins)]
    assert unbuild(pack(rows, capacity, seed=seed, window=window)) == expected


def test_positions_restart_and_segments_differ_at_every_conversation():
    def row(*lengths: int) -> list:
        return [((None, 0), [([9] * length, 2, 0, 1.0, 0, -1)]) for length in lengths]

    packed = pack(build([row(3), row(2), row(2, 2)]), 5)
    assert packed.row_start.tolist() == [0, 4, 9]
    assert packed.positions().tolist() == [0, 1, 0, 1, 0, 1, 2, 0, 1]
    assert packed.segments().tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1]


def test_the_error_names_a_row_by_its_index_among_all_rows():
    rows = build([[((None, 0), [([1] * length, 2, 0, 1.0, 0, -1)])] for length in (2, 2, 2, 5)])
    with pytest.raises(DataError, match="row 3 has 5 tokens, more than the capacity of 4"):
        pack(rows, 4, window=2)
    with pytest.raises(DataError, match="row 1 has 0 tokens"):
        pack(concat([rows[:1], build([[]])]), 4)
    with pytest.raises(DataError, match="window is 0; expected at least 1"):
        pack(rows, 5, window=0)
