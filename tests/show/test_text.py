from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from show_fixtures import HOSTILE

from chatmill.format import load_format
from chatmill.show.text import JOINERS, TokenText, visible
from chatmill.tokenizer import open_tokenizer

BYTES = TokenText(open_tokenizer("bytes", control=load_format("chatml").tokens))
ACTS = {"Cc", "Cf", "Cs", "Zl", "Zp"}
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(any_text)
def test_no_control_or_bidirectional_characters_remain(text):
    shown = visible(text)
    assert [ch for ch in shown if unicodedata.category(ch) in ACTS and ch not in JOINERS] == []


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Mn"], include_characters=" " + JOINERS), max_size=60))
def test_harmless_text_is_unchanged(text):
    assert visible(text) == "".join(ch if ch.isprintable() or ch in JOINERS else visible(ch) for ch in text)
    if text.isprintable():
        assert visible(text) == text


def test_control_characters_are_escaped():
    assert visible("\x1b[2J\x07\x00\x9b\u202e\u2066\u2028\ufeff\r\n\t") == (
        r"\x1b[2J\x07\x00\x9b\u202e\u2066\u2028\ufeff\r\n\t"
    )
    assert visible("a\nb\tc\r", keep="\n\t") == "a\nb\tc\\r"
    assert visible("👩\u200d👧 שלום") == "👩\u200d👧 שלום"


@pytest.mark.parametrize(("limit", "shown"), [(3, "abc…"), (5, "abcde"), (9, "abcde")])
def test_only_the_beginning_of_a_long_text_is_shown(limit, shown):
    assert visible("abcde", limit=limit) == shown


@given(any_text)
def test_the_pieces_of_tokens_join_to_the_text(text):
    ids = BYTES.tokenizer.encode(text)
    assert b"".join(BYTES.piece(id) for id in ids) == text.encode()
    assert BYTES.text(ids) == visible(text)
    assert BYTES.text(ids, limit=5) == visible(text, limit=5)


def test_partial_characters_are_shown_as_bytes_and_spaces_are_visible():
    assert BYTES.tokens("ä \n".encode()) == ["\\xc3", "\\xa4", "·", "↵"]
    assert BYTES.token(BYTES.tokenizer.token_id("<|im_end|>")) == "<|im_end|>"


def test_ids_are_shown_without_a_tokenizer_and_beyond_the_vocabulary():
    assert TokenText(None).tokens([1, 22]) == ["⟨1⟩", "⟨22⟩"]
    assert BYTES.tokens([65, 10**6]) == ["A", "⟨1000000⟩"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_come_out_printable(text):
    shown = BYTES.text(list(text.encode()))
    assert all(ch.isprintable() or ch in JOINERS for ch in shown)
