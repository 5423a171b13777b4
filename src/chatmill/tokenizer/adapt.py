"""Adapters for `tokenizers` and `transformers` tokenizers, so that chatmill's public functions accept them.

A fast tokenizer is serialized to JSON and opened like a tokenizer.json file. A slow tokenizer is called directly, and
its ids are checked, because text must not be encoded as a control token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from chatmill.errors import DataError, one_line
from chatmill.tokenizer.backend import TextTokenizer, faults_of
from chatmill.tokenizer.tokenizer import Tokenizer

_EXPECTED = (
    "expected a tokenizer from chatmill, tokenizers or transformers, or an object with encode and special_token_ids"
)
_MAX_OPENED = 8
_opened: OrderedDict[tuple[Any, ...], tuple[Any, Tokenizer]] = OrderedDict()
"""A cache of opened tokenizers, because opening a tokenizer takes about a second.

The cache keeps the original objects alive, so that no other object gets the same `id`.
"""


def text_tokenizer(tokenizer: Any, *families: Mapping[str, str]) -> TextTokenizer:
    """Return an object with the methods `encode` and `special_token_ids` for a tokenizer from any library.

    Each mapping in `families` maps names to control tokens. The first mapping whose tokens are all in the vocabulary is
    used.
    """
    if _has(tokenizer, "encode", "special_token_ids"):
        of_chatmill: TextTokenizer = tokenizer
        return of_chatmill
    name = type(tokenizer).__name__
    engine = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if _has(engine, "to_str", "get_vocab_size", "token_to_id"):
        control = _known({token for family in families for token in family.values()}, engine.token_to_id)
        return _opened_engine(name, engine, _family(name, families, control))
    if _has(tokenizer, "encode", "get_vocab", "convert_tokens_to_ids"):
        return _SlowTokenizer(name, tokenizer, _family(name, families, tokenizer.get_vocab()))
    missing = [method for method in ("encode", "special_token_ids") if not _has(tokenizer, method)]
    raise DataError(f"the tokenizer, a {name}, has no method {' and no '.join(missing)}; {_EXPECTED}")


def _has(tokenizer: Any, *methods: str) -> bool:
    return all(callable(getattr(tokenizer, method, None)) for method in methods)


def _known(tokens: set[str], token_to_id: Any) -> dict[str, int]:
    return {token: id for token in tokens if (id := token_to_id(token)) is not None}


def _family(name: str, families: tuple[Mapping[str, str], ...], known: Mapping[str, int]) -> dict[str, str]:
    for family in families:
        if all(token in known for token in family.values()):
            return dict(family)
    missing = [token for token in families[0].values() if token not in known]
    raise DataError(f"the tokenizer, a {name}, lacks {', '.join(missing)}; add the missing tokens as special tokens")


def _opened_engine(name: str, engine: Any, control: dict[str, str]) -> Tokenizer:
    """Convert a `tokenizers.Tokenizer` to a chatmill tokenizer. The result is cached until the tokenizer changes."""
    # Import the module here, because the import is slow.
    from chatmill.tokenizer.tokenizer_json import TokenizerJson

    parts = (repr(engine.normalizer), repr(engine.pre_tokenizer))
    key = (id(engine), engine.get_vocab_size(), *parts, *control.values())
    if key not in _opened:
        with faults_of(name, "the tokenizer cannot be written as JSON", "use a tokenizer without Python components"):
            raw = engine.to_str().encode()
        backend = TokenizerJson(name, raw, msgspec.json.decode(raw), control=control.values())
        _opened[key] = engine, Tokenizer(backend, name=name, control=control)
        if len(_opened) > _MAX_OPENED:
            _opened.popitem(last=False)
    return _opened[key][1]


class _SlowTokenizer:
    """Adapter for a slow (pure Python) transformers tokenizer."""

    def __init__(self, name: str, tokenizer: Any, control: Mapping[str, str]) -> None:
        self._name, self._tokenizer = name, tokenizer
        vocab = tokenizer.get_vocab()
        self._special = {key: int(vocab[token]) for key, token in control.items()}
        unknown = getattr(tokenizer, "unk_token_id", None)
        self._never = {*self._special.values(), *getattr(tokenizer, "all_special_ids", ())} - {unknown}

    def special_token_ids(self) -> dict[str, int]:
        return dict(self._special)

    def encode(self, text: str) -> list[int]:
        with faults_of(self._name, "a text could not be encoded", "remove the text"):
            ids = list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
            if not self._never.isdisjoint(ids) and _has(self._tokenizer, "_tokenize"):
                # Encode again without special tokens, because slow tokenizers may match a special token in a text.
                ids = list(self._tokenizer.convert_tokens_to_ids(self._tokenizer._tokenize(text)))
        if not self._never.isdisjoint(ids):
            what = f'the tokenizer, a {self._name}, encodes the text "{one_line(text, 60)}" as a control token'
            raise DataError(f"{what}; use a fast tokenizer, or remove the text")
        return ids
