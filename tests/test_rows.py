from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_rows import build, rows_, unbuild

from chatmill.errors import DataError
from chatmill.rows import EMPTY, OWN_ID, SPAN, Role, Rows, Rule, TrainOn, concat, copy_ranges, copy_tokens, ragged_index


@given(rows_)
def test_what_is_built_checks_and_reads_back(plain):
    rows = build(plain)
    rows.check()
    assert unbuild(rows) == plain
    assert rows.lengths.tolist() == [sum(len(s[0]) for _, seg in row for s in seg) for row in plain]


@given(rows_)
def test_derived_arrays_follow_the_spans(plain):
    rows = build(plain)
    weights, targets, positions, segments = [], [], [], []
    for row in plain:
        for ordinal, (_, spans) in enumerate(row):
            position = 0
            for ids, _, _, weight, _, target in spans:
                for i in ids:
                    weights.append(weight)
                    targets.append(i if target == -1 else target)
                    positions.append(position)
                    segments.append(ordinal)
                    position += 1
    assert rows.weights().tolist() == weights
    assert rows.mask().tolist() == [weight > 0 for weight in weights]
    assert rows.targets().tolist() == targets
    assert rows.positions().tolist() == positions
    assert rows.segments().tolist() == segments


@given(st.lists(rows_, max_size=4))
def test_concat_puts_rows_one_after_the_other_and_names_files_once(parts):
    joined = concat([build(part) for part in parts])
    joined.check()
    assert unbuild(joined) == [row for part in parts for row in part]
    assert len(set(joined.files)) == len(joined.files)


@given(rows_, st.data())
def test_take_gives_the_named_rows_in_order_and_may_repeat_them(plain, data):
    chosen = data.draw(st.lists(st.integers(0, len(plain) - 1), max_size=6)) if plain else []
    taken = build(plain).take(chosen)
    taken.check()
    assert unbuild(taken) == [plain[number] for number in chosen]


@given(rows_, st.integers(-5, 5), st.integers(-5, 5))
def test_a_slice_is_the_slice_of_the_list_and_copies_nothing(plain, start, stop):
    rows = build(plain)
    part = rows[start:stop]
    part.check()
    assert unbuild(part) == plain[start:stop]
    assert len(part.ids) == 0 or np.shares_memory(part.ids, rows.ids)


def test_a_slice_with_a_step_is_refused():
    with pytest.raises(ValueError, match="use take"):
        EMPTY[::2]


@given(rows_, st.sampled_from(get_args(TrainOn)))
def test_reweigh_changes_only_what_the_role_rule_decided(plain, train_on):
    expected = []
    for row in plain:
        for _, spans in row:
            last = max((message for _, role, message, *_ in spans if role == Role.ASSISTANT), default=None)
            last_user = max((message for _, role, message, *_ in spans if role == Role.USER), default=-1)
            # Messages that are trained on because of their role have the weight of the record.
            factor = max((weight for *_, weight, rule, _ in spans if rule == Rule.ROLE), default=0) or 1.0
            for _, role, message, weight, rule, _ in spans:
                if rule != Rule.ROLE:
                    expected.append(weight)
                elif train_on == "all":
                    expected.append((role != Role.TOOL) * factor)
                else:
                    chosen = {"assistant": True, "last": message == last, "last-exchange": message > last_user}
                    expected.append((role == Role.ASSISTANT and chosen[train_on]) * factor)
    rows = build(plain)
    again = rows.reweigh(train_on)
    assert again.spans["weight"].tolist() == expected
    assert unbuild(replace(again, spans=rows.spans)) == plain


@given(
    st.lists(st.tuples(st.integers(0, 14) | st.integers(20, 25), st.integers(0, 5)), max_size=8),
    st.sampled_from([1, 40]),
)
def test_copy_tokens_reads_ranges_of_the_ids_and_of_the_literals(ranges, scale):
    # With scale 40, ranges are long enough to be copied as slices instead of token by token.
    ranges = [(start * scale, length * scale) for start, length in ranges]
    ids, literals = np.arange(20 * scale, dtype=np.uint32), np.arange(9000, 9000 + 10 * scale, dtype=np.uint32)
    pool = ids.tolist() + literals.tolist()
    start = np.array([s for s, _ in ranges], dtype=np.int64)
    length = np.array([n for _, n in ranges], dtype=np.int64)
    expected = [pool[s + i] for s, n in ranges for i in range(n)]
    assert copy_tokens(ids, start, length, literals).tolist() == expected
    with pytest.MonkeyPatch.context() as without:
        without.setattr("chatmill.rows._copy", None)
        assert copy_tokens(ids, start, length, literals).tolist() == expected
    assert ragged_index(start, length).tolist() == [s + i for s, n in ranges for i in range(n)]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), max_size=8),
    st.sampled_from(["u1", "<u2", "<u4", "V19"]),
    st.randoms(use_true_random=False),
)
def test_copy_ranges_puts_each_range_in_its_place(ranges, dtype, rng):
    source = np.frombuffer(rng.randbytes(60 * np.dtype(dtype).itemsize), dtype=dtype)
    start, stop = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    gaps = [rng.randrange(3) for _ in ranges]
    to = np.cumsum([0, *(b - a for a, b in ranges)])[:-1] + np.cumsum(gaps, dtype=np.int64)
    target, expected = (np.zeros(int((stop - start).sum()) + sum(gaps), dtype=dtype) for _ in range(2))
    copy_ranges(source, start, stop, target, to)
    with pytest.MonkeyPatch.context() as without:
        without.setattr("chatmill.rows._copy", None)
        copy_ranges(source, start, stop, expected, to)
    assert target.tobytes() == expected.tobytes()
    for at, (a, b) in zip(to.tolist(), ranges, strict=True):
        assert target[at : at + b - a].tobytes() == source[a:b].tobytes()


def test_copy_ranges_takes_any_numbers_and_rows_of_a_table():
    source, target = np.arange(12).reshape(4, 3), np.zeros((5, 3), dtype=np.int64)
    copy_ranges(source[::2], np.array([0, 1], dtype=np.int32), np.array([1, 2]), target, np.array([9, 3, 9, 1])[1::2])
    assert target.tolist() == [[0, 0, 0], [6, 7, 8], [0, 0, 0], [0, 1, 2], [0, 0, 0]]


def test_copy_ranges_widens_what_is_narrow():
    target = np.zeros(4, dtype=np.uint32)
    copy_ranges(np.array([7, 8, 9], dtype=np.uint16), np.array([1]), np.array([3]), target, np.array([1]))
    assert target.tolist() == [0, 8, 9, 0]


@pytest.mark.parametrize(
    ("start", "stop", "to"), [(-1, 1, 0), (0, 4, 0), (2, 1, 0), (0, 2, 2), (0, 1, -1), (0, 2**62, 0)]
)
def test_ranges_beyond_an_array_are_refused(start, stop, to):
    source, target = np.arange(3, dtype=np.uint32), np.zeros(3, dtype=np.uint32)
    with pytest.raises(ValueError, match="within the source and the target"):
        copy_ranges(source, np.array([start]), np.array([stop]), target, np.array([to]))
    assert target.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (2, 2), (3, 3), (9, 1)])
def test_tokens_beyond_the_ids_and_the_literals_are_refused(start, length):
    ids, literals = np.arange(3, dtype=np.uint32), np.arange(2, dtype=np.uint32)
    with pytest.raises(ValueError, match="fill the target"):
        copy_tokens(ids, np.array([start]), np.array([length]), literals)


GOOD = build([[(("a", 1), [([1, 2], Role.USER, 0, 0.0, Rule.ROLE, -1), ([3], Role.ASSISTANT, 1, 1.0, Rule.ROLE, -1)])]])


def with_span(**changes: float) -> Rows:
    spans = GOOD.spans.copy()
    for column, value in changes.items():
        spans[column][0] = value
    return replace(GOOD, spans=spans)


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        (replace(GOOD, ids=GOOD.ids[:-1]), "spans cover 3 tokens, but there are 2 ids"),
        (with_span(length=1), "spans cover 2 tokens, but there are 3 ids"),
        (replace(with_span(length=0), ids=GOOD.ids[:1]), "a span is empty"),
        (with_span(weight=-1.0), "negative or not finite"),
        (with_span(weight=np.nan), "negative or not finite"),
        (with_span(weight=np.inf), "negative or not finite"),
        (with_span(target=-2), "a target is below -1"),
        (replace(GOOD, first_span=np.array([0, 1])), "segments are invalid"),
        (replace(GOOD, first_span=np.array([1, 2])), "segments are invalid"),
        (replace(GOOD, first_span=np.array([0, 2, 1, 2])), "segments are invalid"),
        (replace(GOOD, first_segment=np.array([0, 2])), "rows are invalid"),
        (replace(GOOD, first_span=np.array([0, 1, 2])), "1 origins for 2 segments"),
        (replace(GOOD, files=()), "file index of 0 or more"),
    ],
)
def test_check_finds_what_does_not_tile(rows, fault):
    GOOD.check()
    with pytest.raises(DataError, match=fault):
        rows.check()


def test_the_span_table_is_what_it_says_on_disk():
    assert SPAN.itemsize == 19
    assert OWN_ID == -1
