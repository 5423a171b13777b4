"""The split patterns that the C engine supports. A split pattern divides text into words, before BPE merges are applied
within each word.

A pattern is recognized by the exact regular expressions in the `pre_tokenizer` of a tokenizer.json, not by the name of
a model. The engine does not run regular expressions: it has C code for each pattern, and a table of character classes
that is computed with `tokenizers`.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import tokenizers

KNOWN = 2**17
"""Number of code points in the class table. Higher code points are very rare."""
DOUBT = 16
"""This flag is added to the class of a character that normalization may change or join with the previous character."""


class Pattern(IntEnum):
    """The split patterns that the C engine supports. The values must match `_words.h`."""

    GPT2, CL100K, QWEN2, O200K, TEKKEN, DEEPSEEK = range(6)


class Class(IntEnum):
    """Character classes.

    The values must match `_words.h`. Patterns that do not distinguish letter case use LETTER for all letters.
    """

    LETTER, UPPER, LOWER, MARK, NUMBER, SPACE, OTHER, CONTROL, CJK_LETTER, CJK_OTHER, UNKNOWN = range(11)


@dataclass(frozen=True)
class WordSplit:
    """A split pattern, and a regular expression for the characters of each class. All other characters have the class
    `unlisted`.
    """

    pattern: Pattern
    classes: tuple[tuple[Class, str], ...]
    unlisted: Class = Class.OTHER


_COMMON = ((Class.NUMBER, r"\p{N}"), (Class.SPACE, r"\s"))
_LETTERS = ((Class.LETTER, r"\p{L}"), *_COMMON)
_LETTERS_AND_MARKS = ((Class.LETTER, r"[\p{L}\p{M}]"), *_COMMON)
_CASED = (
    (Class.LETTER, r"[\p{Lm}\p{Lo}]"),
    (Class.UPPER, r"[\p{Lu}\p{Lt}]"),
    (Class.LOWER, r"\p{Ll}"),
    (Class.MARK, r"\p{M}"),
    *_COMMON,
)
_CJK = "[一-龥\u3040-ゟ゠-ヿ]"
_DEEPSEEK = (
    *_LETTERS_AND_MARKS,
    (Class.OTHER, r"[\p{P}\p{S}]"),
    (Class.CJK_LETTER, rf"(?=[\p{{L}}\p{{M}}]){_CJK}"),
    (Class.CJK_OTHER, rf"(?=[\p{{P}}\p{{S}}]){_CJK}"),
    (Class.UNKNOWN, rf"(?![\p{{L}}\p{{M}}\p{{P}}\p{{S}}]){_CJK}"),
)

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_OTHERS_AND_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_SPLITS: dict[tuple[str | None, ...], WordSplit] = {
    (_GPT2,): WordSplit(Pattern.GPT2, _LETTERS),
    # GPT-4, Llama 3
    (rf"{_CONTRACTIONS}|{_PREFIX}\p{{L}}+|\p{{N}}{{1,3}}{_OTHERS}",): WordSplit(Pattern.CL100K, _LETTERS),
    # Qwen 2, 2.5 and 3
    (rf"{_CONTRACTIONS}|{_PREFIX}\p{{L}}+|\p{{N}}{_OTHERS}",): WordSplit(Pattern.QWEN2, _LETTERS),
    # Qwen 3.5
    (rf"{_CONTRACTIONS}|{_PREFIX}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}",): WordSplit(
        Pattern.QWEN2, _LETTERS_AND_MARKS
    ),
    # GPT-4o, gpt-oss, Llama 4
    (
        rf"{_PREFIX}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_PREFIX}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}{_OTHERS_AND_SLASHES}",
    ): WordSplit(Pattern.O200K, _CASED),
    # Mistral Nemo and later
    (rf"{_PREFIX}{_UPPER}*{_LOWER}+|{_PREFIX}{_UPPER}+{_LOWER}*|\p{{N}}{_OTHERS_AND_SLASHES}",): WordSplit(
        Pattern.TEKKEN, _CASED
    ),
    # DeepSeek V3 and R1
    (
        r"\p{N}{1,3}",
        f"{_CJK}+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"""
        "\r\n"
        r"""\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["""
        "\r\n]*"
        r"""|\s*["""
        "\r\n"
        r"""]+|\s+(?!\S)|\s+""",
    ): WordSplit(Pattern.DEEPSEEK, _DEEPSEEK, unlisted=Class.CONTROL),
}


def split_of(section: Any) -> WordSplit | None:
    """Return the split pattern of a `pre_tokenizer`, or None if the C engine does not support it."""
    match section:
        case {"type": "ByteLevel", "add_prefix_space": False} if section.get("use_regex", True):
            return _SPLITS[_GPT2,]
        case {
            "type": "Sequence",
            "pretokenizers": [*splits, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}],
        }:
            return _SPLITS.get(tuple(_regex(split) for split in splits))
    return None


def _regex(section: Any) -> str | None:
    match section:
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False}:
            return regex
    return None


@cache
def classes(split: WordSplit, *, nfc: bool) -> bytes:
    """Return the class of every character below `KNOWN`. With `nfc`, DOUBT is added to the class of characters that NFC
    may change.
    """
    # Replace surrogates, which are not characters, so that the position of each character is its code point.
    text = "".join(chr(n) if not 0xD800 <= n < 0xE000 else "\ufffd" for n in range(KNOWN))
    kinds = np.full(KNOWN, split.unlisted, dtype=np.uint8)
    for kind, regex in split.classes:
        others = tokenizers.pre_tokenizers.Split(tokenizers.Regex(f"(?:{regex})+"), "removed").pre_tokenize_str(text)
        of_kind = np.ones(KNOWN, dtype=bool)
        for _, (start, stop) in others:
            of_kind[start:stop] = False
        kinds[of_kind] = kind
    if nfc:
        kinds[[ord(character) for character in _in_doubt(text)]] += DOUBT
    return kinds.tobytes()


def _in_doubt(text: str) -> set[str]:
    """Return the characters that NFC normalization may change, reorder, or combine with the previous character."""
    parts = [unicodedata.normalize("NFD", character) for character in text]
    joined = {part for whole in parts for part in whole[1:]}
    jamo = map(chr, [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)])
    changed = {one for one in text if unicodedata.combining(one) or not unicodedata.is_normalized("NFC", one)}
    # NFC may also change characters that this version of Python does not know yet.
    unknown = {one for one in text if unicodedata.category(one) == "Cn"}
    return (joined | changed | unknown | {*jamo}) & {*text}
