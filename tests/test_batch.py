"""The shift: y belongs to the next token, and no loss crosses a border."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chatmill.load.batch import IGNORE_INDEX, shift

token_ = st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 2))


def test_the_picture_in_the_docstring_is_true():
    x, y, mask = shift(
        np.array([[1, 2, 3, 4, 5]]), np.array([[0, 0, 1, 1, 1]], dtype=bool), segments=np.array([[0, 0, 0, 1, 1]])
    )
    assert (x.tolist(), y.tolist()) == ([[1, 2, 3, 4]], [[-100, 3, -100, 5]])
    assert mask.tolist() == [[False, True, False, True]]


@given(st.lists(token_, min_size=2, max_size=12), st.booleans())
def test_masked_targets_are_ignored_and_the_first_token_of_a_segment_always_is(row, with_segments):
    row = sorted(row, key=lambda token: token[2])
    ids, trained, segments = (np.array([column]) for column in zip(*row, strict=True))
    x, y, mask = shift(ids, trained, segments=segments if with_segments else None)
    expected = []
    for before, token in pairwise(row):
        border = with_segments and before[2] != token[2]
        expected.append(token[0] if token[1] and not border else IGNORE_INDEX)
    assert x.tolist() == [[token[0] for token in row[:-1]]]
    assert y.tolist() == [expected]
    assert mask.tolist() == [[target != IGNORE_INDEX for target in expected]]
