"""Byte-level BPE in C, for tokenizer.json files that split words with the pattern of GPT-2 or of cl100k.

Texts with a very long word or a rare character are left to a fallback engine. There is no such engine where the C was
not compiled, or for other kinds of files.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from chatmill.tokenizer.backend import Ids, Offsets, TextColumns
from chatmill.tokenizer.isolate_control import Json, byte_alphabet, pairs

try:
    from chatmill._native import _bpe
except ImportError:  # pragma: no cover
    _bpe = None  # type: ignore[assignment]

Encode = Callable[[Sequence[str]], tuple[Ids, Offsets]]

LETTER, NUMBER, SPACE, OTHER, UNKNOWN = range(5)
DOUBT = 8
"""Added to the class of a character that normalization may change, or join with the one before it."""
KNOWN = 2**17
"""Code points with a class; those beyond are very rare."""
MAX_MERGES = 2**22
"""Ranks of merges share 32 bits with positions in a word."""
GPT2, CL100K = range(2)
_CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS = {_CL100K % r"\p{N}": 1, _CL100K % r"\p{N}{1,3}": 3}


class ByteBpe:
    """The engine of one `tokenizer.json` without control tokens; `fallback` encodes the texts that it leaves."""

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
        """The bytes that each id stands for; None if one of them is no token of bytes."""
        numbers, places, vocabulary = self._spelling
        at = numbers.searchsorted(ids)
        if not np.array_equal(numbers.take(at, mode="clip"), ids):
            return None
        return [bytes(vocabulary[start:stop]) for start, stop in places[at].tolist()]

    def byte_lengths(self) -> tuple[Ids, NDArray[np.int64]]:
        """All ids, and how many bytes each stands for."""
        return np.frombuffer(self.columns["numbers"], "u4"), np.diff(np.frombuffer(self.columns["places"], "i8"))

    @cached_property
    def _spelling(self) -> tuple[Ids, NDArray[np.int64], memoryview]:
        """The ids in order, and where the bytes of each begin and end in the vocabulary."""
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
    """Ids and offsets of all texts; those that the encoder has left are encoded by `encode_left`."""
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
    """The engine for a `tokenizer.json` without control tokens, or None if it is of another kind."""
    pattern = _pattern(content.get("pre_tokenizer"))
    normalizer = (content.get("normalizer") or {}).get("type")
    if _bpe is None or pattern is None or normalizer not in (None, "NFC") or content["added_tokens"]:
        return None
    model = content["model"]
    if model.get("type") != "BPE" or any(
        model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout")
    ):
        return None
    vocab, alphabet = model["vocab"], byte_alphabet()
    merges = pairs(model["merges"])
    twice = len({tuple(merge) for merge in merges}) < len(merges) or len({*vocab.values()}) < len(vocab)
    # Merges that are lines of text may be comments.
    comments = any(isinstance(merge, str) and merge.startswith("#version") for merge in model["merges"])
    if not vocab.keys() >= alphabet.keys() or twice or comments or len(merges) >= MAX_MERGES:
        return None
    tokens = [token for token in vocab if alphabet.keys() >= set(token)]
    spelled = "".join(tokens).translate({ord(letter): chr(byte) for letter, byte in alphabet.items()})
    return ByteBpe(
        normalize,
        fallback,
        pattern=pattern[0],
        digits=pattern[1],
        whole=bool(model.get("ignore_merges")),
        classes=classes(nfc=normalizer == "NFC"),
        byte_ids=_ids(vocab[letter] for letter in sorted(alphabet, key=alphabet.__getitem__)),
        pairs=_ids(vocab[half] for merge in merges for half in merge),
        into=_ids(vocab[left + right] for left, right in merges),
        vocabulary=spelled.encode("latin-1"),
        places=np.append(0, np.cumsum([len(token) for token in tokens])),
        numbers=_ids(vocab[token] for token in tokens),
    )


def engine_file() -> Path | None:
    """The file of the engine in C, if it was compiled."""
    return Path(_bpe.__file__) if _bpe is not None and _bpe.__file__ else None


def _ids(numbers: Any) -> NDArray[np.uint32]:
    return np.fromiter(numbers, dtype=np.uint32)


def _pattern(section: Any) -> tuple[int, int] | None:
    """Which pattern splits words, and how many digits it takes at a time."""
    match section:
        case {"type": "ByteLevel", "add_prefix_space": False} if section.get("use_regex", True):
            return GPT2, 0
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if regex in _DIGITS:
            return CL100K, _DIGITS[regex]
    return None


@cache
def classes(*, nfc: bool) -> bytes:
    """The class of every character according to `tokenizers`, with DOUBT added to those that NFC may change."""
    # Surrogates are not characters; replaced, so that the position of a character is its number.
    text = "".join(chr(n) if not 0xD800 <= n < 0xE000 else "\ufffd" for n in range(KNOWN))
    kinds = np.full(KNOWN, OTHER, dtype=np.uint8)
    for kind, regex in ((LETTER, r"\p{L}+"), (NUMBER, r"\p{N}+"), (SPACE, r"\s+")):
        others = tokenizers.pre_tokenizers.Split(tokenizers.Regex(regex), "removed").pre_tokenize_str(text)
        of_kind = np.ones(KNOWN, dtype=bool)
        for _, (start, stop) in others:
            of_kind[start:stop] = False
        kinds[of_kind] = kind
    if nfc:
        kinds[[ord(character) for character in _in_doubt(text)]] += DOUBT
    return kinds.tobytes()


def _in_doubt(text: str) -> set[str]:
    """Characters that NFC changes, moves, or joins with the one before them."""
    parts = [unicodedata.normalize("NFD", character) for character in text]
    joined = {part for whole in parts for part in whole[1:]}
    jamo = map(chr, [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)])
    changed = {one for one in text if unicodedata.combining(one) or not unicodedata.is_normalized("NFC", one)}
    # Characters that are too new for this Python may be any of these.
    unknown = {one for one in text if unicodedata.category(one) == "Cn"}
    return (joined | changed | unknown | {*jamo}) & {*text}
