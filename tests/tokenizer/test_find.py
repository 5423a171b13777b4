from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.tokenizer import find
from chatmill.tokenizer.find import byte_pairs, ids_in_range


@pytest.fixture(params=["compiled", "numpy"], autouse=True, scope="module")
def implementation(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(find, "_positions", None)
        elif find._positions is None:
            pytest.skip("the C extensions are not built")
        yield


@given(
    st.binary(max_size=400) | st.lists(st.sampled_from(b"<|/a"), max_size=400).map(bytes),
    st.sets(st.sampled_from(b"<|/a")),
)
def test_byte_pairs_are_found(data, seconds):
    is_second = np.isin(np.arange(256), list(seconds))
    expected = [
        at for at in range(len(data)) if data[at : at + 1] == b"<" and (at + 1 == len(data) or data[at + 1] in seconds)
    ]
    assert byte_pairs(data, ord("<"), is_second).tolist() == expected


EDGES = [0, 1, 2, 9, 2**16 - 1, 2**16, 2**31, 2**32 - 2, 2**32 - 1]


@given(st.lists(st.sampled_from(EDGES), max_size=300), st.sampled_from(EDGES), st.sampled_from(EDGES))
def test_ids_in_a_range_are_found(ids, one, other):
    first, last = sorted((one, other))
    expected = [at for at, id in enumerate(ids) if first <= id <= last]
    array = np.array(ids, dtype=np.uint32)
    assert ids_in_range(array, first, last).tolist() == expected
    assert ids_in_range(np.repeat(array, 2)[::2], first, last).tolist() == expected


def test_ids_of_16_bits_are_found():
    ids = np.array([5, 0, 65_535, 5], dtype=np.uint16)
    assert ids_in_range(ids, 5, 9).tolist() == [0, 3]
    assert ids_in_range(ids, 65_535, 65_535).tolist() == [2]
