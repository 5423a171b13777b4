from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from rollout_fixtures import Toy

from chatmill.errors import DataError, UsageError
from chatmill.rollout.vocabulary import Vocabulary, vocabulary_of
from chatmill.tokenizer import open_tokenizer


class Spaced(Toy):
    def encode(self, text):
        return super().encode(" " + text)


class Lowering(Toy):
    def encode(self, text):
        return super().encode(text.lower())


def test_exact_ids_decode_to_exactly_the_text():
    toy = Toy([b"ab", b"}}"])
    assert Vocabulary(toy).exact(["abc}}}", "", "é"]) == [[toy.token(b"ab"), 99, toy.token(b"}}"), 125], [], [195, 169]]


def test_a_space_added_by_the_tokenizer_is_removed_from_the_first_token_only():
    toy = Spaced([b" ab", b"abc", b"cd"])
    # The first token " ab" becomes "a" and "b", because there is no token "ab"; the other tokens are unchanged.
    assert Vocabulary(toy).exact(["abcd", "x"]) == [[97, 98, toy.token(b"cd")], [120]]


def test_text_that_the_tokenizer_normalizes_is_encoded_with_the_fewest_tokens():
    toy = Lowering([b"Abc", b"A", b"bcd"])
    assert Vocabulary(toy).exact(["Abcd"]) == [[toy.token(b"Abc"), 100]]
    assert Vocabulary(toy).exact(["xyz"]) == [[120, 121, 122]]


def test_text_that_no_tokens_can_represent_is_an_error():
    with pytest.raises(DataError, match='cannot encode "B" exactly'):
        Vocabulary(Lowering([b"b"], whole=False)).exact(["B"])


def test_control_tokens_are_never_used_to_write_text():
    toy = Lowering()
    [ids] = Vocabulary(toy).exact(["<|coord_5|>X"])
    assert ids == list(b"<|coord_5|>X")


def test_part_of_a_character_is_encoded_with_byte_tokens():
    vocabulary = Vocabulary(Toy([b"\xa9}"]))
    assert vocabulary.cut(b"\xa9}") is not None
    assert vocabulary.cut(b"\xa9") == [0xA9]
    assert Vocabulary(Toy([b"{"], whole=False)).cut(b"\xa9") is None


def test_unknown_ids_have_no_bytes():
    vocabulary = Vocabulary(Toy())
    assert vocabulary.pieces([97, 290, -1, 97]) == [b"a", None, None, b"a"]
    assert vocabulary.text([97, 290, 98]) == b"ab"
    assert np.array_equal(vocabulary.starts([97, 300, 98]), [0, 1, 12, 13])


def test_the_error_names_the_coordinates_that_a_tokenizer_lacks():
    plain = open_tokenizer("bytes")
    with pytest.raises(UsageError, match=r"bytes: the vocabulary lacks <\|coord_0\|>"):
        _ = Vocabulary(plain).coordinate_ids
    assert vocabulary_of(plain) is vocabulary_of(plain)


@pytest.mark.parametrize("text", ["}", ', "object_2": {"desc": "', '", "', "}}", "{", "日本", " x"])
def test_a_real_sentencepiece_model_also_encodes_exactly(text):
    path = Path(find_spec("mistral_common").submodule_search_locations[0]) / "data/tokenizer.model.v1"
    tokenizer = open_tokenizer(path)
    [ids] = vocabulary_of(tokenizer).exact([text])
    assert b"".join(map(tokenizer.piece, ids)) == text.encode()
