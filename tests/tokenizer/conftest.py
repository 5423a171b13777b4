from __future__ import annotations

from pathlib import Path

import pytest
from tokenizer_fixtures import PRIMER, sentencepiece_bytes, training_texts

from chatmill.tokenizer import train_bpe


@pytest.fixture(scope="session")
def trained() -> bytes:
    return train_bpe(training_texts(), vocab_size=1000, control=list(PRIMER.values()))


@pytest.fixture(scope="session")
def trained_json(trained: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    path.write_bytes(trained)
    return path


@pytest.fixture(scope="session")
def trained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "small.model"
    path.write_bytes(sentencepiece_bytes("bpe", control_symbols=list(PRIMER.values())))
    return path


@pytest.fixture(scope="session")
def folder(trained: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "folder"
    path.mkdir()
    (path / "tokenizer.json").write_bytes(trained)
    (path / "tokenizer_config.json").write_text(
        '{"added_tokens_decoder": {"0": {"content": "<|sys|>", "special": true}}}'
    )
    return path
