from __future__ import annotations

import threading
import time

import pytest

from chatmill.remote import threads
from chatmill.remote.threads import THREADS, in_threads, submit


def test_results_are_in_order_and_no_more_threads_run_than_allowed():
    together = threading.Barrier(THREADS)
    names = set()

    def call(number: int) -> int:
        # The barrier breaks unless all threads run at the same time.
        if number < THREADS:
            together.wait(30)
        names.add(threading.get_ident())
        return number * number

    assert in_threads(call, range(100)) == [number * number for number in range(100)]
    assert len(names) == THREADS and threading.get_ident() not in names


def test_tasks_that_wait_for_other_tasks_finish():
    def call(number: int) -> int:
        return submit(lambda: number + 1).result() + sum(in_threads(lambda each: each, range(3)))

    assert in_threads(call, range(50)) == [number + 4 for number in range(50)]


def test_the_first_error_is_raised_and_later_calls_succeed():
    def call(number: int) -> int:
        raise ValueError(f"number {number}")

    with pytest.raises(ValueError, match=r"^number 0$"):
        in_threads(call, range(1000))
    assert in_threads(str, [1, 2]) == ["1", "2"]


def test_one_task_at_a_time_needs_one_thread():
    threads._after_fork()
    for number in range(20):
        assert submit(lambda number=number: number).result() == number
        while threads._waiting:
            time.sleep(0.001)
    assert threads._started == 1
