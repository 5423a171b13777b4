from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chatmill.tokenizer import open_tokenizer
from chatmill.tokenizer import tokenizer as module
from chatmill.tokenizer.tokenizer import token_positions


def positions(byte_lengths, start, stop, size, offset):
    columns = (np.array(column, dtype=np.int64) for column in (byte_lengths, start, stop, size, offset))
    byte_lengths, start, stop, size, offset = columns
    return [column.tolist() for column in token_positions(byte_lengths, start, stop, size=size, offset=offset)]


def test_a_token_across_a_border_belongs_to_the_side_on_which_it_starts():
    # The offsets are 0, 5 and 10. The tokens are Hel|lo|wor|ld in the first case and Hel|low|or|ld in the second.
    assert positions([3, 2, 3, 2], [0] * 3, [4] * 3, [10] * 3, [0, 5, 10]) == [[0, 2, 4], [0, 0, 0], [1, 1, 1]]
    assert positions([3, 3, 2, 2], [0] * 3, [4] * 3, [10] * 3, [0, 5, 10]) == [[0, 2, 4], [0, 1, 0], [1, 1, 1]]


def test_offsets_count_from_the_end_if_the_tokenizer_adds_a_space_in_front():
    assert positions([9, 3, 2, 4], [1], [4], [8], [4]) == [[3], [0], [1]]


def test_a_text_that_differs_from_its_tokens_has_no_exact_borders():
    assert positions([3, 2], [0, 0], [2, 2], [7, 3], [3, 1])[2] == [False, False]


def test_positions_stay_inside_their_text():
    position, _, _ = positions([2, 2, 2], [1], [2], [2], [9])
    assert position == [2]


@given(st.data())
def test_positions_match_a_walk_over_the_tokens(data):
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=60))
    ranges = data.draw(st.lists(st.tuples(*[st.integers(0, len(lengths))] * 2).map(sorted), min_size=1, max_size=6))
    start, stop = ([each[side] for each in ranges] for side in (0, 1))
    size = [max(0, sum(lengths[a:b]) - data.draw(st.integers(0, 2))) for a, b in ranges]
    offset = [data.draw(st.integers(0, each)) for each in size]
    expected = []
    for a, b, bytes_, border in zip(start, stop, size, offset, strict=True):
        total = sum(lengths[a:b])
        begins = {at: sum(lengths[a:at]) for at in range(a, b + 1)}
        target = total - bytes_ + border
        position = next((at for at in range(a, b + 1) if begins[at] >= target), b)
        expected.append((position, begins[position] != target, total - bytes_ in (0, 1)))
    assert positions(lengths, start, stop, size, offset) == [list(column) for column in zip(*expected, strict=True)]


@given(st.data())
def test_the_compiled_positions_equal_those_of_numpy(data):
    tokenizer = open_tokenizer("bytes", control={"eot": "<|im_end|>"})
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    ranges = data.draw(st.lists(st.tuples(*[st.integers(0, len(ids))] * 2).map(sorted), max_size=6))
    total = [sum(tokenizer.byte_lengths(np.array(ids[a:b], dtype=np.uint32)).tolist()) for a, b in ranges]
    size = [each - data.draw(st.integers(0, 2)) for each in total]
    offset = [data.draw(st.integers(0, each + 1)) for each in total]
    start, stop = (np.array([each[side] for each in ranges], dtype=np.int64) for side in (0, 1))
    texts = np.array(ids, dtype=np.uint32), start, stop
    options = {"size": np.array(size, dtype=np.int64), "offset": np.array(offset, dtype=np.int64)}
    compiled = [column.tolist() for column in tokenizer.positions(*texts, **options)]
    with patch.object(module, "_positions", None):
        assert [column.tolist() for column in tokenizer.positions(*texts, **options)] == compiled
