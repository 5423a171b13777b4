from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.fit import cut_blocks, stream_blocks
from chatmill.format import TurnRenderer, load_format
from chatmill.ledger import Ledger
from chatmill.records import Message, Record
from chatmill.rows import EMPTY, concat
from chatmill.tokenizer import open_tokenizer

FORMAT = load_format("post-training")
TOKENIZER = open_tokenizer("bytes", control=FORMAT.tokens)

messages = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.text("ab", max_size=12),
    complete=st.sampled_from([True, True, True, False]),
)
records = st.lists(st.builds(Record, st.lists(messages, min_size=1, max_size=6)), max_size=8)


@settings(max_examples=200)
@given(records, st.lists(st.integers(0, 8)), st.integers(1, 40), st.sampled_from(["pad", "drop"]))
def test_any_chunks_give_the_same_blocks_and_the_same_ledger(records, cuts, size, remainder):
    rows = TurnRenderer(FORMAT, TOKENIZER).render(records)
    borders = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    chunks = [rows[start:stop] for start, stop in pairwise(borders)]
    whole, streamed = Ledger(), Ledger()
    expected = cut_blocks(rows, size, remainder=remainder, ledger=whole)
    found = concat([EMPTY, *stream_blocks(chunks, size, remainder=remainder, ledger=streamed)])
    found.check()
    for field in ("ids", "spans", "first_span", "origins", "first_segment"):
        assert np.array_equal(getattr(found, field), getattr(expected, field)), field
    assert streamed.to_json() == whole.to_json()


def test_empty_chunks_and_no_chunks_give_no_blocks():
    ledger = Ledger()
    assert list(stream_blocks([], 8, ledger=ledger)) == []
    assert list(stream_blocks([EMPTY, EMPTY], 8, ledger=ledger)) == []
    assert ledger.to_json() == {}
