"""The Hugging Face `tokenizers` engine, which reads every tokenizer.json.

All other engines must return the same ids as `tokenizers`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import msgspec
import numpy as np
import tokenizers

from chatmill.errors import DataError, one_line
from chatmill.tokenizer.backend import Ids, Offsets, faults_of, flat
from chatmill.tokenizer.isolate_control import Json, byte_alphabet, isolate_control, kinds, vocabulary

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Reference:
    """A `tokenizer.json` without special and control tokens, so that text cannot produce these tokens."""

    def __init__(self, place: str, stripped: Json, control: dict[str, int]) -> None:
        right = "expected a tokenizer.json file in the Hugging Face format"
        with faults_of(place, "cannot load the tokenizer.json", right):
            self.content = msgspec.json.encode(stripped).decode()
            self._engine = tokenizers.Tokenizer.from_str(self.content)
            # If a text contains the unknown token, encode that token as plain text, because it may be an added token.
            self._engine.encode_special_tokens = True
            self._added = {token["id"]: token["content"] for token in stripped["added_tokens"]}
            for id, token in self._added.items():
                if self._engine.token_to_id(token) != id:
                    what = f'added token "{one_line(token)}" is listed with id {id}, but its position gives id'
                    raise DataError(f"{place}: {what} {self._engine.token_to_id(token)}; {right}")
            self.vocab_size = 1 + max([*vocabulary(stripped).values(), *control.values(), *self._added])
            self._decoder = set(kinds(stripped.get("decoder")))
        self._bytes = byte_alphabet()

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return flat([np.array(encoding.ids, dtype=np.uint32) for encoding in encodings])

    def normalize(self, text: str) -> str:
        normalizer = self._engine.normalizer
        return normalizer.normalize_str(text) if normalizer else text

    def decode(self, ids: Sequence[int]) -> str:
        return self._engine.decode(list(ids), skip_special_tokens=False)

    def has(self, id: int) -> bool:
        return self._engine.id_to_token(id) is not None

    def piece(self, id: int) -> bytes:
        token = self._engine.id_to_token(id)
        if token is None:
            raise KeyError(id)
        if id in self._added:
            return token.encode()
        if "ByteLevel" in self._decoder:
            # A token outside the byte alphabet represents its own characters.
            return bytes(self._bytes[ch] for ch in token) if self._bytes.keys() >= set(token) else token.encode()
        if "ByteFallback" in self._decoder and (byte := _BYTE.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode() if self._decoder & {"Metaspace", "Replace"} else token.encode()


def without_control(place: str, content: Json, control: Collection[str]) -> tuple[Json, dict[str, int]]:
    """Return the content of a tokenizer.json without its control tokens, and the ids of those tokens."""
    right = "expected a tokenizer.json file in the Hugging Face format"
    with faults_of(place, "cannot load the tokenizer.json", right):
        return isolate_control(place, content, control)
