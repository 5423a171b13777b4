"""Byte-level BPE in C: for the vocabularies that most models have, cut into words by GPT-2's pattern or cl100k's.

A few texts are left to another engine: those with a very long word, or with a rare character. Where the C was not
compiled, or the file is of another kind, there is no such engine.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
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
"""Added to the class of a character that normalizing may change, or join with the one before it."""
KNOWN = 2**17
"""Characters whose class is looked up: those beyond are very rare."""
MOST = 2**22
"""Merges, whose ranks share 32 bits with places in a word."""
GPT2, CL100K = range(2)
_CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS = {_CL100K % r"\p{N}": 1, _CL100K % r"\p{N}{1,3}": 3}


class ByteBpe:
    """The engine of one `tokenizer.json` whose control tokens are out of it; `rest` encodes what it leaves."""

    def __init__(self, encoder: _bpe.Encoder, normalize: Callable[[str], str], rest: Encode) -> None:
        self._encoder, self._normalize, self._rest = encoder, normalize, rest

    def __call__(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        if isinstance(texts, TextColumns):
            found = self._encoder.encode_columns(
                texts.data, texts.start, texts.stop, texts.kind, texts.before, texts.after
            )
        else:
            found = self._encoder.encode(list(texts), False)
        return self._with_rest(found, texts, self._normalized)

    def _normalized(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        normal = [self._normalize(text) for text in texts]
        return self._with_rest(self._encoder.encode(normal, True), texts, self._rest)

    def _with_rest(
        self, found: tuple[bytes, bytes, list[int]], texts: Sequence[str], rest: Encode
    ) -> tuple[Ids, Offsets]:
        """Ids and offsets of all texts: of those that were left out, what `rest` gives for them."""
        ids, offsets, odd = np.frombuffer(found[0], np.uint32), np.frombuffer(found[1], np.int64), found[2]
        if not odd:
            return ids, offsets
        others, start = rest([texts[n] for n in odd])
        pieces: list[NDArray[Any]] = []
        before = 0
        for n, (a, b) in zip(odd, pairwise(start.tolist()), strict=True):
            pieces += [ids[before : offsets[n]], others[a:b]]
            before = int(offsets[n])
        lengths = np.diff(offsets)
        lengths[odd] = np.diff(start)
        return np.concatenate([*pieces, ids[before:]]), np.append(0, np.cumsum(lengths))


def byte_bpe(content: Json, normalize: Callable[[str], str], rest: Encode) -> ByteBpe | None:
    """The engine for a stripped `tokenizer.json`, if it is of the kind."""
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
    # In merges that are written as lines, those that begin so are comments.
    comments = any(isinstance(merge, str) and merge.startswith("#version") for merge in model["merges"])
    if not vocab.keys() >= alphabet.keys() or twice or comments or len(merges) >= MOST:
        return None
    words = [token for token in vocab if alphabet.keys() >= set(token)]
    written = "".join(words).translate({ord(letter): chr(byte) for letter, byte in alphabet.items()})
    encoder = _bpe.Encoder(
        pattern=pattern[0],
        digits=pattern[1],
        whole=bool(model.get("ignore_merges")),
        classes=classes(nfc=normalizer == "NFC"),
        byte_ids=_ids(vocab[letter] for letter in sorted(alphabet, key=alphabet.__getitem__)),
        pairs=_ids(vocab[half] for merge in merges for half in merge),
        into=_ids(vocab[left + right] for left, right in merges),
        vocabulary=written.encode("latin-1"),
        places=np.append(0, np.cumsum([len(word) for word in words])),
        numbers=_ids(vocab[word] for word in words),
    )
    return ByteBpe(encoder, normalize, rest)


def _ids(numbers: Any) -> NDArray[np.uint32]:
    return np.fromiter(numbers, dtype=np.uint32)


def _pattern(section: Any) -> tuple[int, int] | None:
    """Which pattern cuts words, and how many digits it takes at a time."""
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
    """The class of every character as `tokenizers` sees it, and a doubt about those that NFC may change."""
    # A surrogate is no character; it stands for itself here so that places are numbers.
    text = "".join(chr(n) if not 0xD800 <= n < 0xE000 else "\ufffd" for n in range(KNOWN))
    found = np.full(KNOWN, OTHER, dtype=np.uint8)
    for kind, regex in ((LETTER, r"\p{L}+"), (NUMBER, r"\p{N}+"), (SPACE, r"\s+")):
        others = tokenizers.pre_tokenizers.Split(tokenizers.Regex(regex), "removed").pre_tokenize_str(text)
        of_kind = np.ones(KNOWN, dtype=bool)
        for _, (start, stop) in others:
            of_kind[start:stop] = False
        found[of_kind] = kind
    if nfc:
        found[[ord(character) for character in _in_doubt(text)]] += DOUBT
    return found.tobytes()


def _in_doubt(text: str) -> set[str]:
    """Characters that NFC changes, moves, or joins with the one before them."""
    parts = [unicodedata.normalize("NFD", character) for character in text]
    joined = {part for whole in parts for part in whole[1:]}
    jamo = map(chr, [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)])
    changed = {one for one in text if unicodedata.combining(one) or not unicodedata.is_normalized("NFC", one)}
    # Characters that are too new for this Python may be any of these.
    unknown = {one for one in text if unicodedata.category(one) == "Cn"}
    return (joined | changed | unknown | {*jamo}) & {*text}
