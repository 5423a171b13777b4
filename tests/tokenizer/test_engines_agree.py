from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_fixtures import (
    ANTHROPIC,
    DEEPSEEK,
    MARKERS,
    PATTERNS,
    mixed_texts,
    pre_tokenizer_of,
    tokenizer_of_pairs,
)

from chatmill.tokenizer import open_tokenizer, tokenizer_json
from chatmill.tokenizer.backend import FOLDING, PROBE
from chatmill.tokenizer.tokenizer_json import TokenizerJson


@pytest.fixture(scope="module")
def texts() -> list[str]:
    texts = mixed_texts(1, 2_000_000)
    assert sum(len(text.encode()) for text in texts) >= 2_000_000
    assert all(marker in "".join(texts) for marker in MARKERS)
    return texts


@pytest.mark.parametrize(
    ("name", "compiled"),
    [("trained", True), ("trained", False), ("deepseek", True), ("deepseek", False), ("anthropic", False)],
)
def test_the_fast_engine_and_tokenizers_give_equal_ids(name, compiled, texts, trained_json, monkeypatch):
    path: Path = {"trained": trained_json, "deepseek": DEEPSEEK, "anthropic": ANTHROPIC}[name]
    if not compiled:
        # Without the compiled engine, fastokens is used. A fallback to `tokenizers` would warn, and warnings are errors
        # here.
        monkeypatch.setattr("chatmill.tokenizer.byte_bpe._bpe", None)
    ids, offsets = open_tokenizer(path).encode_batch(texts)

    right_ids, right_offsets = ids_of_tokenizers(path, tuple(texts))
    assert np.array_equal(ids, right_ids)
    assert np.array_equal(offsets, right_offsets)


@cache
def ids_of_tokenizers(path: Path, texts: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    content = json.loads(path.read_text())
    for token in content["added_tokens"]:
        # DeepSeek lists some markers as tokens that are not special; `tokenizers` would find them in the texts.
        token["special"] = True
    peer = tokenizers.Tokenizer.from_str(json.dumps(content))
    peer.encode_special_tokens = True
    encodings = peer.encode_batch_fast(texts, add_special_tokens=False)
    return np.concatenate([one.ids for one in encodings]), np.cumsum([0, *(len(one.ids) for one in encodings)])


@pytest.fixture(scope="module", params=["o200k", "unusual"])
def pairs(request: pytest.FixtureRequest) -> TokenizerJson:
    raw = tokenizer_of_pairs(pre_tokenizer_of(PATTERNS[request.param]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chatmill.tokenizer.byte_bpe._bpe", None)
        backend = TokenizerJson(request.param, raw, json.loads(raw), control=[])
    assert backend.engine == "fastokens"
    return backend


def assert_equal_ids(backend: TokenizerJson, texts: list[str]) -> None:
    for one, other in zip(backend.encode_batch(texts), backend._slow_batch(texts), strict=True):
        assert one.tolist() == other.tolist()


def test_letters_that_fold_to_ascii_are_encoded_like_in_tokenizers(pairs):
    # For the first two texts, the ids of fastokens itself differ from those of `tokenizers`.
    assert_equal_ids(pairs, ["a'\u017f'se", "\n\u180e.", "plain", *PROBE, "", "'\u017ft", "plain"])


@given(texts=st.lists(st.text(st.sampled_from([*"aAsStTrReE'lL1 \n.", *FOLDING, "\u180e", "\u1e9b"])), max_size=5))
def test_any_text_of_letters_that_fold_is_encoded_like_in_tokenizers(pairs, texts):
    assert_equal_ids(pairs, texts)


def test_without_its_exceptions_fastokens_fails_the_probe(pairs, monkeypatch):
    monkeypatch.setattr(tokenizer_json, "LEFT_BY_FASTOKENS", "")
    assert not pairs._agrees(pairs._fast(json.loads(pairs._reference.content)))


def test_the_probe_has_every_character_that_folds_to_ascii():
    letters = map(chr, range(128, 0x20000))
    forms = (str.lower, str.upper, str.title, str.casefold)
    assert "".join(one for one in letters if any(any(map(str.isascii, form(one))) for form in forms)) == FOLDING
