from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_rows import build, rows_

from chatmill.load import IGNORE_INDEX, collate
from chatmill.rows import OWN_ID

PAD = 3


@settings(max_examples=60)
@given(rows_.filter(lambda plain: any(plain)), st.none() | st.integers(0, 3))
def test_every_position_of_a_batch_matches_its_row(plain, more):
    rows = build(plain)
    longest = max(2, *rows.lengths)
    batch = collate(rows, pad_token_id=PAD, length=None if more is None else longest + more)
    width = batch.x.shape[1]
    assert width == longest + (more or 0) - 1
    for number, segments in enumerate(plain):
        tokens = [
            (id, weight, target if target != OWN_ID else id, segment, at)
            for segment, (_, spans) in enumerate(segments)
            for at, (id, weight, target) in enumerate(
                (id, weight, target) for ids, _, _, weight, _, target in spans for id in ids
            )
        ]
        for place in range(width):
            if place < len(tokens):
                assert batch.x[number, place] == tokens[place][0]
                assert (batch.segments[number, place], batch.positions[number, place]) == tokens[place][3:]
            else:
                assert batch.x[number, place] == PAD
                assert batch.segments[number, place] == len(segments)
                assert batch.positions[number, place] == place - len(tokens)
            inside = place + 1 < len(tokens) and tokens[place][3] == tokens[place + 1][3]
            trained = inside and tokens[place + 1][1] > 0
            assert batch.y[number, place] == (tokens[place + 1][2] if trained else IGNORE_INDEX)
            assert batch.loss_mask[number, place] == trained
            assert batch.weights[number, place] == (np.float32(tokens[place + 1][1]) if trained else 0)
        assert batch.episode_ids[number].tolist() == [number] * len(segments) + [-1] * (
            batch.episode_ids.shape[1] - len(segments)
        )
