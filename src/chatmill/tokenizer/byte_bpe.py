"""A byte-level BPE engine in C, for the pre-tokenizer patterns that `split_pattern` supports.

A fallback engine encodes texts with a very long word, a rare character or an added token. The C engine is not used if
it was not compiled or does not support the `tokenizer.json` file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.tokenizer.backend import Ids, Offsets, TextColumns
from chatmill.tokenizer.isolate_control import Json, byte_alphabet, pairs
from chatmill.tokenizer.split_pattern import KNOWN, classes, split_of

try:
    from chatmill._native import _bpe
except ImportError:  # pragma: no cover
    _bpe = None  # type: ignore[assignment]

Encode = Callable[[Sequence[str]], tuple[Ids, Offsets]]

MAX_MERGES = 2**22
"""Maximum number of merges; a merge rank and a position in a word must together fit into 32 bits."""


class ByteBpe:
    """The C engine for one `tokenizer.json` without control tokens.

    `fallback` encodes the texts that the engine skips.
    """

    def __init__(self, normalize: Callable[[str], str], fallback: Encode, **columns: Any) -> None:
        self.columns = columns
        self._encoder, self._normalize, self._fallback = _bpe.Encoder(**columns), normalize, fallback

    def __call__(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        if isinstance(texts, TextColumns):
            encoded = self._encoder.encode_columns(
                texts.data, texts.start, texts.stop, texts.kind, texts.before, texts.after
            )
        else:
            encoded = self._encoder.encode(list(texts), False)
        return with_left(encoded, texts, self._normalized)

    def pieces(self, ids: Sequence[int]) -> list[bytes] | None:
        """Return the bytes of each token id, or None if an id does not belong to a byte-level token."""
        numbers, places, vocabulary = self._spelling
        at = numbers.searchsorted(ids)
        if not np.array_equal(numbers.take(at, mode="clip"), ids):
            return None
        return [bytes(vocabulary[start:stop]) for start, stop in places[at].tolist()]

    def byte_lengths(self) -> tuple[Ids, NDArray[np.int64]]:
        """Return all token ids, and the length of each token in bytes."""
        return np.frombuffer(self.columns["numbers"], "u4"), np.diff(np.frombuffer(self.columns["places"], "i8"))

    @cached_property
    def _spelling(self) -> tuple[Ids, NDArray[np.int64], memoryview]:
        """The sorted token ids, the start and end of each token in the concatenated bytes of all tokens, and these
        bytes.
        """
        numbers, places = (
            np.frombuffer(self.columns[name], kind) for name, kind in (("numbers", "u4"), ("places", "i8"))
        )
        order = np.argsort(numbers)
        return (
            numbers[order],
            np.stack([places[:-1], places[1:]], axis=1)[order],
            memoryview(self.columns["vocabulary"]),
        )

    def _normalized(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        normal = [self._normalize(text) for text in texts]
        return with_left(self._encoder.encode(normal, True), texts, self._fallback)


def with_left(
    encoded: tuple[bytes, bytes, list[int]], texts: Sequence[str], encode_left: Encode
) -> tuple[Ids, Offsets]:
    """Return the ids and offsets of all texts. `encode_left` encodes the texts that the C encoder skipped."""
    ids, offsets, left = np.frombuffer(encoded[0], np.uint32), np.frombuffer(encoded[1], np.int64), encoded[2]
    if not left:
        return ids, offsets
    left_ids, start = encode_left([texts[n] for n in left])
    pieces: list[NDArray[Any]] = []
    before = 0
    for n, (a, b) in zip(left, pairwise(start.tolist()), strict=True):
        pieces += [ids[before : offsets[n]], left_ids[a:b]]
        before = int(offsets[n])
    lengths = np.diff(offsets)
    lengths[left] = np.diff(start)
    return np.concatenate([*pieces, ids[before:]]), np.append(0, np.cumsum(lengths))


def byte_bpe(content: Json, normalize: Callable[[str], str], fallback: Encode) -> ByteBpe | None:
    """Return the engine for a `tokenizer.json` without control tokens, or None if the file is not supported."""
    split = split_of(content.get("pre_tokenizer"))
    normalizer = content.get("normalizer") or {}
    nfc = normalizer.get("type") == "NFC"
    known = nfc or normalizer in ({}, {"type": "Sequence", "normalizers": []})
    added = [token["content"] for token in content["added_tokens"]]
    # Normalization may create or destroy the text of an added token, so NFC with added tokens is not supported.
    if _bpe is None or split is None or not known or (nfc and added):
        return None
    model = content["model"]
    if model.get("type") != "BPE" or any(
        model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout")
    ):
        return None
    vocab, alphabet = model["vocab"], byte_alphabet()
    merges = pairs(model["merges"])
    twice = len({tuple(merge) for merge in merges}) < len(merges) or len({*vocab.values()}) < len(vocab)
    # Old files store merges as lines of text. Files with a comment line are not supported.
    comments = any(isinstance(merge, str) and merge.startswith("#version") for merge in model["merges"])
    if not vocab.keys() >= alphabet.keys() or twice or comments or len(merges) >= MAX_MERGES:
        return None
    tokens = [token for token in vocab if alphabet.keys() >= set(token)]
    spelled = "".join(tokens).translate({ord(letter): chr(byte) for letter, byte in alphabet.items()})
    return ByteBpe(
        normalize,
        fallback,
        pattern=int(split.pattern),
        whole=bool(model.get("ignore_merges")),
        classes=classes(split, nfc=nfc),
        byte_ids=_ids(vocab[letter] for letter in sorted(alphabet, key=alphabet.__getitem__)),
        pairs=_ids(vocab[half] for merge in merges for half in merge),
        into=_ids(vocab[left + right] for left, right in merges),
        vocabulary=spelled.encode("latin-1"),
        places=np.append(0, np.cumsum([len(token) for token in tokens])),
        numbers=_ids(vocab[token] for token in tokens),
        added=_added(added),
    )


def engine_file() -> Path | None:
    """Return the path of the compiled C engine, or None if it is not compiled."""
    return Path(_bpe.__file__) if _bpe is not None and _bpe.__file__ else None


def _added(tokens: Iterable[str]) -> bytes:
    """Return the added tokens for the C encoder, each as one length byte and up to 255 bytes of the token.

    Tokens with a code point of `KNOWN` or above are omitted, because the C encoder skips texts that contain these
    characters.
    """
    written = [token.encode()[:255] for token in tokens if max(map(ord, token)) < KNOWN]
    return b"".join(bytes([len(token)]) + token for token in written)


def _ids(numbers: Any) -> NDArray[np.uint32]:
    return np.fromiter(numbers, dtype=np.uint32)
