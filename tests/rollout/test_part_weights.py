from __future__ import annotations

import pytest
from rollout_fixtures import HURTING, Toy, box, spans, target, thing

from chatmill.errors import UsageError
from chatmill.rollout.trained_parts import PartWeights
from chatmill.rows import Part, Rule

CAT, DOG = thing("cat", 10, 20, 300, 400), thing("dog", 500, 500, 700, 800)
FOUND_CAT = box(1, "cat", 12, 20, 310, 390)


@pytest.fixture(params=[(), HURTING], ids=["bytes", "hurting merges"])
def toy(request):
    return Toy(request.param)


def test_each_part_has_its_weight(toy):
    found = target(toy, f"{{{FOUND_CAT}}}", [CAT, DOG], weights=PartWeights(slot=0.5, append=2.0, end=0.25))
    weights = {Part.PREFIX: 0.0, Part.SLOT: 0.5, Part.BRACE: 0.25, Part.EOS: 0.25}
    assert {part: weight for part, _, weight, _, _ in spans(found)} == {
        **weights,
        **dict.fromkeys((Part.STRUCTURE, Part.VALUE, Part.COORD), 2.0),
    }
    plain = target(toy, f"{{{FOUND_CAT}}}", [CAT, DOG])
    assert (plain.ids, plain.rows.targets().tolist()) == (found.ids, found.rows.targets().tolist())
    with pytest.raises(UsageError, match=r"^end is nan; expected a number of at least 0$"):
        PartWeights(end=float("nan"))


GHOST = box(2, "ghost", 900, 900, 950, 950)


@pytest.mark.parametrize("border", ["shorter", "masked", "joined", "canonical"])
@pytest.mark.parametrize("more", [GHOST, f"{GHOST}, {box(3, 'ghost', 1, 1, 2, 2)}", '"object_2": {"desc": 1}'])
def test_a_rollout_that_continues_after_all_objects_can_be_trained_to_end(more, border):
    toy = Toy()
    text = f"{{{FOUND_CAT}, {more}}}"
    plain = target(toy, text, [CAT], border=border)
    found = target(toy, text, [CAT], border=border, weights=PartWeights(surplus=0.5))
    comma = len(toy.rollout(f"{{{FOUND_CAT}"))
    wanted, weights = plain.rows.targets().tolist(), plain.rows.weights().tolist()
    assert (toy.text([wanted[comma]]), weights[comma]) == (",", 0.0)
    wanted[comma], weights[comma] = *b"}", 0.5
    assert (found.ids, found.rows.targets().tolist(), found.rows.weights().tolist()) == (plain.ids, wanted, weights)
    assert [rule for _, _, _, _, rule in spans(found)].count(Rule.SURPLUS) == 1
    found.rows.check()


def test_the_target_is_the_merged_token_that_ends_the_answer_if_there_is_one():
    toy = Toy([b'"]},', b'"]}}', b'"]}'])
    found = target(toy, f"{{{FOUND_CAT}, {GHOST}}}", [CAT], weights=PartWeights(surplus=1.0))
    assert [
        (toy.text(ids), toy.text([wanted])) for _, ids, _, wanted, rule in spans(found) if rule == Rule.SURPLUS
    ] == [('"]},', '"]}}')]
    toy = Toy([b'"]},'])
    found = target(toy, f"{{{FOUND_CAT}, {GHOST}}}", [CAT], weights=PartWeights(surplus=1.0))
    assert Rule.SURPLUS not in [rule for _, _, _, _, rule in spans(found)]


@pytest.mark.parametrize(
    ("text", "objects"),
    [
        (f"{{{FOUND_CAT}}}", [CAT]),
        (f"{{{FOUND_CAT}, {GHOST}}}", [CAT, DOG]),
        (f"{{{FOUND_CAT}", [CAT]),
        (f"{{{FOUND_CAT}, {GHOST[:20]}", [CAT]),
        ("no brace", []),
    ],
    ids=["nothing more", "one missed", "cut off", "the additional object is incomplete", "nothing kept"],
)
def test_the_surplus_weight_does_not_change_other_rollouts(toy, text, objects):
    plain = target(toy, text, objects)
    found = target(toy, text, objects, weights=PartWeights(surplus=1.0))
    assert found.rows.spans.tolist() == plain.rows.spans.tolist()


def test_without_true_objects_the_first_entry_is_surplus(toy):
    found = target(toy, f"{{ {FOUND_CAT}}}", [], weights=PartWeights(surplus=1.0))
    surplus = [(ids, wanted) for _, ids, _, wanted, rule in spans(found) if rule == Rule.SURPLUS]
    assert [(toy.text(ids[:1])[-1:], wanted) for ids, wanted in surplus] == [(" ", ord("}"))]
