"""What the demo is asked cannot be known by heart: nothing of it is in training, and what is nearest there is wrong."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

DATA = Path(__file__).resolve().parents[1] / "data"
TRAIN, HELD_OUT = ("desk_chat", "desk_tools"), ("desk_chat_heldout", "desk_tools_heldout")
SPEAKERS = ("assistant", "assistant_toolcall")
FACTS = re.compile(r"\ba (\w+) \w+ (\w+)|\bfor (\w+) (\w+)|\b(?:at|shelf) (\w+) (\d+)")


class Asked(NamedTuple):
    """A conversation up to an answer, as words; and the answer."""

    words: tuple[str, ...]
    answer: str


def records(names: tuple[str, ...]) -> list[dict]:
    return [json.loads(line) for name in names for line in (DATA / f"{name}.jsonl").read_text("utf-8").splitlines()]


def written(message: dict) -> str:
    return message.get("content") or json.dumps([message["name"], message["arguments"]])


@cache
def asked(names: tuple[str, ...]) -> list[Asked]:
    """Every question of some files. Who speaks is a word, so that turns are kept apart."""
    found = []
    for record in records(names):
        words: list[str] = ["system", *record.get("system", "").split()]
        for message in record["messages"]:
            if message["role"] in SPEAKERS:
                found.append(Asked((*words, "assistant"), written(message)))
            words += [message["role"], *written(message).split()]
    return found


def test_there_are_enough_questions():
    assert len({question.words for question in asked(HELD_OUT)}) >= 200


def test_no_held_out_question_and_no_held_out_answer_occurs_in_training():
    known = {question.words for question in asked(TRAIN)}
    assert [question for question in asked(HELD_OUT) if question.words in known] == []
    answers = {question.answer for question in asked(TRAIN)}
    assert [question for question in asked(HELD_OUT) if question.answer in answers] == []


def facts(text: str) -> set[tuple[str, ...]]:
    return {tuple(filter(None, found)) for found in FACTS.findall(text)}


def test_every_fact_of_a_held_out_answer_is_new_and_every_word_of_it_is_known():
    told = set().union(*(facts(json.dumps(record)) for record in records(TRAIN)))
    words = {word for fact in told for word in fact}
    for question in asked(HELD_OUT):
        assert facts(question.answer)
        assert not facts(question.answer) & told
        assert {word for fact in facts(question.answer) for word in fact} <= words


def test_an_answer_is_found_in_its_own_conversation():
    for question in asked(TRAIN + HELD_OUT):
        assert facts(question.answer) <= facts(" ".join(question.words))


# The nearest question of training, by the fewest words that have to be changed, put in or left out.


def bags(questions: list[Asked], words: dict[str, int]) -> np.ndarray:
    out = np.zeros((len(questions), len(words)), dtype=np.int16)
    for row, question in enumerate(questions):
        for word, count in Counter(question.words).items():
            out[row, words[word]] = count
    return out


def distances(one: np.ndarray, others: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The edit distance of a list of numbers to each of others, which are filled up with -1."""
    places = np.arange(others.shape[1] + 1)
    row = np.broadcast_to(places, (len(others), len(places))).copy()
    for number, word in enumerate(one, 1):
        changed = np.minimum(row[:, :-1] + (others != word), row[:, 1:] + 1)
        # What is put in: a running minimum, when the growth along the row is taken out first.
        first = np.full((len(others), 1), number)
        row = np.minimum.accumulate(np.concatenate([first, changed], axis=1) - places, axis=1) + places
    return row[np.arange(len(others)), lengths]


def plain_distance(one: list, other: list) -> int:
    row = list(range(len(other) + 1))
    for number, a in enumerate(one, 1):
        diagonal, row[0] = row[0], number
        for at, b in enumerate(other, 1):
            diagonal, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, diagonal + (a != b))
    return row[-1]


@pytest.mark.parametrize(("last_message_alone", "every"), [(True, 3), (False, 18)])
def test_answering_with_the_nearest_training_question_is_nearly_always_wrong(last_message_alone, every):
    def cut(questions: list[Asked]) -> list[Asked]:
        if not last_message_alone:
            return questions
        starts = [max(at for at, word in enumerate(q.words) if word in ("user", "toolresult")) for q in questions]
        return [Asked(q.words[start:], q.answer) for q, start in zip(questions, starts, strict=True)]

    known, held = cut(asked(TRAIN)), cut(asked(HELD_OUT)[::every])
    words = {word: at for at, word in enumerate(dict.fromkeys(word for q in known + held for word in q.words))}
    lengths = np.array([len(q.words) for q in known])
    numbers = np.full((len(known), lengths.max()), -1)
    for row, question in enumerate(known):
        numbers[row, : lengths[row]] = [words[word] for word in question.words]
    known_bags, right = bags(known, words), 0
    for question, bag in zip(held, bags(held, words), strict=True):
        # Changing a word alters two counts at most: no question is nearer than half of what counts differ by.
        least = -(-np.abs(known_bags - bag).sum(axis=1) // 2)
        order, best, nearest = np.argsort(least, kind="stable"), np.inf, []
        for start in range(0, len(order), 32):
            some = order[start : start + 32]
            if least[some[0]] > best:
                break
            found = distances(np.array([words[word] for word in question.words]), numbers[some], lengths[some])
            if found.min() < best:
                best, nearest = found.min(), []
            nearest += [known[at] for at in some[found == best]]
        right += any(each.answer == question.answer for each in nearest)
    assert right < 0.2 * len(held)


def test_the_distance_is_that_of_the_plain_way():
    rng = np.random.default_rng(0)
    lists = [rng.integers(0, 4, rng.integers(0, 9)) for _ in range(40)]
    lengths = np.array([len(each) for each in lists])
    filled = np.full((40, lengths.max()), -1)
    for row, each in enumerate(lists):
        filled[row, : len(each)] = each
    for one in lists[:10]:
        wanted = [plain_distance(one.tolist(), other.tolist()) for other in lists]
        assert distances(one, filled, lengths).tolist() == wanted
