from __future__ import annotations

import random

import numpy as np
import pytest
from show_fixtures import hostile_lines, line, make

from chatmill.rows import Part, Role
from chatmill.show import near
from chatmill.show.near import MIN_SIMILARITY, NearDuplicateFinder
from chatmill.show.viewer import Viewer


def sequences(view, number: int) -> set[tuple[int, ...]]:
    row = view.row("train", number)
    ids, at = [], 0
    for span in row.spans:
        if span["part"] == Part.CONTENT and span["role"] != Role.SYSTEM:
            ids += row.ids[at : at + span["length"]].tolist()
        at += int(span["length"])
    return {tuple(ids[start : start + 5]) for start in range(max(1, len(ids) - 4))}


def similarity(view, one: int, other: int) -> float:
    first, second = sequences(view, one), sequences(view, other)
    return len(first & second) / len(first | second)


@pytest.fixture(scope="module")
def similar(tmp_path_factory):
    """Episodes 0 to 9 are variants of one text: episode i has 4 * i words replaced. Episodes 10 to 49 are
    random texts.
    """
    numbers = random.Random(1)
    words = [f"word{numbers.randrange(10**6)}" for _ in range(120)]
    lines = []
    for variant in range(10):
        changed = {place: f"other{variant}x{place}" for place in range(variant * 4)}
        lines.append(line("q", " ".join(changed.get(place, word) for place, word in enumerate(words))))
    lines += [line("q", " ".join(f"{numbers.randrange(10**9)}" for _ in range(80))) for _ in range(40)]
    return make(tmp_path_factory.mktemp("similar"), lines)


def test_similarities_agree_with_exact_ones(similar):
    finder = NearDuplicateFinder(similar)
    for number in (0, 4, 9, 20):
        exact = {other: similarity(similar, number, other) for other in range(50) if other != number}
        result = finder.find("train", number)
        estimated = {each.episode: each.similarity for each in result.episodes}
        assert result.compared == 50
        # Similarities are estimated from 128 values, so allow four standard errors.
        error = 4 * np.sqrt(0.25 / 128)
        assert {other for other, value in exact.items() if value >= MIN_SIMILARITY + error} <= estimated.keys()
        assert all(abs(value - exact[other]) <= error for other, value in estimated.items())
        assert [each.similarity for each in result.episodes] == sorted(estimated.values(), reverse=True)
    assert len(finder.find("train", 0).episodes) >= 5
    assert finder.find("train", 20).episodes == []


def test_only_the_first_episodes_are_compared(similar, monkeypatch):
    monkeypatch.setattr(near, "MAX_EPISODES", 3)
    result = NearDuplicateFinder(similar).find("train", 4)
    assert result.compared == 3
    assert {each.episode for each in result.episodes} == {0, 1, 2}


def test_comparing_stops_at_a_number_of_tokens(similar, monkeypatch):
    monkeypatch.setattr(near, "CHUNK", 2000)
    monkeypatch.setattr(near, "MAX_TOKENS", 3000)
    lengths = similar.dataset["train"].lengths_of(np.arange(50))
    compared = NearDuplicateFinder(similar).find("train", 0).compared
    assert 3000 <= lengths[:compared].sum() < 3000 + 2000


def test_empty_episodes_are_not_similar_to_each_other(tmp_path):
    shown = make(tmp_path, [line("", ""), line("", ""), line("a", "b")])
    assert NearDuplicateFinder(shown).find("train", 0) == ([], 3)


def test_the_api_lists_near_duplicates_with_escaped_text(tmp_path):
    lines = hostile_lines()[:9]
    shown = make(tmp_path, [*lines, *lines])
    viewer = Viewer(shown, cache=tmp_path / "index")
    for number in range(9):
        answer = viewer.near("train", number)
        assert (answer["compared"], answer["of"], answer["least"]) == (18, 18, MIN_SIMILARITY)
        twin = answer["episodes"][0]
        assert (twin["episode"], twin["similarity"]) == (number + 9, 1.0)
        assert twin["words"].isprintable() or "\u200d" in twin["words"]
