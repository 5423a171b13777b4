from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fixtures import HURTING, Toy, box, chopped, thing

from chatmill.rollout.match import match_objects
from chatmill.rollout.scan import scan_rollout
from chatmill.rollout.target import build_target
from chatmill.rollout.vocabulary import Vocabulary, id_array

TOY = Toy(HURTING)
WRITTEN = [
    box(1, "cat", 10, 20, 300, 400), box(2, "é", 1, 2, 3, 4), box("03", "dog", 0, 0, 999, 99), box(4, " ", 1, 1, 2, 2),
    box(5, "x", 1000, 0, 1, 1), box(10**9, "far", 1, 1, 2, 2), box(6, "turned", 9, 9, 1, 1), '"note": 3',
    '"object_7": {"desc": "p", "poly": ["<|coord_1|>", "<|coord_1|>", "<|coord_9|>", "<|coord_1|>", "<|coord_9|>", '
    '"<|coord_9|>"]}',
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(WRITTEN), max_size=8), st.sampled_from([", ", ",", ",  "]), st.integers(0, 900))
def test_targets_are_the_same_without_the_c_extension(entries, between, cut):
    data = ("{" + between.join(entries) + "}").encode()[:cut]
    ids = chopped(TOY, data, cut)
    truth = [thing("cat", 10, 20, 300, 390), thing("dog", 0, 0, 990, 99), {"desc": "p", "poly": [1, 1, 9, 1, 9, 9]}]
    targets = [build_target(ids, truth, tokenizer=TOY)]
    scans = [scan_rollout(ids, Vocabulary(TOY))]
    with pytest.MonkeyPatch.context() as without:
        without.setattr("chatmill.rollout.scan._rollout", None)
        without.setattr("chatmill.rollout.match._rollout", None)
        targets.append(build_target(ids, truth, tokenizer=TOY))
        scans.append(scan_rollout(ids, Vocabulary(TOY)))
    assert scans[0].entries == scans[1].entries and scans[0].ended == scans[1].ended
    one, other = ({**vars(target), "rows": None} for target in targets)
    assert one == other
    assert targets[0].rows.spans.tobytes() == targets[1].rows.spans.tobytes()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 6, 20]), st.sampled_from([0.01, 0.3, 0.5]))
def test_every_assignment_method_gives_the_same_matching(seed, most, gate):
    draw = random.Random(seed)

    def things(count):
        corners = [[sorted(draw.randrange(most) for _ in range(2)) for _ in range(2)] for _ in range(count)]
        return [thing("x", xs[0], ys[0], xs[1], ys[1]) for xs, ys in corners]

    predicted, truth = things(draw.randrange(7)), things(draw.randrange(7))
    expected = match_objects(predicted, truth, gate=gate)
    with pytest.MonkeyPatch.context() as without:
        without.setattr("chatmill.rollout.match._rollout", None)
        assert match_objects(predicted, truth, gate=gate) == expected
        for few in (0, 10**9):
            without.setattr("chatmill.rollout.match.FEW", few)
            assert match_objects(predicted, truth, gate=gate) == expected


def test_boxes_that_the_c_extension_does_not_support_are_matched():
    large = 2**30
    one, other = thing("x", 0, 0, large, large), {"desc": "y", "bbox_2d": (0, 0, large, large // 2)}
    assert match_objects([one], [other], gate=0.5).pairs == ((0, 0),)
    assert match_objects([one], [other], gate=0.51).gated == 1


def test_ids_are_decoded_up_to_the_first_unknown_id():
    toy = Toy()
    vocabulary = Vocabulary(toy)
    for unknown in (-1, 290, 5000, 2**62, -(2**63)):
        data, start = vocabulary.decode(np.array([97, 300, 98, unknown, 99]))
        assert (data, start.tolist()) == (b"a<|coord_0|>b", [0, 1, 12, 13])
    # This token was added after the vocabulary was read.
    new = toy.token(b"new")
    data, start = vocabulary.decode(np.array([new, 97, new]))
    assert (data, start.tolist()) == (b"newanew", [0, 3, 4, 7])
    data, start = vocabulary.decode(np.array([], dtype=np.int64))
    assert (data, start.tolist()) == (b"", [0])


def test_ids_too_large_for_an_array_are_unknown_ids():
    assert id_array([1, True, np.int32(3), 2**80, -(2**70)]).tolist() == [1, 1, 3, -1, -1]
    assert id_array(np.array([1, 2], dtype=np.uint32)).tolist() == [1, 2]
    found = build_target([*TOY.rollout("{" + box(1, "cat", 1, 2, 3, 4)), 2**80, 5], [], tokenizer=TOY)
    assert found.valid_objects == [thing("cat", 1, 2, 3, 4)]
