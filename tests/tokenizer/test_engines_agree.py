"""The fast engines and `tokenizers` give the same ids, on five megabytes of everything."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizer_fixtures import ANTHROPIC, DEEPSEEK, MARKERS, mixed_texts

from chatmill.tokenizer import open_tokenizer


@pytest.fixture(scope="module")
def texts() -> list[str]:
    texts = mixed_texts(1, 5_000_000)
    assert sum(len(text.encode()) for text in texts) >= 5_000_000
    assert all(marker in "".join(texts) for marker in MARKERS)
    return texts


@pytest.mark.parametrize(
    ("name", "compiled"), [("trained", True), ("trained", False), ("deepseek", False), ("anthropic", False)]
)
def test_the_fast_engine_and_tokenizers_give_equal_ids(name, compiled, texts, trained_json, monkeypatch):
    path: Path = {"trained": trained_json, "deepseek": DEEPSEEK, "anthropic": ANTHROPIC}[name]
    if not compiled:
        # Without a warning (an error in these tests) the engine is fastokens then.
        monkeypatch.setattr("chatmill.tokenizer.byte_bpe._bpe", None)
    ids, offsets = open_tokenizer(path).encode_batch(texts)

    content = json.loads(path.read_text())
    for token in content["added_tokens"]:
        # deepseek lists some markers as plain tokens, which would match text in the peer.
        token["special"] = True
    peer = tokenizers.Tokenizer.from_str(json.dumps(content))
    peer.encode_special_tokens = True
    encodings = peer.encode_batch_fast(texts, add_special_tokens=False)
    assert np.array_equal(ids, np.concatenate([encoding.ids for encoding in encodings]))
    assert np.array_equal(offsets, np.cumsum([0, *(len(encoding.ids) for encoding in encodings)]))
