"""The split of the primer specification."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import UsageError
from chatmill.records import shuffle_split


def test_the_order_of_a_seed_is_pinned():
    assert shuffle_split(10, 0.3, seed=42) == ([8, 5, 6, 9, 4, 0, 1], [7, 3, 2])
    assert shuffle_split(3, 0, seed=0) == ([0, 2, 1], [])


@given(st.integers(0, 300), st.floats(0, 0.99), st.integers(0, 2**40))
def test_every_record_is_in_one_split_and_the_seed_alone_orders_them(count, val_frac, seed):
    split = shuffle_split(count, val_frac, seed=seed)
    whole = shuffle_split(count, 0, seed=seed)
    assert split.val + split.train == whole.train
    assert sorted(whole.train) == list(range(count))
    assert len(split.val) <= count * val_frac < len(split.val) + 1


@pytest.mark.parametrize(("count", "val_frac", "val"), [(100, 0.29, 28), (30, 0.1, 3), (9, 0.1, 0), (0, 0.5, 0)])
def test_the_share_is_rounded_down_as_floating_point_has_it(count, val_frac, val):
    assert len(shuffle_split(count, val_frac, seed=1).val) == val


@pytest.mark.parametrize(("count", "val_frac", "seed"), [(5, 1, 0), (5, -0.1, 0), (5, float("nan"), 0), (5, 0.1, -1)])
def test_what_cannot_be_split_is_an_error(count, val_frac, seed):
    with pytest.raises(UsageError):
        shuffle_split(count, val_frac, seed=seed)
