"""Texts with control tokens in them, to the ids that the tokenizer of Hugging Face gives for the whole.

There are two ways. By sections: what stands between two control tokens is encoded alone, by the quick engine. As a
whole: `tokenizers` encodes all of it at once, with names in place of the control tokens that no text can hold.
The first is used where it gives the same ids on a probe; the second always does, and knows where each token begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
import tokenizers

from chatmill.tokenizer.backend import Ids, Offsets, aliases, faults_of
from chatmill.tokenizer.isolate_control import Json, strip
from chatmill.tokenizer.probe import PROBE
from chatmill.tokenizer.token_positions import token_positions
from chatmill.tokenizer.tokenizer import Tokenizer

SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""What a control token that eats space eats: Unicode's white space, which is not quite Python's."""


class StripFlags(NamedTuple):
    """Whether a control token swallows the space on its sides."""

    left: bool = False
    right: bool = False


class _Added(msgspec.Struct):
    """Of a tokenizer.json, the tokens that were added to its model."""

    added_tokens: list[Json] | None = None


class ControlEncoder:
    """The encoder of one tokenizer for texts with control tokens in them."""

    def __init__(self, tokenizer: Tokenizer, raw: bytes | None) -> None:
        """`raw` is the tokenizer.json, where there is one: only then is there a whole to compare with."""
        self.tokenizer = tokenizer
        self.ids = tokenizer.control_ids
        self.appetite: Mapping[str, StripFlags] = {}
        self._raw = raw = raw.removeprefix(b"\xef\xbb\xbf") if raw is not None else None
        self.by_sections = True
        if raw is not None:
            content = msgspec.json.decode(raw, type=_Added)
            added = [token for token in content.added_tokens or [] if token["content"] in self.ids]
            self.appetite = {
                token["content"]: StripFlags(bool(token.get("lstrip")), bool(token.get("rstrip")))
                for token in added
                if token.get("lstrip") or token.get("rstrip")
            }
            by_words = any(token.get("single_word") for token in added)
            self.by_sections = not by_words and self._agrees()

    def encode_sections(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Texts without control tokens, each alone; whatever they hold, none comes out."""
        return self.tokenizer.encode_batch(texts)

    @property
    def knows_whole(self) -> bool:
        return self._raw is not None

    @cached_property
    def _whole(self) -> _Whole:
        assert self._raw is not None
        with faults_of(self.tokenizer.name, "no tokenizer.json that can be loaded", _RIGHT):
            return _Whole(msgspec.json.decode(self._raw), self.ids)

    @cached_property
    def _reference(self) -> tokenizers.Tokenizer:
        assert self._raw is not None
        with faults_of(self.tokenizer.name, "no tokenizer.json that can be loaded", _RIGHT):
            return _reference(self._raw, self.ids)

    def encode_whole(self, parts: Sequence[str], is_token: Sequence[bool]) -> tuple[Ids, Offsets]:
        """Ids of the parts one after the other, tokens and texts, and the character at which each id begins."""
        return self._whole.encode(parts, is_token)

    def reference(self, text: str) -> list[int] | None:
        """The ids of a whole text, its control tokens found in it: what transformers gives."""
        return list(self._reference.encode(text, add_special_tokens=False).ids) if self.knows_whole else None

    @cached_property
    def rewrites(self) -> bool:
        """Whether a text may become tokens of other bytes, so that their borders in it cannot be told."""
        if self.knows_whole:
            return False
        flat, start = self.tokenizer.encode_batch(PROBE)
        size = np.array([len(text.encode()) for text in PROBE])
        borders = token_positions(self.tokenizer.byte_lengths(flat), start[:-1], start[1:], size=size, offset=size)
        return not borders.exact.all()

    def feed(self, text: str, before: str | None, after: str | None) -> tuple[str, int]:
        """What control tokens on its sides leave of a text, and how many characters went at its beginning."""
        eaten = 0
        if before is not None and self.appetite.get(before, _NONE).right:
            rest = text.lstrip(SPACE)
            eaten, text = len(text) - len(rest), rest
        if after is not None and self.appetite.get(after, _NONE).left:
            text = text.rstrip(SPACE)
        return text, eaten

    def _agrees(self) -> bool:
        """Whether sections give the ids of the whole, on texts around every few control tokens."""
        texts = [text for text in PROBE if not any(token in text for token in self.ids)]
        for number, token in enumerate(list(self.ids)[:: max(1, len(self.ids) // 12)]):
            parts = [texts[(number * 3 + at) % len(texts)] for at in range(5)]
            ids: list[int] = []
            for at, part in enumerate(parts):
                around = (token if at else None, token if at + 1 < len(parts) else None)
                ids += [*([self.ids[token]] if at else []), *self.tokenizer.encode(self.feed(part, *around)[0])]
            if ids != self.reference(token.join(parts)):
                return False
        return all(self.tokenizer.encode(text) == self.reference(text) for text in texts)


_NONE = StripFlags()
_RIGHT = "expected a tokenizer.json as Hugging Face tokenizers writes it"


class _Whole:
    """A tokenizer in which every control token has a name that no text can hold."""

    def __init__(self, content: Json, ids: Mapping[str, int]) -> None:
        self._names = aliases(ids)
        stripped, _ = strip("tokenizer.json", content, list(ids))
        self._engine = tokenizers.Tokenizer.from_str(msgspec.json.encode(stripped).decode())
        self._engine.encode_special_tokens = True
        flags = {token["content"]: token for token in content.get("added_tokens") or []}
        added = []
        for token, name in self._names.items():
            of = flags.get(token, {})
            words = {key: bool(of.get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized")}
            added.append(tokenizers.AddedToken(name, special=False, **words))
        self._engine.add_tokens(added)
        vocabulary = self._engine.get_vocab(with_added_tokens=True)
        self._real = np.arange(max(vocabulary.values()) + 1, dtype=np.uint32)
        for token, name in self._names.items():
            self._real[vocabulary[name]] = ids[token]

    def encode(self, parts: Sequence[str], is_token: Sequence[bool]) -> tuple[Ids, Offsets]:
        named = [self._names[part] if token else part for part, token in zip(parts, is_token, strict=True)]
        encoding = self._engine.encode("".join(named), add_special_tokens=False)
        begins = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        named_start = np.cumsum([0, *map(len, named)])
        start = np.cumsum([0, *map(len, parts)])
        part = np.clip(np.searchsorted(named_start, begins, side="right") - 1, 0, max(0, len(parts) - 1))
        inside = (
            np.where(np.asarray(is_token, dtype=bool)[part], 0, begins - named_start[part]) if len(parts) else begins
        )
        return self._real[np.array(encoding.ids, dtype=np.int64)], start[part] + inside


def _reference(raw: bytes, ids: Mapping[str, int]) -> tokenizers.Tokenizer:
    """The tokenizer as its file has it, with the control tokens that other files add."""
    engine = tokenizers.Tokenizer.from_buffer(raw)
    engine.no_truncation()
    engine.no_padding()
    missing = [token for token in ids if engine.token_to_id(token) is None]
    engine.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in missing])
    return engine
