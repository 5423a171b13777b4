"""Encode text that contains control tokens to the same ids that Hugging Face `tokenizers` returns.

Text tokens, such as `<think>`, are control tokens that are also recognized in the text of messages. In tokenizer.json,
text tokens are added tokens that are not marked as special.

There are two methods. The first splits a text at its control tokens, and encodes each section with the fast engine. The
second encodes the whole text with `tokenizers`, and puts aliases in place of the control tokens. The first method is
used if both methods return the same ids for the probe texts. The second method is always exact and returns the offset
of each token, but is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import tokenizers

from chatmill.tokenizer.backend import PROBE, Ids, Offsets, aliases, faults_of
from chatmill.tokenizer.compiled_cache import cache_key, remembered
from chatmill.tokenizer.isolate_control import Json, isolate_control, kinds
from chatmill.tokenizer.tokenizer import Tokenizer

SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""The Unicode whitespace that added tokens with lstrip or rstrip remove, which differs from Python's whitespace."""
_EXPECTED = "expected a tokenizer.json file in the Hugging Face format"


MAX_COMPARED = 2**9
"""Maximum length of a token that is compared with other tokens. Comparing two tokens takes time that is quadratic in
their length.
"""
UNICODE_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
"""The normalizers that leave ASCII text unchanged."""


class _AddedTokens(msgspec.Struct):
    added_tokens: list[Json] | None = None
    normalizer: Json | None = None


def with_declared(raw: bytes, declared: Iterable[Mapping[str, Any]], ids: Mapping[str, int]) -> bytes:
    """Return the tokenizer.json with the control tokens of tokenizer_config.json and their flags added.

    transformers also adds the tokens of tokenizer_config.json when it opens a tokenizer folder.
    """
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    listed = msgspec.json.decode(raw, type=_AddedTokens).added_tokens or []
    added = {token["content"]: token for token in listed}
    for token in declared:
        if (name := str(token.get("content"))) in ids:
            before = added.get(name, {"id": ids[name], "content": name, "special": False})
            flags = {flag: bool(token.get(flag)) for flag in ("single_word", "lstrip", "rstrip")}
            flags["normalized"] = bool(token.get("normalized", not token.get("special")))
            added[name] = {**before, **flags, "special": bool(before.get("special") or token.get("special"))}
    if (changed := list(added.values())) == listed:
        return raw
    content: Json = msgspec.json.decode(raw)
    return msgspec.json.encode({**content, "added_tokens": changed})


def unmarked_tokens(raw: bytes) -> frozenset[str]:
    """Return the added tokens of a tokenizer.json that are not marked as special."""
    listed = msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"), type=_AddedTokens).added_tokens or []
    return frozenset(token["content"] for token in listed if not token.get("special"))


def any_overlap(tokens: Collection[str], others: Iterable[str]) -> bool:
    """Whether a token in `tokens` can overlap in a text with another token in `tokens` or `others`.

    Two tokens can overlap if one is a substring of the other, or if a suffix of one is a prefix of the other. Which of
    two overlapping tokens matches depends on the surrounding text, so splitting a text at one of them could give wrong
    ids.
    """
    tokens = frozenset(tokens)
    every = tokens.union(others)
    if max(map(len, every), default=0) > MAX_COMPARED:
        return True
    beginnings = {token[:stop] for token in every for stop in range(1, len(token))}
    beginnings_of_tokens = {token[:stop] for token in tokens for stop in range(1, len(token))}
    for token in every:
        parts = {token[start:stop] for start in range(len(token)) for stop in range(start + 1, len(token) + 1)}
        endings = {token[start:] for start in range(1, len(token))}
        if not tokens.isdisjoint(parts - {token}):
            return True
        if not endings.isdisjoint(beginnings if token in tokens else beginnings_of_tokens):
            return True
    return False


class ControlEncoder:
    """Encodes text that contains control tokens, with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, raw: bytes | None, *, text_tokens: Collection[str] = ()) -> None:
        """`raw` is the content of the tokenizer.json. If `raw` is None, texts can be encoded only by sections."""
        self.tokenizer = tokenizer
        self.ids = tokenizer.control_ids
        self.text_tokens = frozenset(text_tokens) if raw is not None else frozenset()
        self.normalized: Callable[[str], str] | None = None
        """Normalizes a text before the search for text tokens, or None if normalization has no effect."""
        self.lstrip: set[str | None] = set()
        self.rstrip: set[str | None] = set()
        """The control tokens that remove whitespace before the token (`lstrip`) and after the token (`rstrip`)."""
        self.by_sections = True
        self._raw = raw = raw.removeprefix(b"\xef\xbb\xbf") if raw is not None else None
        if raw is not None:
            content = msgspec.json.decode(raw, type=_AddedTokens)
            listed = content.added_tokens or []
            added = [token for token in listed if token["content"] in self.ids]
            self.lstrip, self.rstrip = (
                {token["content"] for token in added if token.get(flag)} for flag in ("lstrip", "rstrip")
            )
            # Cache the result of the probe, so that neither engine is loaded only for the probe.
            key = cache_key(raw, "sections", tokenizer.sha256, tokenizer.engine, list(self.ids.items()))
            self.by_sections = not any(token.get("single_word") for token in added) and remembered(
                key, self._sections_agree
            )
            others = [token["content"] for token in listed if token["content"] not in self.ids]
            self.by_sections = self.by_sections and not any_overlap(self.text_tokens, others)
            normalizers = {*kinds(content.normalizer)} - {"Sequence"}
            if normalizers and any(token.get("normalized") for token in added if token["content"] in self.text_tokens):
                self.by_sections = self.by_sections and normalizers <= UNICODE_FORMS
                assert self._reference.normalizer is not None
                self.normalized = self._reference.normalizer.normalize_str

    @property
    def can_encode_whole(self) -> bool:
        return self._raw is not None

    def encode_whole(self, parts: Sequence[str], is_token: Sequence[bool]) -> tuple[Ids, Offsets]:
        """Return the ids of consecutive texts and control tokens, and the character offset of each id.

        Text tokens inside the texts are encoded as single ids.
        """
        return self._whole.encode(parts, is_token)[:2]

    def whole_places(self, parts: Sequence[str], is_token: Sequence[bool]) -> tuple[Ids, Offsets, Offsets]:
        """Like `encode_whole`, but also return the character at which each id ends."""
        return self._whole.encode(parts, is_token)

    def reference(self, text: str) -> list[int] | None:
        """Return the ids that transformers returns for a text that may contain control tokens."""
        return list(self._reference.encode(text, add_special_tokens=False).ids) if self.can_encode_whole else None

    def strip(self, text: str, before: str | None, after: str | None) -> tuple[str, int]:
        """Strip the whitespace that the control tokens before and after the text remove.

        Also return the number of characters removed at the start.
        """
        removed = 0
        if before in self.rstrip:
            removed = len(text) - len(text.lstrip(SPACE))
            text = text[removed:]
        if after in self.lstrip:
            text = text.rstrip(SPACE)
        return text, removed

    def with_stripped(self, token: str, text: str, start: int, stop: int) -> tuple[int, int]:
        """Return the range of a token in a text, including the whitespace that the token removes."""
        if token in self.lstrip:
            start = len(text[:start].rstrip(SPACE))
        if token in self.rstrip:
            stop = len(text) - len(text[stop:].lstrip(SPACE))
        return start, stop

    def is_normal(self, text: str) -> bool:
        """Whether normalization leaves a text unchanged, so that the text can be searched for text tokens directly."""
        return self.normalized is None or text.isascii() or self.normalized(text) == text

    @cached_property
    def normalizes(self) -> bool:
        """Whether the tokenizer normalizes texts; always false if `encode_whole` is available."""
        if self.can_encode_whole:
            return False
        flat, start = self.tokenizer.encode_batch(PROBE)
        size = np.array([len(text.encode()) for text in PROBE])
        _, _, exact = self.tokenizer.positions(flat, start[:-1], start[1:], size=size, offset=size)
        return not exact.all()

    @cached_property
    def _whole(self) -> _WholeEncoder:
        assert self._raw is not None
        with faults_of(self.tokenizer.name, "cannot load the tokenizer.json", _EXPECTED):
            return _WholeEncoder(msgspec.json.decode(self._raw), self.ids, self.text_tokens)

    @cached_property
    def _reference(self) -> tokenizers.Tokenizer:
        """The tokenizer loaded from tokenizer.json, plus the control tokens that other files add."""
        assert self._raw is not None
        with faults_of(self.tokenizer.name, "cannot load the tokenizer.json", _EXPECTED):
            engine = tokenizers.Tokenizer.from_buffer(self._raw)
            engine.no_truncation()
            engine.no_padding()
            missing = [token for token in self.ids if engine.token_to_id(token) is None]
            engine.add_special_tokens(
                [tokenizers.AddedToken(token, special=True, normalized=False) for token in missing]
            )
            return engine

    def _sections_agree(self) -> bool:
        """Test, for some control tokens, whether encoding by sections gives the same ids as encoding as a whole."""
        texts = [text for text in PROBE if not any(token in text for token in self.ids)]
        for number, token in enumerate(list(self.ids)[:: max(1, len(self.ids) // 12)]):
            parts = [texts[(number * 3 + at) % len(texts)] for at in range(5)]
            ids: list[int] = []
            for at, part in enumerate(parts):
                around = (token if at else None, token if at + 1 < len(parts) else None)
                ids += [*([self.ids[token]] if at else []), *self.tokenizer.encode(self.strip(part, *around)[0])]
            if ids != self.reference(token.join(parts)):
                return False
        ids = self.reference("a".join(["", *self.ids, ""])) or []
        control = {*self.ids.values()}
        # Do not encode by sections if a control token does not match inside a text, for example because it is
        # normalized first.
        if [id for id in ids if id in control] != list(self.ids.values()):
            return False
        return all(self.tokenizer.encode(text) == self.reference(text) for text in texts)


class _WholeEncoder:
    """A tokenizer in which every control token except text tokens has an alias that no text can contain."""

    def __init__(self, content: Json, ids: Mapping[str, int], text_tokens: Collection[str]) -> None:
        self._aliases = aliases({token: id for token, id in ids.items() if token not in text_tokens})
        isolated, _ = isolate_control("tokenizer.json", content, list(self._aliases), text_tokens=text_tokens)
        self._engine = tokenizers.Tokenizer.from_str(msgspec.json.encode(isolated).decode())
        self._engine.encode_special_tokens = True
        listed = {token["content"]: token for token in content.get("added_tokens") or []}
        added = []
        for token, alias in self._aliases.items():
            flags = {
                key: bool(listed.get(token, {}).get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized")
            }
            added.append(tokenizers.AddedToken(alias, special=False, **flags))
        self._engine.add_tokens(added)
        vocabulary = self._engine.get_vocab(with_added_tokens=True)
        self._real_ids = np.arange(max(vocabulary.values()) + 1, dtype=np.uint32)
        for token, id in ids.items():
            self._real_ids[vocabulary[self._aliases.get(token, token)]] = id
        self._is_alias = np.zeros(len(self._real_ids), dtype=bool)
        self._is_alias[[vocabulary[alias] for alias in self._aliases.values()]] = True

    def encode(self, parts: Sequence[str], is_token: Sequence[bool]) -> tuple[Ids, Offsets, Offsets]:
        """Return the ids, and the characters at which each token starts and ends."""
        texts = [self._aliases[part] if token else part for part, token in zip(parts, is_token, strict=True)]
        encoding = self._engine.encode("".join(texts), add_special_tokens=False)
        engine_ids = np.array(encoding.ids, dtype=np.int64)
        ranges = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        aliased_start = np.cumsum([0, *map(len, texts)])
        aliases_in_text = self._is_alias[engine_ids]
        if aliases_in_text.sum() < sum(is_token):
            # Encode unmatched control tokens as text, for example a single_word token inside a word.
            tokens = np.flatnonzero(is_token)
            matched = tokens[np.searchsorted(aliased_start[tokens], ranges[aliases_in_text, 0])]
            return self.encode(parts, np.isin(np.arange(len(parts)), matched).tolist())
        begins, ends = ranges[:, 0], ranges[:, 1]
        if len(parts):
            start = np.cumsum([0, *map(len, parts)])
            aliased = np.asarray(is_token, dtype=bool)

            def part_of(character: Offsets) -> Offsets:
                return np.clip(np.searchsorted(aliased_start, character, side="right") - 1, 0, len(parts) - 1)

            part = part_of(begins)
            last = np.where(ends > begins, part_of(ends - 1), part)
            ends = np.where(aliased[last], start[last + 1], start[last] + ends - aliased_start[last])
            begins = start[part] + np.where(aliased[part], 0, begins - aliased_start[part])
        return self._real_ids[engine_ids], begins, ends
