"""Hugging Face `tokenizer.json` files, with the fastest engine that gives the ids of `tokenizers`.

compiled      byte-level BPE with the usual patterns: `byte_bpe`
fastokens     most other files
tokenizers    all files
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Collection, Sequence
from functools import cached_property

import fastokens
import msgspec
import numpy as np
import tokenizers

from chatmill.errors import DataError, one_line
from chatmill.tokenizer.backend import PROBE, Ids, Offsets, faults_of, flat
from chatmill.tokenizer.byte_bpe import ByteBpe, Encode, byte_bpe, with_left
from chatmill.tokenizer.isolate_control import Json, byte_alphabet, isolate_control, kinds, vocabulary

LEFT_BY_FASTOKENS = "\u017f\u1e9b\u180e\u212a"
"""Characters at which fastokens may cut words in another way than `tokenizers`, which encodes the texts that have them.

The long s (U+017F, also in U+1E9B) is an s where a pattern ignores case, the Kelvin sign (U+212A) a k; U+180E is a
space in older versions of Unicode. All are very rare.
"""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenizerJson:
    """A loaded `tokenizer.json`, without its special and control tokens, so that text cannot produce them.

    Loading takes a second or two, so load once and fork: `fastokens` and `tokenizers` notice the fork and use no thread
    pool in the child.
    """

    def __init__(self, place: str, raw: bytes, content: Json, *, control: Collection[str]) -> None:
        right = "expected a tokenizer.json as Hugging Face tokenizers writes it"
        with faults_of(place, "no tokenizer.json that can be loaded", right):
            stripped, self.control = isolate_control(place, content, control)
            self._content = msgspec.json.encode(stripped).decode()
            self._slow = tokenizers.Tokenizer.from_str(self._content)
            # The unknown token may be left among the added tokens; written in a text, it is text.
            self._slow.encode_special_tokens = True
            self._added = {token["id"]: token["content"] for token in stripped["added_tokens"]}
            for id, token in self._added.items():
                if self._slow.token_to_id(token) != id:
                    what = f'added token "{one_line(token)}" is listed with id {id}, by its place it has'
                    raise DataError(f"{place}: {what} {self._slow.token_to_id(token)}; {right}")
            self.sha256 = hashlib.sha256(raw).hexdigest()
            self.vocab_size = 1 + max([*vocabulary(stripped).values(), *self.control.values(), *self._added])
            self._decoder = set(kinds(stripped.get("decoder")))
        self._bytes = byte_alphabet()
        self._place, self._fallback_characters = place, 0
        self._encode = self._native(stripped) or self._not_native

    @property
    def engine(self) -> str:
        if isinstance(self._encode, ByteBpe):
            return "compiled"
        return "tokenizers" if self._encode == self._slow_batch else "fastokens"

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        return self._encode(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self._slow.decode(list(ids), skip_special_tokens=False)

    def piece(self, id: int) -> bytes:
        token = self._slow.id_to_token(id)
        if token is None:
            raise KeyError(id)
        if id in self._added:
            return token.encode()
        if "ByteLevel" in self._decoder:
            # A token that is not spelled in the byte alphabet stands for its own characters.
            return bytes(self._bytes[ch] for ch in token) if self._bytes.keys() >= set(token) else token.encode()
        if "ByteFallback" in self._decoder and (byte := _BYTE.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode() if self._decoder & {"Metaspace", "Replace"} else token.encode()

    def _native(self, stripped: Json) -> Encode | None:
        """The engine in C, if it supports the file and agrees on the probe."""
        normalizer = self._slow.normalizer
        try:
            with faults_of(self._place, "a part of the file is of another kind", "another engine reads it"):
                engine = byte_bpe(stripped, normalizer.normalize_str if normalizer else str, self._fallback)
                return engine if engine is not None and self._agrees(engine) else None
        except DataError:
            return None

    def _fallback(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Encode what the engine in C leaves; fastokens is loaded for it only after a megabyte."""
        self._fallback_characters += sum(map(len, texts))
        return self._not_native(texts) if self._fallback_characters > 2**20 else self._slow_batch(texts)

    def _agrees(self, engine: Encode) -> bool:
        sample = range(0, self.vocab_size, max(1, self.vocab_size // 4096))
        probe = [*PROBE, self.decode([id for id in sample if self._slow.id_to_token(id) is not None])]
        (ids, offsets), (right, right_offsets) = engine(probe), self._slow_batch(probe)
        return np.array_equal(ids, right) and np.array_equal(offsets, right_offsets)

    @cached_property
    def _not_native(self) -> Encode:
        """`fastokens` if it loads the file and agrees on the probe; else `tokenizers`, with a warning."""
        place, instead = self._place, "tokenizers encodes instead: the same ids as ever, only slower"
        try:
            with faults_of(place, "fastokens refuses the file", instead):
                fast = self._fast(msgspec.json.decode(self._content))
                agrees = self._agrees(fast)
        except DataError as error:
            message = str(error)
        else:
            if agrees:
                return fast
            message = f"{place}: fastokens gives other ids on a probe; {instead}"
        warnings.warn(message, stacklevel=2)
        return self._slow_batch

    def _fast(self, stripped: Json) -> Encode:
        normalizer = stripped.get("normalizer") or {}
        # fastokens lacks these. Without added tokens a text is normalized as a whole, so that can be done before.
        before = not stripped["added_tokens"] and normalizer.get("type") in ("NFD", "NFKC", "NFKD")
        engine = fastokens.Tokenizer.from_json_str(
            msgspec.json.encode({**stripped, "normalizer": None}).decode() if before else self._content
        )
        normalize = self._slow.normalizer.normalize_str if before and self._slow.normalizer else None

        def encode(texts: Sequence[str]) -> tuple[Ids, Offsets]:
            texts = list(texts)
            unusual = [number for number, text in enumerate(texts) if not text.isascii()]
            left = [number for number in unusual if any(map(texts[number].__contains__, LEFT_BY_FASTOKENS))]
            taken = texts.copy() if left or normalize else texts
            if normalize:
                for number in unusual:
                    taken[number] = normalize(texts[number])
            for number in left:
                taken[number] = ""
            ids, offsets = engine.encode_batch_flat(taken, split_special_tokens=True)
            return with_left((ids, offsets, left), texts, self._slow_batch)

        return encode

    def _slow_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        encodings = self._slow.encode_batch_fast(list(texts), add_special_tokens=False)
        return flat([np.array(encoding.ids, dtype=np.uint32) for encoding in encodings])
