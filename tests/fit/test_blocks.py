"""Stream blocks.

Tokens are letters: S, U and A open a system, user and assistant turn, E is END, X is EOS, lowercase is text. In a mask,
`*` means trained on. Documents are written without their last X, which packing adds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.errors import DataError
from chatmill.fit import GatherPlan, cut_blocks, gather, pack_chat_blocks
from chatmill.fit.turns import rows_from_ids
from chatmill.format import TurnRenderer, load_format
from chatmill.ledger import Ledger
from chatmill.records import Message, Record
from chatmill.rows import EMPTY, NO_FILE, Part, Role, Rows, Rule
from chatmill.tokenizer import open_tokenizer

MARKERS = {
    "system_id": ord("S"),
    "user_id": ord("U"),
    "assistant_id": ord("A"),
    "end_id": ord("E"),
    "eos_id": ord("X"),
}
POST_TRAINING = load_format("post-training")
BYTES = open_tokenizer("bytes", control=POST_TRAINING.tokens)


def packed(*documents: str, size: int, remainder: str = "pad") -> list[str]:
    ids, masks = pack_chat_blocks(
        [[ord(token) for token in document] for document in documents],
        block_size=size,
        remainder=remainder,
        **MARKERS,
    )
    return [
        "".join(map(chr, block)) + " " + "".join(".*"[trained] for trained in mask)
        for block, mask in zip(ids, masks, strict=True)
    ]


def parsed(*documents: str) -> Rows:
    rows = rows_from_ids(
        [[ord(token) for token in document] for document in documents],
        openers={Role.SYSTEM: ord("S"), Role.USER: ord("U"), Role.ASSISTANT: ord("A")},
        close=ord("E"),
        eos=ord("X"),
    )
    rows.check()
    return rows


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


# Loss mask.


def test_the_mask_marks_only_assistant_spans_and_their_markers_too():
    assert packed("SsEUuEAaaEUvEAbE", size=17) == ["SsEUuEAaaEUvEAbEX ......****...***."]


def test_the_mask_is_packed_with_the_ids_and_stays_aligned():
    assert packed("UuEAaE", "UvEAbbE", "UwEAcE", size=11) == [
        "UuEAaEXUvEA ...***.....",
        "bbEXUwEAcEX .......***.",
    ]


def test_without_an_assistant_span_everything_is_masked():
    assert packed("SsEUuE", size=7) == ["SsEUuEX ......."]


def test_an_assistant_span_without_a_user_span_before_it_is_masked():
    assert packed("SsEAaEUuEAbE", size=13) == ["SsEAaEUuEAbEX .........***."]


def test_consecutive_answers_share_one_user_span():
    assert packed("UuEAaEAbE", size=10) == ["UuEAaEAbEX ...******."]


def test_an_unfinished_user_span_masks_the_answer_only_if_it_is_the_latest():
    assert packed("UuEUvAaE", size=9) == ["UuEUvAaEX ........."]
    assert packed("UvUuEAaE", size=9) == ["UvUuEAaEX .....***."]


def test_an_assistant_marker_without_end_masks_the_rest_of_its_conversation():
    assert packed("UuEAaUvEAbEXUuEAaE", size=19) == ["UuEAaUvEAbEXUuEAaEX ...............***."]
    assert packed("UuEAaEAbXUuEAaE", size=16) == ["UuEAaEAbXUuEAaEX ...***......***."]


def test_a_new_system_span_resets_neither_the_user_span_nor_the_open_answer():
    assert packed("UuESsEAaE", size=10) == ["UuESsEAaEX ......***."]
    assert packed("UuEAaSsEUvEAbE", size=15) == ["UuEAaSsEUvEAbEX ..............."]


def test_eos_resets_the_user_span():
    assert packed("UuE", "AaE", size=8) == ["UuEXAaEX ........"]


def test_stray_tokens_between_turns_are_context_and_change_nothing():
    assert packed("xUuExEAaEx", size=11) == ["xUuExEAaExX ......***.."]


def test_the_user_span_must_be_in_the_same_block_as_its_answer():
    assert packed("UuEAaE", size=3) == ["UuE ...", "AaE ...", "XXX ..."]


def test_an_answer_cut_by_the_end_of_a_block_is_context_on_both_sides():
    assert packed("UuEAaaEUvEAbE", size=5) == ["UuEAa .....", "aEUvE .....", "AbEXX ....."]
    assert packed("UuEAaaEUvEAbE", size=6) == ["UuEAaa ......", "EUvEAb ......", "EXXXXX ......"]


def test_a_span_left_open_in_an_earlier_block_masks_nothing_in_this_one():
    assert packed("UuEAaaUvEAbE", size=6) == ["UuEAaa ......", "UvEAbE ...***", "XXXXXX ......"]


# Injection.


def test_the_worked_example_cut_inside_the_third_user_span():
    conversation = "SsEUuEAaEUvEAbEUwwwEAcE"
    assert packed(conversation, size=17) == [
        "SsEUuEAaEUvEAbEUw ......***...***..",
        "SsEUwwEAcEXXXXXXX .......***.......",
    ]


def test_the_answer_of_the_worked_example_is_masked_if_its_user_span_never_ends():
    assert packed("SsEUuEAaEUvEAbEUwwwAcE", size=17) == [
        "SsEUuEAaEUvEAbEUw ......***...***..",
        "SsEUwwAcEXXXXXXXX .................",
    ]


def test_without_a_system_span_only_the_user_marker_is_injected():
    assert packed("UuEAaEUvvEAbE", size=8) == ["UuEAaEUv ...***..", "UvEAbEXX ...***.."]


def test_a_block_that_begins_with_the_end_of_a_user_span_is_rewritten_too():
    assert packed("SsEUuEAaE", size=5) == ["SsEUu .....", "SsEUE .....", "AaEXX ....."]


def test_the_last_complete_system_span_of_the_conversation_is_injected():
    assert packed("SsEStEUuuuuuE", size=9) == ["SsEStEUuu .........", "StEUuuuEX ........."]


def test_an_unfinished_system_span_is_not_injected_and_does_not_hide_a_complete_one():
    assert packed("SsUuuuuE", size=6) == ["SsUuuu ......", "UuEXXX ......"]
    assert packed("SsEStUuuuuE", size=8) == ["SsEStUuu ........", "SsEUuuEX ........"]


def test_the_system_span_of_an_earlier_conversation_is_not_injected():
    assert packed("SsEXUuuuE", size=7) == ["SsEXUuu .......", "UuEXXXX ......."]
    assert packed("SsE", "UuuuE", size=7) == ["SsEXUuu .......", "UuEXXXX ......."]


def test_a_system_span_that_was_itself_cut_is_injected_whole():
    assert packed("SssEUuuuuE", size=6)[1:] == ["SssEUu ......"]
    assert packed("SssEUuE", size=3) == ["Sss ...", "EUu ...", "UEX ..."]
    assert packed("xxSssEUuuuEAaE", size=8) == ["xxSssEUu ........", "SssEUuuE ........", "AaEXXXXX ........"]


def test_the_system_span_is_not_injected_if_it_leaves_no_room_for_a_stream_token():
    assert packed("SsEUuuE", size=5) == ["SsEUu .....", "SsEUu ....."]
    assert packed("SssEUuE", size=6) == ["SssEUu ......", "SssEUE ......", "XXXXXX ......"]
    assert packed("SsssEUuE", size=6) == ["SsssEU ......", "UuEXXX ......"]


def test_a_block_that_begins_inside_a_system_span_is_not_rewritten():
    assert packed("SsssEUuEAaE", size=3) == ["Sss ...", "sEU ...", "UuE ...", "AaE ...", "XXX ..."]
    assert packed("xxxxxxxxSssEUuEAaE", size=10) == ["xxxxxxxxSs ..........", "sEUuEAaEXX .....***.."]


def test_a_block_that_begins_inside_an_assistant_span_is_not_rewritten():
    assert packed("SsEUuEAaaaEUvEAbE", size=9) == ["SsEUuEAaa .........", "aEUvEAbEX .....***."]


def test_a_block_that_begins_at_a_marker_or_eos_is_not_rewritten_even_after_an_open_user_span():
    assert packed("SsEUuAaE", size=5) == ["SsEUu .....", "AaEXX ....."]
    assert packed("SsEUu", "UuE", size=5) == ["SsEUu .....", "XUuEX ....."]


def test_a_block_that_begins_between_turns_is_not_rewritten():
    assert packed("SsEUuExAaE", size=6) == ["SsEUuE ......", "xAaEXX ......"]


# Removed tokens.


def test_a_user_span_that_also_fills_the_next_block_ends_only_its_document():
    assert packed("UuuuuuuEAaE", "UvEAbE", size=4) == ["Uuuu ....", "Uuuu ....", "UvEA ....", "bEXX ...."]
    assert packed("UuuuuuuEAaE", "UvEAbE", size=6) == [
        "Uuuuuu ......",
        "UuEAaE ...***",
        "XUvEAb ......",
        "EXXXXX ......",
    ]


def test_later_conversations_of_an_ended_document_are_dropped():
    assert packed("UuuuuuuEAaEXUuEAaE", "UvE", size=4) == ["Uuuu ....", "Uuuu ....", "UvEX ...."]


def test_a_user_span_whose_end_is_the_last_token_of_the_block_is_complete():
    assert packed("UuuuuuEAaE", size=4) == ["Uuuu ....", "UuuE ....", "AaEX ...."]


def test_an_open_user_span_that_stops_at_the_block_end_does_not_end_the_document():
    assert packed("UuuuuuAaE", size=4) == ["Uuuu ....", "UuuA ....", "aEXX ...."]
    assert packed("UuuuuuuAaE", size=4) == ["Uuuu ....", "Uuuu ....", "AaEX ...."]


def test_a_block_of_one_token_has_no_room_for_the_marker_and_a_token():
    assert packed("SsEUuEAaE", "AaE", size=1) == [f"{token} ." for token in "SsEUAaEX"]


def test_blocks_without_trained_tokens_are_kept():
    assert packed("xxxx", "UuEAaE", size=7) == ["xxxxXUu .......", "UEAaEXX ..***.."]


def test_the_remainder_is_padded_with_eos_or_dropped():
    assert packed("UuEAaE", "Uu", size=6) == ["UuEAaE ...***", "XUuXXX ......"]
    assert packed("UuEAaE", "Uu", size=6, remainder="drop") == ["UuEAaE ...***"]
    assert packed("UuEAaE", size=7, remainder="drop") == ["UuEAaEX ...***."]
    assert packed("UuEAaE", size=8, remainder="drop") == []


def test_documents_and_the_list_of_documents_may_be_empty():
    assert packed(size=4) == []
    assert packed("", "", size=4) == ["XXXX ...."]
    assert cut_blocks(EMPTY, 4).lengths.tolist() == []


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"block_size": 0}, "block_size is 0; expected at least 1"),
        ({"remainder": "keep"}, 'remainder is "keep"; expected pad or drop'),
        ({"eos_id": ord("E")}, "two markers have the same id"),
        ({"documents": [[-1]]}, "token ids must be integers"),
        ({"documents": [[2**32]]}, "token ids must be integers"),
    ],
)
def test_invalid_arguments_raise_a_clear_error(options, fault):
    with pytest.raises(DataError, match=fault):
        pack_chat_blocks(**({"documents": [[1]], "block_size": 4} | MARKERS | options))


# Rows as input.


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
        # The long conversation loses uEAaEX, and the next one in the same document is dropped.
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
    """Return blocks, the kind of each token (`s`tream, `i`njected or `p`adding), and counts of removed tokens."""
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
