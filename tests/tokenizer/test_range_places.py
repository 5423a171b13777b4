from __future__ import annotations

import random

import numpy as np
import sentencepiece
from range_oracle import expected_weights, random_ranges, random_text
from tokenizer_fixtures import MISTRAL_V3

from chatmill.format.train_ranges import by_byte, char_weights, spelled_places, token_weights
from chatmill.records import Message
from chatmill.tokenizer import Tokenizer, open_tokenizer


def weights_of(tokenizer: Tokenizer, text: str, ranges: list[list]) -> tuple[list[int], list[float], int] | None:
    ids = tokenizer.encode(text)
    places = spelled_places(text, ids, tokenizer)
    if places is None:
        return None
    message = Message("assistant", text, train_ranges=ranges)
    found = token_weights(by_byte(text, char_weights(message)), places)
    own = np.isnan(found.lowest) | (~found.whole & (found.lowest > 0))
    return ids, np.where(own, 1, found.lowest).tolist(), int(found.split.sum())


def test_sentencepiece_with_its_added_space_and_characters_of_several_bytes():
    tokenizer = open_tokenizer(MISTRAL_V3)
    library = sentencepiece.SentencePieceProcessor(model_file=str(MISTRAL_V3))
    rng = random.Random(2)
    for _ in range(120):
        text = random_text(rng).replace("<", "")
        ranges = random_ranges(rng, len(text)) if text else []
        pieces = library.encode(text, return_type="proto").pieces
        # The library counts positions in bytes. If a character is encoded as several byte tokens, the library assigns
        # it to the last of these tokens.
        begins, ends = [piece.begin for piece in pieces], [piece.end for piece in pieces]
        for at in range(len(pieces) - 2, 0, -1):
            if begins[at] == ends[at]:
                ends[at] = ends[at + 1]
        # The space that is added before the text has the weight of the first character.
        if text and begins[0] == ends[0]:
            ends[0] = 1
        starts = np.cumsum([0, *(len(character.encode()) for character in text)]).tolist()
        in_bytes = [[starts[start], starts[stop], weight] for start, stop, weight in ranges]
        offsets = list(zip(begins, ends, strict=True))
        wanted, split = expected_weights(offsets, len(text.encode()), in_bytes, 1, False)
        assert weights_of(tokenizer, text, ranges) == ([piece.id for piece in pieces], wanted, split)
