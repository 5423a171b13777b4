"""Tests of blocks: spans, segments, weights and the ledger. Each token is a letter; see block_fixtures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from block_fixtures import BYTES, POST_TRAINING, parsed

from chatmill.errors import DataError
from chatmill.fit import GatherPlan, cut_blocks, gather
from chatmill.format import TurnRenderer, load_format
from chatmill.ledger import Ledger
from chatmill.records import Message, Record
from chatmill.rows import NO_FILE, Part, Role, Rows, Rule
from chatmill.tokenizer import open_tokenizer


def told(rows: Rows) -> list[list[str]]:
    """Return one line per span of each row: segment, mask, role, part, rule, message and tokens."""
    rows.check()
    segment = rows.segments()
    lines: list[list[str]] = []
    for row in range(len(rows)):
        lines.append([])
        for at in range(rows.first_span[rows.first_segment[row]], rows.first_span[rows.first_segment[row + 1]]):
            span, start, stop = rows.spans[at], rows.span_start[at], rows.span_start[at + 1]
            what = f"{Role(span['role']).name} {Part(span['part']).name} {Rule(span['rule']).name}".lower()
            mark = "*" if span["weight"] == 1 else "." if span["weight"] == 0 else str(span["weight"])
            message = "-" if span["part"] == Part.PAD else span["message"]
            tokens = "".join(map(chr, rows.ids[start:stop].tolist()))
            lines[-1].append(f"{segment[start]} {mark} {what} {message} {tokens}")
    return lines


def test_spans_of_a_block_record_their_origin_and_the_rule_of_their_weight():
    rows = parsed("SsEUuEAaEUvvE", "AbEUwEAcE", "UxAyE")
    assert told(cut_blocks(rows, 11)) == [
        [
            "0 . system open role 0 S",
            "0 . system content role 0 s",
            "0 . system close role 0 E",
            "0 . user open role 1 U",
            "0 . user content role 1 u",
            "0 . user close role 1 E",
            "0 * assistant open role 2 A",
            "0 * assistant content role 2 a",
            "0 * assistant close role 2 E",
            "0 . user open role 3 U",
            "0 . user content role 3 v",
        ],
        [
            "0 . system injected injected 0 S",
            "0 . system injected injected 0 s",
            "0 . system injected injected 0 E",
            "0 . user injected injected 3 U",
            "0 . user content role 3 v",
            "0 . user close role 3 E",
            "0 . none eos header 3 X",
            "1 . assistant open incomplete_user 0 A",
            "1 . assistant content incomplete_user 0 b",
            "1 . assistant close incomplete_user 0 E",
            "1 . user open role 1 U",
        ],
        [
            "0 . user injected injected 1 U",
            "0 . user content role 1 w",
            "0 . user close role 1 E",
            "0 * assistant open role 2 A",
            "0 * assistant content role 2 c",
            "0 * assistant close role 2 E",
            "0 . none eos header 2 X",
            "1 . user open role 0 U",
            "1 . user content role 0 x",
            "1 . assistant open unfinished 1 A",
            "1 . assistant content unfinished 1 y",
        ],
        [
            "0 . assistant close unfinished 1 E",
            "0 . none eos header 1 X",
            "1 . none pad pad - XXXXXXXXX",
        ],
    ]


def test_an_answer_after_an_unfinished_one_has_the_rule_unfinished():
    lines = told(cut_blocks(parsed("UuEAaUvEAbE"), 12))[0]
    assert [line for line in lines if "assistant" in line] == [
        "0 . assistant open unfinished 1 A",
        "0 . assistant content unfinished 1 a",
        "0 . assistant open unfinished 3 A",
        "0 . assistant content unfinished 3 b",
        "0 . assistant close unfinished 3 E",
    ]


def test_segments_keep_the_origin_of_their_conversation_and_padding_has_none():
    rows = TurnRenderer(POST_TRAINING, BYTES).render(
        [
            Record([Message("user", "u"), Message("assistant", "a")], file="x.jsonl", line=3),
            Record([Message("user", "v"), Message("assistant", "b")], file="y.jsonl", line=8),
        ]
    )
    packed_rows = cut_blocks(rows, 9)
    assert packed_rows.first_segment.tolist() == [0, 2, 4]
    assert packed_rows.origins["line"].tolist() == [3, 8, 8, 0]
    assert [packed_rows.files[file].path for file in packed_rows.origins["file"][:3]] == [
        "x.jsonl",
        "y.jsonl",
        "y.jsonl",
    ]
    assert packed_rows.origins["file"][3] == NO_FILE
    assert packed_rows.positions().tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 0, 1, 2, 3, 4, 5, 0, 1, 2]


def test_a_message_weight_applies_unless_the_block_masks_the_answer():
    chat = [
        Message("assistant", "a", weight=0.5),
        Message("user", "u"),
        Message("assistant", "b", weight=0.5),
        Message("assistant", "c", weight=0.0),
        Message("assistant", "d"),
    ]
    spans = cut_blocks(TurnRenderer(POST_TRAINING, BYTES).render([Record(chat)]), 16).spans
    answers = spans[spans["role"] == Role.ASSISTANT]
    assert answers["weight"].tolist() == [0, 0, 0, 0.5, 0.5, 0.5, 0, 0, 0, 1, 1, 1]
    assert answers["rule"].tolist() == [Rule.INCOMPLETE_USER] * 3 + [Rule.FLAG] * 6 + [Rule.ROLE] * 3


def test_an_answer_masked_by_a_block_stays_masked_after_reweighing():
    rows = cut_blocks(parsed("AaEUuEAbE"), 10).reweigh("assistant")
    assert rows.mask().tolist() == [False] * 6 + [True] * 3 + [False]


def test_injected_tokens_are_context_even_if_every_role_is_trained():
    rows = cut_blocks(parsed("SsEUuuE").reweigh("all"), 6)
    assert "".join(map(chr, rows.ids.tolist())) == "SsEUuuSsEUEX"
    assert rows.weights().tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0]


def test_a_truncated_row_may_begin_inside_a_turn():
    whole = parsed("UuuEAaE", "UuEAaE")
    each = np.array([0, 1, 2])
    rows = gather(whole, GatherPlan(np.array([1, 12]), np.array([8, 15]), each, each[:2], each))
    made = cut_blocks(rows, 5)
    assert "".join(map(chr, made.ids.tolist())) == "uuEAaEXaEX"
    assert made.mask().tolist() == [False] * 10


def test_a_tool_result_cut_by_a_block_is_reopened_with_the_user_marker():
    chat = [Message("user", "u"), Message("assistant", "a"), Message("tool", "3"), Message("assistant", "b")]
    rows = TurnRenderer(POST_TRAINING, BYTES).render([Record(chat)])
    user = BYTES.special_token_ids()["usr"]
    again = cut_blocks(rows, 30).take([1])
    assert again.ids[0] == rows.ids[6] == user
    assert again.spans[["role", "part", "rule", "message"]][0].tolist() == (Role.TOOL, Part.INJECTED, Rule.INJECTED, 2)
    assert again.weights().tolist() == [0] * 13 + [1, 1, 1] + [0] * 14


def test_rows_of_a_format_whose_turns_blocks_cannot_reopen_are_refused():
    chatml = load_format("chatml")
    record = Record([Message("user", "u"), Message("assistant", "a")])
    with pytest.raises(DataError, match="does not end with EOS"):
        cut_blocks(TurnRenderer(chatml, open_tokenizer("bytes", control=chatml.tokens)).render([record]), 8)
    ended = replace(chatml, tokens=dict(chatml.tokens) | {"eos": "<|EOS|>"}, end="<|EOS|>")
    with pytest.raises(DataError, match="opens both user turns and other turns"):
        cut_blocks(TurnRenderer(ended, open_tokenizer("bytes", control=ended.tokens)).render([record]), 8)


def counts(ledger: Ledger) -> dict[str, tuple[int, int, int]]:
    return {f"{bucket} {reason}".strip(): (e.rows, e.tokens, e.trained) for bucket, reason, e in ledger}


def test_the_ledger_counts_injected_padding_removed_and_untrained_tokens():
    ledger = Ledger()
    made = cut_blocks(parsed("UuuuuuuuuuEAaEXUuEAaE", "UuEAaEUvvE", "AbE", "UuEAbE"), 5, ledger=ledger)
    assert "".join(map(chr, made.ids.tolist())) == "UuuuuUuuuuUuEAaEUvvEXAbEXUuEAbEXXXX"
    assert counts(ledger) == {
        "repeated goes_on_in_next_block": (4, 0, 0),
        "injected": (0, 1, 0),
        "padding": (0, 3, 0),
        # The long conversation loses uEAaEX, and the next conversation in the same document is dropped.
        "truncated user_span_over_block": (0, 6, 3),
        "dropped user_span_over_block": (1, 7, 3),
        "noted answer_unfinished": (0, 6, 0),
        "noted answer_incomplete_user": (0, 3, 0),
    }


def test_a_dropped_remainder_is_counted_without_its_injected_tokens():
    ledger = Ledger()
    made = cut_blocks(parsed("SsEUuEAaEUvvEAbE", "UwEAcE", "xE"), 11, remainder="drop", ledger=ledger)
    assert "".join(map(chr, made.ids.tolist())) == "SsEUuEAaEUvSsEUvEAbEXU"
    assert counts(ledger) == {
        "repeated goes_on_in_next_block": (1, 0, 0),
        "injected": (0, 4, 0),
        "dropped remainder": (1, 9, 3),
    }
