import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import UsageError
from chatmill.records import shuffle_split
from chatmill.records.split import smallest_hash_share, smallest_shuffle_share


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
def test_the_size_of_the_validation_split_is_rounded_down(count, val_frac, val):
    assert len(shuffle_split(count, val_frac, seed=1).val) == val


@pytest.mark.parametrize(("count", "val_frac", "seed"), [(5, 1, 0), (5, -0.1, 0), (5, float("nan"), 0), (5, 0.1, -1)])
def test_an_invalid_split_is_an_error(count, val_frac, seed):
    with pytest.raises(UsageError):
        shuffle_split(count, val_frac, seed=seed)


@given(st.lists(st.integers(0, 2**53 - 1), min_size=1, max_size=20))
def test_the_smallest_share_by_hash_keeps_the_first_record_and_leaves_the_last(numbers):
    places = [number * 2.0**-53 for number in numbers]
    share = smallest_hash_share(min(places), max(places))
    if share is None:
        # The two hashes are so close that no share with at most 17 digits separates them.
        assert max(places) - min(places) < 1e-6
        return
    assert min(places) < share <= max(places)
    digits = 10.0 ** np.floor(np.log10(share) - 2)
    assert share - min(places) <= 2.1 * digits or min(places) == 0


def test_a_single_conversation_has_no_smallest_share():
    assert smallest_hash_share(0.25, 0.25) is None
    assert smallest_shuffle_share(np.array([False, True, False]), seed=1) is None


@given(st.lists(st.booleans(), min_size=2, max_size=400), st.integers(0, 99))
def test_the_smallest_share_by_shuffle_reaches_the_first_record_with_rows(flags, seed):
    has_rows = np.array(flags)
    share = smallest_shuffle_share(has_rows, seed=seed)
    if has_rows.sum() < 2:
        assert share is None
        return
    val = shuffle_split(len(flags), share, seed=seed).val
    assert [flags[record] for record in val] == [False] * (len(val) - 1) + [True]
    assert len(shuffle_split(len(flags), share * 0.99, seed=seed).val) < len(val)
