from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.errors import DataError
from chatmill.load import IGNORE_INDEX, collate
from chatmill.rows import Rows, rows_from_mask

token_ = st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 2))


def one_row(row: list[tuple[int, bool, int]]) -> Rows:
    """Build one row from its tokens; each token is a tuple (id, is_trained, segment)."""
    sizes = [len(list(tokens)) for _, tokens in groupby(row, key=lambda token: token[2])]
    ids, trained, _ = zip(*row, strict=True)
    apart = rows_from_mask(np.array(ids, dtype=np.uint32), np.array(trained), sizes)
    return Rows(apart.ids, apart.spans, apart.first_span, apart.origins, np.array([0, len(sizes)]))


def test_the_picture_in_the_docstring_is_true():
    row = [(1, False, 0), (2, False, 0), (3, True, 0), (4, True, 1), (5, True, 1)]
    batch = collate(one_row(row), pad_token_id=0)
    assert (batch.x.tolist(), batch.y.tolist()) == ([[1, 2, 3, 4]], [[-100, 3, -100, 5]])
    assert batch.loss_mask.tolist() == [[False, True, False, True]]
    assert (batch.positions.tolist(), batch.segments.tolist()) == ([[0, 1, 2, 0]], [[0, 0, 0, 1]])


@given(st.lists(token_, min_size=2, max_size=12), st.booleans())
def test_masked_targets_are_ignored_and_the_first_token_of_a_segment_always_is(row, with_segments):
    row = sorted(((id, trained, segment * with_segments) for id, trained, segment in row), key=lambda token: token[2])
    batch = collate(one_row(row), pad_token_id=0)
    expected = []
    for before, token in pairwise(row):
        expected.append(token[0] if token[1] and before[2] == token[2] else IGNORE_INDEX)
    assert batch.x.tolist() == [[token[0] for token in row[:-1]]]
    assert batch.y.tolist() == [expected]
    assert batch.loss_mask.tolist() == [[target != IGNORE_INDEX for target in expected]]


def test_a_row_longer_than_length_is_refused():
    with pytest.raises(DataError, match="a row has 3 tokens, but length is 2"):
        collate(rows_from_mask(np.arange(3, dtype=np.uint32), np.ones(3), [3]), pad_token_id=0, length=2)


def test_no_rows_give_an_empty_batch():
    batch = collate(rows_from_mask(np.empty(0, dtype=np.uint32), np.empty(0), []), pad_token_id=0, length=5)
    assert [array.shape for array in batch] == [(0, 4)] * 6 + [(0, 1)]
