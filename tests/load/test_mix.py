from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from audit_fixtures import make_dataset
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import DataError, UsageError
from chatmill.load.loader import EpisodeLoader
from chatmill.load.mix import MIX_SFT, PERIOD, MixedOrder, MixSchedule, row_weights, shares
from chatmill.load.order import make_order
from chatmill.store.layout import EPISODE

weight_lists = st.lists(st.integers(1, 60), min_size=1, max_size=9)


def plain_counts(sources: np.ndarray, number: int) -> np.ndarray:
    return np.cumsum(sources[:, None] == np.arange(number), axis=0)


def farthest(weights: list[int], rows: int) -> Fraction:
    sources, _ = MixSchedule(weights).at(np.arange(rows))
    had = plain_counts(sources, len(weights)) * sum(weights)
    due = np.arange(1, rows + 1)[:, None] * np.array(weights)
    return Fraction(int(np.abs(had - due).max()), sum(weights))


@given(weight_lists)
def test_every_prefix_is_within_one_row_of_its_share(weights):
    bound = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else 0
    assert farthest(weights, 2 * sum(weights) + 1) <= bound


def test_the_default_mix_is_within_one_row_at_every_prefix_of_100_000():
    weights = row_weights(shares(MIX_SFT))
    assert weights == {"primer": 1, "oasst1": 7, "dolly15k": 2}
    assert farthest(list(weights.values()), 100_000) < 1
    assert MixSchedule(list(weights.values())).counts(100_000).tolist() == [10_000, 70_000, 20_000]


@pytest.mark.parametrize("small", [1, 2, 40])
def test_long_periods_and_many_sources_keep_the_bound(small):
    for weights in ([1] * small + [PERIOD - small], [1] * (small + 1), [PERIOD // 2 - small - 1, PERIOD // 2 + small]):
        sources, _ = MixSchedule(weights).at(np.arange(PERIOD))
        for number in {0, len(weights) // 2, len(weights) - 1}:
            had = np.cumsum(sources == number) * sum(weights)
            due = np.arange(1, PERIOD + 1) * weights[number]
            assert np.abs(had - due).max() < sum(weights)


@given(weight_lists, st.integers(0, 10**12))
def test_ordinals_count_up_in_every_source_and_can_be_inverted(weights, start):
    schedule = MixSchedule(weights)
    positions = np.arange(start, start + 3 * sum(weights))
    sources, ordinals = schedule.at(positions)
    before = schedule.counts(start)
    for number in range(len(weights)):
        mine = ordinals[sources == number]
        np.testing.assert_array_equal(mine, np.arange(before[number], before[number] + len(mine)))
    for place in (0, len(positions) // 2, len(positions) - 1):
        assert schedule.find(int(sources[place]), int(ordinals[place])) == positions[place]
    np.testing.assert_array_equal(schedule.counts(start + len(positions)), before + 3 * np.array(weights))


def test_a_golden_schedule_never_changes():
    sources, ordinals = MixSchedule([1, 7, 2]).at(np.arange(12))
    assert sources.tolist() == [1, 1, 2, 1, 1, 0, 1, 1, 2, 1, 1, 1]
    assert ordinals.tolist() == [0, 1, 0, 2, 3, 0, 4, 5, 1, 6, 7, 8]


@given(st.dictionaries(st.sampled_from("abcdefg"), st.floats(0.01, 100), min_size=1))
def test_any_weights_become_row_counts_within_one_row_per_period(weights):
    requested = shares(weights)
    turns = row_weights(requested)
    total = sum(turns.values())
    assert total <= PERIOD
    for name, share in requested.items():
        assert abs(Fraction(turns[name], total) - share) <= Fraction(1, PERIOD)


def test_a_weight_is_read_as_an_exact_decimal():
    assert shares({"a": 0.1, "b": 0.2}) == {"a": Fraction(1, 3), "b": Fraction(2, 3)}
    assert row_weights(shares({"a": 0.3, "b": 0.15, "c": 1})) == {"a": 6, "b": 3, "c": 20}


def test_the_mixed_order_draws_each_source_in_its_own_epochs():
    sizes = {"primer": 7, "oasst1": 30, "dolly15k": 11}
    weights = {"dolly15k": 2, "primer": 1, "oasst1": 7}
    mixed = MixedOrder({name: make_order("epoch", size, seed=42) for name, size in sizes.items()}, weights)
    episodes = mixed.block(0, 0, 400)
    first = {"dolly15k": 0, "primer": 11, "oasst1": 18}
    for number, name in enumerate(weights):
        mine = episodes[mixed.source_of(episodes) == number] - first[name]
        expected = np.concatenate([np.random.RandomState(42 + e).permutation(sizes[name]) for e in range(60)])
        np.testing.assert_array_equal(mine, expected[: len(mine)])
    assert mixed.num_episodes == 48 and mixed.length is None
    assert mixed.name == "mix/1(dolly15k=2*epoch/1, primer=1*epoch/1, oasst1=7*epoch/1)"


@pytest.mark.parametrize("mode", ["epoch", "feistel"])
def test_any_block_of_the_mixed_order_is_a_slice_of_the_whole(mode):
    mixed = MixedOrder({n: make_order(mode, size, seed=3) for n, size in {"a": 5, "b": 300}.items()}, {"a": 2, "b": 5})
    whole = mixed.block(0, 0, 1000)

    @given(st.integers(0, 960), st.integers(0, 40))
    def each_block(start, length):
        np.testing.assert_array_equal(mixed.block(0, start, start + length), whole[start : start + length])

    each_block()


def test_an_episode_is_found_in_each_epoch_of_its_source():
    mixed = MixedOrder({n: make_order("epoch", size, seed=3) for n, size in {"a": 5, "b": 9}.items()}, {"a": 2, "b": 5})
    episodes = mixed.block(0, 0, 100)
    for episode in range(14):
        found = [mixed.find(epoch, episode) for epoch in range(3)]
        assert found == np.flatnonzero(episodes == episode)[:3].tolist()


def test_random_sources_use_the_position_of_the_mix():
    orders = {name: make_order("random", 1000, seed=3) for name in "ab"}
    mixed = MixedOrder(orders, {"a": 1, "b": 1})
    expected = orders["a"].block(0, 0, 50)
    np.testing.assert_array_equal(mixed.block(0, 0, 50) % 1000, expected)


@pytest.mark.parametrize("spread", [0.2, 1.0])
def test_trained_tokens_are_within_half_a_percent_of_their_shares(spread):
    """The average row sizes of the sources differ by a factor of six."""
    draw = np.random.default_rng(7)
    sizes = {
        name: draw.lognormal(np.log(mean), spread, count).astype(np.int64) + 1
        for name, mean, count in [("primer", 40, 900), ("oasst1", 240, 50_000), ("dolly15k", 90, 15_000)]
    }
    requested = shares(MIX_SFT)
    weights = row_weights(requested, row_size={n: Fraction(int(s.sum()), len(s)) for n, s in sizes.items()})
    mixed = MixedOrder({name: make_order("epoch", len(s), seed=1337) for name, s in sizes.items()}, weights)
    episodes = mixed.block(0, 0, 100_000)
    trained = np.concatenate(list(sizes.values()))[episodes]
    for number, share in enumerate(requested.values()):
        assert abs(trained[mixed.source_of(episodes) == number].sum() / trained.sum() - float(share)) < 0.005


def test_100_000_rows_of_real_datasets_have_their_shares_of_trained_tokens(tmp_path):
    for number, (name, count) in enumerate([("primer", 40), ("oasst1", 150), ("dolly15k", 90)]):
        make_dataset(tmp_path / name, train=count, val=0, seed=number)
    config = {"mix_by": "trained_tokens", "batch_size": 2000, "block_size": 48, "use_loss_mask": True}
    loader = EpisodeLoader(tmp_path, config, tensors=False)
    first = np.cumsum([len(source.episodes("train")) for source in loader.sources])
    trained = np.zeros(3, dtype=np.int64)
    for _ in range(50):
        batch = loader.get_batch()
        source = np.searchsorted(first, batch.episode_ids[:, 0], side="right")
        np.add.at(trained, source, batch.loss_mask.sum(axis=1))
    requested = [MIX_SFT[source.name] for source in loader.sources]
    np.testing.assert_allclose(trained / trained.sum(), requested, rtol=0.005)


@pytest.mark.parametrize("use_loss_mask", [True, False])
def test_a_first_token_in_the_mask_is_not_trained_and_not_counted(tmp_path, use_loss_mask):
    for name, length in (("short", 5), ("long", 200)):
        folder = tmp_path / name / "train"
        folder.mkdir(parents=True)
        index = np.array([(n * length, length) for n in range(40)], dtype=EPISODE)
        for file, array in (
            ("tokens.bin", np.arange(40 * length, dtype=np.uint16)),
            ("mask.bin", np.ones(40 * length, dtype=np.uint8)),
            ("episodes.idx", index),
        ):
            (folder / file).write_bytes(array.tobytes())
    config = {
        "mix_sft": {"short": 0.5, "long": 0.5},
        "mix_by": "trained_tokens",
        "use_loss_mask": use_loss_mask,
        "batch_size": 500,
        "block_size": 255,
        "pad_token_id": 0,
    }
    loader = EpisodeLoader(tmp_path, config, tensors=False)
    names = [source.name for source in loader.sources]
    trained = dict.fromkeys(names, 0)
    for _ in range(20):
        batch = loader.get_batch()
        for number, name in enumerate(names):
            rows = (batch.episode_ids[:, 0] >= 0) & (batch.episode_ids[:, 0] // 40 == number)
            trained[name] += int((batch.y[rows] >= 0).sum())
    assert trained["short"] / sum(trained.values()) == pytest.approx(0.5, abs=0.005)


def test_invalid_weights_are_refused_together():
    with pytest.raises(DataError) as refused:
        shares({"a": -1, "b": float("nan"), "c": 0, "d": float("inf"), "e": True, "f\n": "1", "g": 1})
    assert str(refused.value).split("; mix_sft: ") == [
        "mix_sft: the weight of a is -1; expected a number above 0",
        "the weight of b is nan; expected a finite number above 0",
        "the weight of c is 0; expected a number above 0; to leave out a source, remove it",
        "the weight of d is inf; expected a finite number above 0",
        "the weight of e is True; expected a finite number above 0",
        r"the weight of f\n is 1; expected a finite number above 0",
    ]
    with pytest.raises(DataError, match="is empty"):
        shares({})


def test_the_error_names_a_source_that_cannot_be_drawn():
    order = make_order("epoch", 3, seed=1)
    with pytest.raises(DataError, match="unknown source dolly; expected one of primer"):
        MixedOrder({"primer": order}, {"primer": 1, "dolly": 1})
    with pytest.raises(DataError, match="rare would get less than one of 65536 rows"):
        row_weights(shares({"rare": 1e-9, "b": 1}))
    with pytest.raises(DataError, match="a has no tokens that mix_by counts"):
        row_weights(shares({"a": 1}), row_size={"a": Fraction(0)})
    with pytest.raises(UsageError, match="expected at most 65536"):
        MixSchedule([PERIOD, 1])
    with pytest.raises(UsageError, match="a weight above 0"):
        MixSchedule([1, 0])
    mixed = MixedOrder({"primer": order}, {"primer": 1})
    for wrong, line in [
        (lambda: mixed.block(1, 0, 1), "epoch is 1; expected 0, because a mixed order is infinite"),
        (lambda: mixed.block(0, -1, 1), "position is -1; expected at least 0"),
        (lambda: mixed.find(0, 3), "episode is 3; expected 0 to 2"),
    ]:
        with pytest.raises(UsageError, match=line):
            wrong()
