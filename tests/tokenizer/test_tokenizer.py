from __future__ import annotations

import hashlib

import numpy as np
import pytest

from chatmill.errors import DataError
from chatmill.tokenizer.backend import flat
from chatmill.tokenizer.tokenizer import Tokenizer


class Leaky:
    """The id of every character is its code point, so that text can produce the ids of control tokens."""

    engine = "fixed"
    vocab_size = 128
    sha256 = hashlib.sha256(b"leaky").hexdigest()

    def __init__(self, control: dict[str, int]) -> None:
        self.control = control

    def encode_batch(self, texts):
        return flat([np.array([ord(ch) for ch in text], dtype=np.uint32) for text in texts])

    def decode(self, ids):
        return "".join(map(chr, ids))

    def piece(self, id):
        return chr(id).encode()


@pytest.mark.parametrize(
    "ids",
    [[0], [0, 1, 2], [10, 11, 127], [127], list(range(0, 128, 2)), list(range(0, 60, 3))],
    ids=["first", "run", "runs", "last", "many", "some"],
)
def test_every_control_id_is_caught_and_no_other(ids):
    control = {f"<|{id}|>": id for id in ids}
    tokenizer = Tokenizer(Leaky(control), name="leaky", control={})
    for id in range(128):
        if id in ids:
            with pytest.raises(DataError, match=rf"text 1 of the batch was encoded as the control token <\|{id}\|>"):
                tokenizer.encode_batch(["", f"{chr(id)}"])
        else:
            assert tokenizer.encode(chr(id)) == [id]
