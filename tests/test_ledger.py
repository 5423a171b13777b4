from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import ChatmillError
from chatmill.ledger import BUCKETS, Ledger

counts_ = st.tuples(
    st.sampled_from(BUCKETS),
    st.sampled_from(["", "too_long", "x"]),
    st.integers(0, 9),
    st.integers(5, 9),
    st.integers(0, 5),
)


def filled(counts) -> Ledger:
    ledger = Ledger()
    for bucket, reason, rows, tokens, trained in counts:
        ledger.add(bucket, reason, rows=rows, tokens=tokens, trained=trained)
    return ledger


@given(st.lists(counts_), st.lists(counts_))
def test_merging_two_ledgers_equals_counting_in_one(first, second):
    merged = filled(first)
    merged.merge(filled(second))
    assert merged == filled(first + second)
    for bucket in BUCKETS:
        of_bucket = [count for count in first + second if count[0] == bucket]
        total = merged.total(bucket)
        assert (total.rows, total.tokens, total.trained) == tuple(sum(c[i] for c in of_bucket) for i in (2, 3, 4))


@given(st.lists(counts_), st.randoms())
def test_json_round_trips_and_does_not_depend_on_the_order_of_counting(counts, random):
    text = json.dumps(filled(counts).to_json())
    random.shuffle(counts)
    assert json.dumps(filled(counts).to_json()) == text
    assert Ledger.from_json(json.loads(text)) == filled(counts)


def balanced() -> Ledger:
    return filled(
        [
            ("read", "", 5, 0, 0),
            ("rejected", "bad_json", 1, 0, 0),
            ("rendered", "", 4, 100, 40),
            ("repeated", "window", 1, 10, 0),
            ("injected", "system", 0, 5, 0),
            ("padding", "", 0, 7, 0),
            ("stored", "", 4, 110, 40),
            ("truncated", "turns", 0, 4, 0),
            ("dropped", "no_trained_tokens", 1, 8, 0),
            ("noted", "answer_cut", 3, 50, 20),
        ]
    )


def test_a_ledger_in_which_all_is_accounted_for_balances():
    balanced().check()


@pytest.mark.parametrize("bucket", [bucket for bucket in BUCKETS if bucket != "noted"])
def test_a_row_or_token_that_vanishes_is_found(bucket):
    ledger = balanced()
    ledger.add(bucket, "lost", rows=1, tokens=1)
    with pytest.raises(ChatmillError, match="does not balance"):
        ledger.check()


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="are not valid counts"):
        Ledger().add("stored", rows=-1)
    with pytest.raises(ValueError, match="are not valid counts"):
        Ledger().add("stored", tokens=1, trained=2)
    with pytest.raises(ChatmillError, match='unknown ledger bucket "lost"'):
        Ledger.from_json({"lost": {"": {"rows": 1}}})


def test_names_from_data_are_bounded_and_leave_room_for_other_reasons():
    ledger = Ledger()
    for number in range(500):
        ledger.add("noted", f"unread_key k{number:03}", rows=1)
    ledger.add("noted", "answer_cut", rows=7)
    noted = ledger.to_json()["noted"]
    assert {name: entry["rows"] for name, entry in noted.items()} == {
        "answer_cut": 7,
        "unread_key (other keys)": 300,
        **{f"unread_key k{number:03}": 1 for number in range(200)},
    }
    assert Ledger.from_json(ledger.to_json()).to_json() == ledger.to_json()
    twice = Ledger.from_json(ledger.to_json())
    twice.merge(ledger)
    assert twice.to_json()["noted"]["unread_key (other keys)"]["rows"] == 600
