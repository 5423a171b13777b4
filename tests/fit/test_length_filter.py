from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import DataError
from chatmill.fit import turns_that_fit
from chatmill.format import TurnRenderer, load_format
from chatmill.records import Message, Record
from chatmill.rows import EMPTY
from chatmill.tokenizer import open_tokenizer

FORMAT = load_format("post-training")
TOKENIZER = open_tokenizer("bytes", control=FORMAT.tokens)
ROLE = {"S": "system", "U": "user", "A": "assistant", "T": "tool"}


def record(*turns: str) -> Record:
    return Record([Message(ROLE[turn[0]], turn[1:]) for turn in turns])


def fit(context_length: int, *records: Record) -> tuple[list[int], list[int]]:
    turns, tokens = turns_that_fit(TurnRenderer(FORMAT, TOKENIZER).render(records), context_length)
    return turns.tolist(), tokens.tolist()


# A turn has an opening and a closing marker.
PLAIN = record("Sss", "Uaa", "Abb", "Ucccc", "Ad", "Ue", "Af")  # lengths: 4 | 4 4 | 6 3 | 3 3, then EOS


def test_the_first_pair_must_fit_together_with_the_system_turn():
    assert fit(12, PLAIN) == ([7], [28])
    assert fit(11, PLAIN) == ([0], [0])


def test_a_later_pair_only_has_to_fit_alone():
    assert fit(9, record("Uaa", "Abb", "Ucccc", "Ad", "Ue", "Af")) == ([6], [24])


def test_the_first_pair_that_does_not_fit_ends_the_conversation_even_if_later_ones_fit():
    assert fit(8, record("Uaa", "Abb", "Ucccc", "Ad", "Ue", "Af")) == ([2], [8])


def test_a_conversation_without_an_answer_that_fits_is_skipped():
    assert fit(99, record("Uaa"), record("Sss")) == ([0, 0], [0, 0])
    assert fit(6, record("Ua", "Ub", "A" + "c" * 9)) == ([0], [0])


def test_rows_are_filtered_independently_and_there_may_be_none():
    assert fit(12, PLAIN, record("U" + "a" * 20, "Ab"), record("Ua", "Ab")) == ([7, 0, 2], [28, 0, 7])
    assert [array.tolist() for array in turns_that_fit(EMPTY, 5)] == [[], []]
    with pytest.raises(DataError, match="context_length is 0; expected at least 1"):
        turns_that_fit(EMPTY, 0)


def slow(record: Record, context_length: int) -> int:
    turns = list(record.messages)
    head = [turns.pop(0)] if turns[0].role == "system" else []
    pairs: list[list[Message]] = []
    for message in turns:
        if message.role == "user" or not pairs:
            pairs.append([])
        pairs[-1].append(message)

    def size(messages: list[Message]) -> int:
        wrapped = len("<tool_response>\n\n</tool_response>")
        return sum(len(m.content) + 2 + (wrapped if m.role == "tool" else 0) for m in messages)

    kept = list(head)
    for number, pair in enumerate(pairs):
        if size(pair) + (size(head) if number == 0 else 0) > context_length:
            break
        kept += pair
    return len(kept) if any(m.role == "assistant" for m in kept) else 0


turn_ = st.tuples(st.sampled_from("UUUAAAT"), st.text("ab", max_size=6)).map("".join)
turns_ = st.tuples(st.lists(st.text("s", max_size=5).map(lambda t: "S" + t), max_size=1), st.lists(turn_, max_size=7))


@given(
    st.lists(turns_.map(lambda t: record(*t[0], *t[1])).filter(lambda r: r.messages), min_size=1, max_size=4),
    st.integers(1, 60),
)
def test_random_conversations_agree_with_the_loop(records, context_length):
    assert fit(context_length, *records)[0] == [slow(record, context_length) for record in records]
