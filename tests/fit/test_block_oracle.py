"""Compare blocks of random documents and conversations with an oracle. Each token is written as one letter; see
block_fixtures.
"""

from __future__ import annotations

import numpy as np
from block_fixtures import BYTES, POST_TRAINING, packed, parsed
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.fit import cut_blocks, pack_chat_blocks
from chatmill.fit.turns import rows_from_ids
from chatmill.format import TurnRenderer
from chatmill.ledger import Ledger
from chatmill.records import Message, Record
from chatmill.rows import Part, Role, Rule


def slow_mask(block: str) -> str:
    mask, asked, open_answer = ["."] * len(block), False, False
    for at, token in enumerate(block):
        if token == "X":
            asked = open_answer = False
        elif token in "UA":
            stop = at + 1
            while stop < len(block) and block[stop] not in "SUAEX":
                stop += 1
            complete = stop < len(block) and block[stop] == "E"
            if token == "U":
                asked = complete
            elif not complete:
                open_answer = True
            elif asked and not open_answer:
                mask[at : stop + 1] = "*" * (stop + 1 - at)
    return "".join(mask)


def slow_blocks(documents: list[str], size: int, remainder: str) -> tuple[list[str], list[str], dict[str, int]]:
    """Return the expected blocks, the kind of each token (`s`tream, `i`njected or `p`adding), and counts of removed
    tokens.
    """
    stream = [(token, number) for number, document in enumerate(documents) for token in document + "X"]
    # For each token: the role of its span, and the last complete system span of the conversation.
    inside, system, span, before = "", "", "", []
    for token, _ in stream:
        before.append((inside, system))
        if token == "X":
            inside, system = "", ""
        elif token in "SUA":
            inside, span = token, token
        elif inside:
            span += token
            if token == "E":
                system = span if inside == "S" else system
                inside = ""
    out, kinds, lost = [], [], {"left out": 0, "dropped": 0}
    at = 0
    while at < len(stream):
        inside, system = before[at]
        block, mid_user = "", inside == "U" and stream[at][0] not in "SUAX"
        if mid_user:
            block = system + "U" if len(system) + 2 <= size else "U"
        kind, document, fits = "i" * len(block), stream[at][1], len(block) < size
        while at < len(stream) and len(block) < size:
            mid_user = mid_user and stream[at][0] not in "SUAEX"
            block, kind, at = block + stream[at][0], kind + "s", at + 1
        if fits:
            out.append(block)
            kinds.append(kind)
        if mid_user and at < len(stream) and stream[at][0] not in "SUAX":
            while at < len(stream) and stream[at][1] == document:
                lost["left out"] += 1
                at += 1
    if out and len(out[-1]) < size:
        if remainder == "drop":
            lost["dropped"] = kinds.pop().count("s")
            out.pop()
        else:
            kinds[-1] += "p" * (size - len(out[-1]))
            out[-1] += "X" * (size - len(out[-1]))
    return out, kinds, lost


words = st.text("abc", max_size=9)
turns = st.builds("{}{}E".format, st.sampled_from("SUUAA"), words)
open_turns = st.builds("{}{}".format, st.sampled_from("SUA"), words)
chats = st.builds(
    "{}{}".format, st.sampled_from(["", "SsE"]), st.lists(st.builds("U{}EA{}E".format, words, words)).map("".join)
)
documents_ = st.lists(
    st.lists(st.one_of(turns, turns, chats, open_turns, words, st.sampled_from("EX")), max_size=8).map("".join),
    max_size=4,
)
remainders = st.sampled_from(["pad", "drop"])


@settings(max_examples=40)
@given(documents_, remainders)
def test_blocks_of_every_size_from_1_to_64_equal_the_oracle(documents, remainder):
    for size in range(1, 65):
        expected, _, _ = slow_blocks(documents, size, remainder)
        assert packed(*documents, size=size, remainder=remainder) == [f"{b} {slow_mask(b)}" for b in expected]


@given(documents_, remainders, st.integers(1, 40))
def test_spans_segments_and_the_ledger_agree(documents, remainder, size):
    rows, ledger = parsed(*documents), Ledger()
    made = cut_blocks(rows, size, remainder=remainder, ledger=ledger)
    made.check()
    expected, kinds, lost = slow_blocks(documents, size, remainder)
    part = made.per_token(made.spans["part"])
    kind = np.select([part == Part.INJECTED, part == Part.PAD], ["i", "p"], "s")
    assert "".join(kind) == "".join(kinds)
    segments = []
    for block, of_block in zip(expected, kinds, strict=True):
        number = 0
        for at, token in enumerate(block):
            segments.append(number)
            # Padding is one segment, although it consists of EOS tokens.
            number += token == "X" and of_block[at] != "p"
    assert made.segments().tolist() == segments

    answers = made.spans[made.spans["role"] == Role.ASSISTANT]
    assert set(answers["rule"][answers["weight"] > 0].tolist()) <= {Rule.ROLE}
    assert set(answers["rule"][answers["weight"] == 0].tolist()) <= {Rule.UNFINISHED, Rule.INCOMPLETE_USER}

    assert ledger.total("injected").tokens == "".join(kinds).count("i")
    assert ledger.total("padding").tokens == "".join(kinds).count("p")
    reasons = {"left out": 0, "dropped": 0}
    for bucket, reason, entry in ledger:
        if bucket in ("dropped", "truncated"):
            reasons["dropped" if reason == "remainder" else "left out"] += entry.tokens
    assert reasons == lost
    padding = int(np.sum(made.spans["part"] == Part.PAD))
    ledger.add("read", rows=len(rows.origins))
    ledger.add("rendered", rows=len(rows.origins), tokens=len(rows.ids))
    ledger.add("stored", rows=len(made.origins) - padding, tokens=len(made.ids))
    ledger.check()


messages = st.builds(
    Message,
    st.sampled_from(["user", "assistant", "tool"]),
    st.text("ab é", max_size=12),
    complete=st.sampled_from([True] * 4 + [False]),
)
records = st.builds(
    lambda system, rest: Record([*system, *rest]),
    st.lists(st.builds(Message, st.just("system"), st.text("s", max_size=5)), max_size=1),
    st.lists(messages, min_size=1, max_size=8),
)


@given(st.lists(records, max_size=5), remainders, st.integers(1, 80))
def test_blocks_of_rendered_rows_equal_blocks_of_their_token_ids(chats, remainder, size):
    rows = TurnRenderer(POST_TRAINING, BYTES).render(chats)
    ids = BYTES.special_token_ids()
    made = cut_blocks(rows, size, remainder=remainder)
    made.check()
    expected = pack_chat_blocks(
        [rows[row : row + 1].ids[:-1].tolist() for row in range(len(rows))],
        block_size=size,
        remainder=remainder,
        system_id=ids["sys"],
        user_id=ids["usr"],
        assistant_id=ids["asst"],
        end_id=ids["eot"],
        eos_id=ids["eos"],
    )
    assert (made.ids.reshape(-1, size).tolist(), made.mask().reshape(-1, size).tolist()) == expected


@given(st.lists(records, max_size=3))
def test_parsing_rendered_ids_restores_their_spans(chats):
    rows = TurnRenderer(POST_TRAINING, BYTES).render(chats)
    ids = BYTES.special_token_ids()
    again = rows_from_ids(
        [rows[row : row + 1].ids[:-1].tolist() for row in range(len(rows))],
        openers={Role.SYSTEM: ids["sys"], Role.USER: ids["usr"], Role.ASSISTANT: ids["asst"]},
        close=ids["eot"],
        eos=ids["eos"],
    )
    assert again.ids.tolist() == rows.ids.tolist()
    assert again.first_span.tolist() == rows.first_span.tolist()
    assert again.first_segment.tolist() == rows.first_segment.tolist()
    for column in ("length", "part", "message"):
        assert again.spans[column].tolist() == rows.spans[column].tolist()
    # A tool result opens with the user marker, so only the renderer can tell it from a user turn.
    role = np.where(rows.spans["role"] == Role.TOOL, Role.USER, rows.spans["role"])
    assert again.spans["role"].tolist() == role.tolist()
