from __future__ import annotations

import threading

import pytest

from chatmill.load.prefetch import Prefetcher


def fails_after(count: int):
    yield from range(count)
    raise ValueError("the disk failed")


def test_values_are_returned_in_order_until_the_end():
    ahead = Prefetcher(iter(range(100)), 3)
    assert list(ahead) == list(range(100))
    assert list(ahead) == []


def test_an_error_is_raised_in_place_of_the_value_that_failed():
    ahead = Prefetcher(fails_after(5), 2)
    assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="the disk failed"):
        next(ahead)
    assert list(ahead) == []


def test_no_more_values_are_prefetched_than_requested():
    made = []
    enough = threading.Event()

    def values():
        for number in range(100):
            made.append(number)
            if number == 3:
                enough.set()
            yield number

    ahead = Prefetcher(values(), 2)
    assert next(ahead) == 0
    assert enough.wait(30)
    # One value was consumed, two are in the queue, and the thread is waiting to add one more.
    assert made == [0, 1, 2, 3]
    ahead.close()
