from __future__ import annotations

import _thread
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from template_fixtures import trl_format

from chatmill.errors import DataError
from chatmill.format import TurnRenderer, load_format, open_renderer, slices
from chatmill.ledger import Ledger
from chatmill.records import Message, Record
from chatmill.rows import Rows
from chatmill.tokenizer import open_tokenizer

THREADS = (1, 2, 5)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
RECORDS = st.lists(
    st.builds(
        lambda system, pairs, weight, file, kwargs: Record(
            [*([Message("system", system)] if system else []), *(m for q, a in pairs for m in (q, a))],
            weight=weight,
            file=file,
            source=file[0],
            template_kwargs=kwargs,
        ),
        st.sampled_from(["", "Be brief.", "<|im_end|>"]),
        st.lists(
            st.tuples(
                st.builds(Message, st.just("user"), TEXTS),
                st.builds(Message, st.just("assistant"), TEXTS, weight=st.sampled_from([None, 0.0, 0.5])),
            ),
            min_size=1,
            max_size=3,
        ),
        st.sampled_from([1.0, 0.25]),
        st.sampled_from(["a.jsonl", "b.jsonl"]),
        st.sampled_from(["", '{"x":1}']),
    ),
    min_size=1,
    max_size=24,
)


def assert_same(rows: Rows, right: Rows) -> None:
    for name in ("ids", "spans", "first_span", "origins", "first_segment"):
        got, wanted = getattr(rows, name), getattr(right, name)
        assert got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes(), name
    assert rows.files == right.files
    assert np.array_equal(rows.mask(), right.mask())


def assert_same_as_single_calls(renderer, records):
    counts = Ledger()
    right = slices.concat([renderer.render([record], ledger=counts) for record in records])
    for threads in THREADS:
        ledger = Ledger()
        assert_same(renderer.render(records, ledger=ledger, threads=threads), right)
        assert ledger == counts


@pytest.fixture
def slice_of_three(monkeypatch):
    monkeypatch.setattr(slices, "SLICE", 3)


@pytest.mark.usefixtures("slice_of_three")
@pytest.mark.parametrize("name", ["chatml", "post-training"])
@given(records=RECORDS)
def test_rows_and_counts_are_those_of_one_call_per_record(name, records):
    format = load_format(name)
    renderer = TurnRenderer(format, open_tokenizer("bytes", control=format.tokens))
    assert_same_as_single_calls(renderer, records)


@pytest.mark.usefixtures("slice_of_three")
@given(records=RECORDS)
def test_rows_of_a_chat_template_are_those_of_one_call_per_record(records):
    renderer = trl_format("qwen2_5")
    records = list(renderer.renderable(records, lambda fault: None))
    assert_same_as_single_calls(renderer, records)


@pytest.mark.usefixtures("slice_of_three")
def test_the_first_error_is_raised_with_any_number_of_threads():
    renderer = open_renderer("chatml", "bytes")
    records = [Record([Message("user", "q"), Message("assistant", "a")]) for _ in range(20)]
    records[7] = Record([Message("user", "first \ud800")])
    records[16] = Record([Message("user", "second, longer \udfff")])
    messages = set()
    for threads in THREADS:
        ledger = Ledger()
        with pytest.raises(DataError, match="lone surrogate") as error:
            renderer.render(records, threads=threads, ledger=ledger)
        messages.add(str(error.value))
        assert not ledger.entries
    assert len(messages) == 1


def test_an_interrupt_ends_the_threads_and_skips_the_remaining_slices(monkeypatch):
    monkeypatch.setattr(slices, "SLICE", 1)
    renderer = open_renderer("chatml", "bytes")
    records = [Record([Message("user", str(number)), Message("assistant", "a")]) for number in range(1000)]
    started = []

    def render(part, counts):
        started.append(part)
        if part[0] is records[0]:
            _thread.interrupt_main()
        return renderer.render(part)

    with pytest.raises(KeyboardInterrupt):
        slices.render_slices(render, records, ledger=None, threads=2)
    for thread in threading.enumerate():
        # If the interrupt arrives while the pool is starting a thread, the pool does not wait for this thread, so join
        # it here.
        if thread.name.startswith("chatmill-render"):
            thread.join(60)
            assert not thread.is_alive()
    assert 0 < len(started) < len(records)
