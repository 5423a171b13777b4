"""The tokens and the loss mask of stream blocks. Each token is written as a letter that block_fixtures defines."""

from __future__ import annotations

import pytest
from block_fixtures import MARKERS, packed

from chatmill.errors import DataError
from chatmill.fit import cut_blocks, pack_chat_blocks
from chatmill.rows import EMPTY

# Loss mask.


def test_the_mask_marks_only_assistant_spans_including_their_markers():
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


def test_the_worked_example_is_reopened_with_its_system_span_and_user_marker():
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
