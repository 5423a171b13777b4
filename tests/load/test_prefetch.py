"""Reading ahead: the same values in the same order, errors in their place, and a thread that ends."""

from __future__ import annotations

import threading

import pytest

from chatmill.load.prefetch import Prefetcher


def fails_after(count: int):
    yield from range(count)
    raise ValueError("the disk is gone")


def test_values_come_in_order_and_end():
    ahead = Prefetcher(iter(range(100)), 3)
    assert list(ahead) == list(range(100))
    assert list(ahead) == []


def test_an_error_is_raised_where_its_value_would_have_come():
    ahead = Prefetcher(fails_after(5), 2)
    assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="the disk is gone"):
        next(ahead)
    assert list(ahead) == []


def test_no_more_is_made_ahead_than_asked_for():
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
    # One was taken, two wait, and one is held by the thread until there is room.
    assert made == [0, 1, 2, 3]
    ahead.close()
