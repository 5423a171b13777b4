"""Encode with a Hugging Face `tokenizer.json`, using the fastest engine that returns the same ids as `tokenizers`.

The C engine (`byte_bpe`) supports byte-level BPE with common pre-tokenization patterns, fastokens supports most other
files, and `tokenizers` (`reference`) supports all files.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import tokenizers

from chatmill.errors import DataError
from chatmill.tokenizer.backend import PROBE, Ids, Offsets, faults_of
from chatmill.tokenizer.byte_bpe import ByteBpe, Encode, byte_bpe, with_left
from chatmill.tokenizer.isolate_control import Json, kinds
from chatmill.tokenizer.reference import Reference, without_control

LEFT_BY_FASTOKENS = "\u017f\u1e9b\u180e\u212a"
"""Characters at which fastokens may split words differently from `tokenizers`.

Texts with one of these characters are encoded by `tokenizers`.

The long s (U+017F, also in U+1E9B) matches s if a pattern ignores case, and the Kelvin sign (U+212A) matches k. U+180E
is a space in older versions of Unicode. All characters in this string are very rare.
"""


@dataclass(frozen=True)
class Compiled:
    """A `tokenizer.json` compiled for the C engine, which returned the same ids as `tokenizers` for all probe texts."""

    control: dict[str, int]
    vocab_size: int
    nfc: bool
    """Whether texts are normalized to NFC."""
    byte_decoder: bool
    """Whether the decoder only joins the bytes of tokens."""
    columns: dict[str, Any]
    """The arguments of the C engine, which are numbers and buffers."""


class TokenizerJson:
    """A loaded `tokenizer.json` without special and control tokens, so that text cannot produce these tokens.

    Loading takes a second or two, so load the file before forking. Loading a `Compiled` file takes a tenth of a second;
    `tokenizers` then loads the tokenizer.json only if the C engine cannot encode a text.
    """

    def __init__(self, place: str, raw: bytes, content: Json | Compiled, *, control: Collection[str]) -> None:
        self._place, self._raw, self._control_given = place, raw, frozenset(control)
        self.sha256 = hashlib.sha256(raw).hexdigest()
        self._fallback_characters = 0
        if isinstance(content, Compiled):
            self.control, self.vocab_size = content.control, content.vocab_size
            self._nfc, self._byte_decoder = content.nfc, content.byte_decoder
            normalize = tokenizers.normalizers.NFC().normalize_str if content.nfc else str
            self._encode: Encode = ByteBpe(normalize, self._fallback, **content.columns)
            return
        stripped, self.control = without_control(place, content, control)
        self._reference = Reference(place, stripped, self.control)
        self.vocab_size = self._reference.vocab_size
        self._nfc = [*kinds(stripped.get("normalizer"))] == ["NFC"]
        self._byte_decoder = [*kinds(stripped.get("decoder"))] == ["ByteLevel"] and not stripped["added_tokens"]
        self._encode = self._native(stripped) or self._not_native

    @property
    def engine(self) -> str:
        if isinstance(self._encode, ByteBpe):
            return "compiled"
        return "tokenizers" if self._encode == self._slow_batch else "fastokens"

    def compiled(self) -> Compiled | None:
        """Return the compiled tokenizer, which loads faster than the file, or None if the C engine is not used."""
        if not isinstance(self._encode, ByteBpe):
            return None
        columns = dict(self._encode.columns)
        return Compiled(self.control, self.vocab_size, self._nfc, self._byte_decoder, columns)

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        return self._encode(texts)

    def decode(self, ids: Sequence[int]) -> str:
        pieces = self._pieces(ids)
        return self._reference.decode(ids) if pieces is None else b"".join(pieces).decode("utf-8", "replace")

    def piece(self, id: int) -> bytes:
        pieces = self._pieces([id])
        return self._reference.piece(id) if pieces is None else pieces[0]

    def byte_lengths(self) -> tuple[Ids, Offsets]:
        """Return the token ids with a known length in bytes, and these lengths."""
        if self._byte_decoder and isinstance(self._encode, ByteBpe):
            return self._encode.byte_lengths()
        return np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64)

    def _pieces(self, ids: Sequence[int]) -> list[bytes] | None:
        """Return the bytes of each token id, or None if only `tokenizers` can decode the ids."""
        return self._encode.pieces(ids) if self._byte_decoder and isinstance(self._encode, ByteBpe) else None

    @cached_property
    def _reference(self) -> Reference:
        content = msgspec.json.decode(self._raw.removeprefix(b"\xef\xbb\xbf"))
        return Reference(self._place, *without_control(self._place, content, self._control_given))

    def _native(self, stripped: Json) -> Encode | None:
        """Return the C engine, or None if it does not support the file or differs from `tokenizers` on probe texts."""
        try:
            with faults_of(self._place, "the file has an unexpected part", "another engine will read the file"):
                engine = byte_bpe(stripped, self._reference.normalize, self._fallback)
                return engine if engine is not None and self._agrees(engine) else None
        except DataError:
            return None

    def _fallback(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Encode texts that the C engine does not support, with fastokens if there are more than a million characters
        of these texts in total, otherwise with `tokenizers`.
        """
        self._fallback_characters += sum(map(len, texts))
        return self._not_native(texts) if self._fallback_characters > 2**20 else self._slow_batch(texts)

    def _agrees(self, engine: Encode) -> bool:
        sample = range(0, self.vocab_size, max(1, self.vocab_size // 4096))
        probe = [*PROBE, self._reference.decode([id for id in sample if self._reference.has(id)])]
        (ids, offsets), (right, right_offsets) = engine(probe), self._slow_batch(probe)
        return np.array_equal(ids, right) and np.array_equal(offsets, right_offsets)

    @cached_property
    def _not_native(self) -> Encode:
        """Return `fastokens` if its ids for all probe texts are right; otherwise warn and return `tokenizers`."""
        place, instead = self._place, "using tokenizers instead, which is slower"
        try:
            with faults_of(place, "fastokens cannot load the file", instead):
                fast = self._fast(msgspec.json.decode(self._reference.content))
                agrees = self._agrees(fast)
        except DataError as error:
            message = str(error)
        else:
            if agrees:
                return fast
            message = f"{place}: fastokens does not return the same ids as tokenizers for a probe text; {instead}"
        warnings.warn(message, stacklevel=2)
        return self._slow_batch

    def _fast(self, stripped: Json) -> Encode:
        # Import fastokens here, because it is not needed if the C engine encodes all texts.
        import fastokens

        normalizer = stripped.get("normalizer") or {}
        # fastokens does not support NFD, NFKC or NFKD. Without added tokens, a text is normalized as a whole, so it can
        # be normalized before encoding.
        before = not stripped["added_tokens"] and normalizer.get("type") in ("NFD", "NFKC", "NFKD")
        content = self._reference.content
        engine = fastokens.Tokenizer.from_json_str(
            msgspec.json.encode({**stripped, "normalizer": None}).decode() if before else content
        )

        def encode(texts: Sequence[str]) -> tuple[Ids, Offsets]:
            texts = list(texts)
            unusual = [number for number, text in enumerate(texts) if not text.isascii()]
            left = [number for number in unusual if any(map(texts[number].__contains__, LEFT_BY_FASTOKENS))]
            taken = texts.copy() if left or before else texts
            if before:
                for number in unusual:
                    taken[number] = self._reference.normalize(texts[number])
            for number in left:
                taken[number] = ""
            ids, offsets = engine.encode_batch_flat(taken, split_special_tokens=True)
            return with_left((ids, offsets, left), texts, self._slow_batch)

        return encode

    def _slow_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        return self._reference.encode_batch(texts)
