from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chatmill.errors import UsageError
from chatmill.load.order import EPISODE_LIMIT, EPOCH_LIMIT, SEED_LIMIT, make_order

WORD = 2**64
sizes = st.one_of(
    st.integers(1, 300),
    st.builds(lambda power, step: max(1, 2**power + step), st.integers(0, 13), st.sampled_from([-1, 0, 1])),
)
seeds = st.integers(0, 2**31)
epochs = st.integers(0, 50)


def splitmix(state: int) -> int:
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % WORD
    state = (state ^ state >> 27) * 0x94D049BB133111EB % WORD
    return state ^ state >> 31


def stream(key: int, number: int) -> int:
    return splitmix((key + (number + 1) * 0x9E3779B97F4A7C15) % WORD)


def plain_feistel(count: int, seed: int, position: int) -> int:
    height = next(n for n in range(1, count + 1) if n * n >= count)
    width = (count + height - 1) // height
    keys = [stream(splitmix(seed), number) for number in range(8)]
    while True:
        left, right = position // width, position % width
        for number, key in enumerate(keys):
            if number % 2:
                right = (right + stream(key, left) % width) % width
            else:
                left = (left + stream(key, right) % height) % height
        position = left * width + right
        if position < count:
            return position


@pytest.mark.parametrize("seed", [42, 1337])
def test_the_order_epoch_is_the_documented_reconstruction(seed):
    order = make_order("epoch", 504, seed=seed)
    for epoch in (0, 1, 2, 1):
        expected = np.random.RandomState(seed + epoch).permutation(504)
        np.testing.assert_array_equal(order.block(epoch, 0, 504), expected)
        assert [order.find(epoch, int(episode)) for episode in expected] == list(range(504))


def test_the_documented_example_starts_as_documented():
    order = make_order("epoch", 504, seed=42)
    assert order.block(0, 0, 10).tolist() == [173, 274, 489, 72, 305, 76, 475, 140, 469, 498]


def test_without_shuffling_every_epoch_has_the_stored_order():
    for mode in ("epoch", "feistel"):
        order = make_order(mode, 10**9, seed=42, shuffle=False)
        assert order.name == "identity/1"
        assert order.block(7, 999_999_990, 10**9).tolist() == list(range(999_999_990, 10**9))
        assert order.find(7, 123) == 123


def test_too_many_episodes_for_the_order_epoch_are_refused_with_an_alternative():
    with pytest.raises(UsageError, match=r"16,777,217 episodes .* use feistel"):
        make_order("epoch", EPOCH_LIMIT + 1, seed=42)
    assert make_order("epoch", EPOCH_LIMIT, seed=42).num_episodes == EPOCH_LIMIT


@given(sizes, seeds, epochs)
@example(2**16, 7, 0)
@example(2**16 - 1, 7, 0)
@example(2**16 + 1, 7, 0)
def test_feistel_is_a_bijection_with_its_exact_inverse(count, seed, epoch):
    order = make_order("feistel", count, seed=seed)
    whole = order.block(epoch, 0, count)
    np.testing.assert_array_equal(np.sort(whole), np.arange(count))
    for position in {0, count // 3, count // 2, count - 1}:
        assert order.find(epoch, int(whole[position])) == position


@given(st.integers(1, 2000), seeds, epochs)
def test_feistel_equals_plain_integer_arithmetic(count, seed, epoch):
    order = make_order("feistel", count, seed=seed)
    positions = np.unique(np.linspace(0, count - 1, 10).astype(int))
    expected = [plain_feistel(count, seed + epoch, int(position)) for position in positions]
    assert order.at(epoch, positions).tolist() == expected


@given(st.integers(0, 10**9 - 100), st.integers(0, 100), seeds)
def test_a_block_of_feistel_equals_its_positions_one_by_one(start, length, seed):
    order = make_order("feistel", 10**9, seed=seed)
    block = order.block(3, start, start + length)
    one_by_one = [order.at(3, [position]).item() for position in range(start, start + length)]
    assert block.tolist() == one_by_one
    assert [order.find(3, episode) for episode in block.tolist()[:5]] == list(range(start, start + min(5, length)))


def test_a_billion_episodes_are_ordered_in_constant_memory():
    tracemalloc.start()
    try:
        order = make_order("feistel", 10**9, seed=1337)
        for epoch in range(3):
            block = order.block(epoch, 10**9 - 65536, 10**9)
            assert len(np.unique(block)) == 65536
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16_000_000


def test_feistel_spreads_neighbours_and_epochs():
    count, order = 10_000, make_order("feistel", 10_000, seed=5)
    first, second = order.block(0, 0, count), order.block(1, 0, count)
    assert np.count_nonzero(first == second) < 10
    assert np.count_nonzero(first == np.arange(count)) < 10
    assert np.count_nonzero(np.diff(first) == 1) < 10
    # Correlations of independent shuffles are about 1 / sqrt(count).
    for other in (second, np.arange(count), np.roll(first, 1)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.05


def test_feistel_reaches_every_order_of_few_episodes():
    found = {tuple(make_order("feistel", 4, seed=seed).block(0, 0, 4).tolist()) for seed in range(400)}
    assert len(found) == 24


@given(st.one_of(st.integers(1, 1000), st.integers(1, EPISODE_LIMIT)), seeds, st.integers(0, 2**62))
def test_a_random_draw_is_a_pure_function_of_seed_and_position(count, seed, start):
    order = make_order("random", count, seed=seed)
    expected = [stream(splitmix(seed), position) * count // WORD for position in range(start, start + 4)]
    assert order.block(0, start, start + 4).tolist() == expected
    assert order.at(0, [start + 2]).item() == expected[2]


def test_random_draws_are_uniform_with_replacement():
    drawn = np.bincount(make_order("random", 100, seed=9).block(0, 0, 100_000), minlength=100)
    # The statistic is chi squared with 99 degrees of freedom, which exceeds 148 about once in a thousand trials.
    assert float(((drawn - 1000) ** 2 / 1000).sum()) < 148


def test_golden_orders_never_change():
    assert make_order("feistel", 10**9, seed=1337).block(2, 0, 5).tolist() == [
        552478246,
        57818094,
        790735970,
        288042508,
        896767304,
    ]
    assert make_order("feistel", 10, seed=0).block(0, 0, 10).tolist() == [3, 6, 4, 5, 0, 7, 8, 1, 2, 9]
    assert make_order("random", 504, seed=42).block(0, 0, 10).tolist() == [300, 80, 83, 24, 494, 118, 140, 77, 383, 122]
    names = [make_order(mode, 504, seed=42).name for mode in ("epoch", "feistel", "random")]
    assert names == ["epoch/1", "feistel/1", "random/1"]


def test_invalid_arguments_of_orders_are_one_error_line():
    epoch, random = make_order("epoch", 10, seed=SEED_LIMIT - 1), make_order("random", 10, seed=1)
    for wrong, line in [
        (
            lambda: make_order("shuffled", 10, seed=1),
            'unknown order "shuffled"; expected one of epoch, feistel, random',
        ),
        (lambda: make_order("epoch", 0, seed=1), "the number of episodes is 0; expected 1 to"),
        (lambda: make_order("epoch", 10, seed=-1), "seed is -1; expected an integer from 0"),
        (lambda: make_order("epoch", 10, seed=2**32), "seed is 4294967296; expected"),
        (lambda: epoch.block(1, 0, 1), "seed 4294967295 plus epoch 1 is 4294967296; expected at most 4294967295"),
        (lambda: epoch.block(-1, 0, 1), "epoch is -1; expected an integer of at least 0"),
        (lambda: epoch.block(0, 8, 12), "position is 11; expected 0 to 9"),
        (lambda: epoch.block(0, -1, 2), "position is -1; expected 0 to 9"),
        (lambda: epoch.find(0, 10), "episode is 10; expected 0 to 9"),
        (lambda: random.block(1, 0, 1), 'the order "random" has no epochs'),
        (lambda: random.find(0, 3), "samples with replacement"),
    ]:
        with pytest.raises(UsageError, match=line):
            wrong()
