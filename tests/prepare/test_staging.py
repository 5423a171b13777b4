from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prepare_fixtures import assert_equal

from chatmill.errors import DataError
from chatmill.format import TurnRenderer, load_format
from chatmill.prepare.staging import ALIGN, Staged, checksum, save
from chatmill.records import Message, Record
from chatmill.rows import EMPTY
from chatmill.tokenizer import open_tokenizer

FORMAT = load_format("chatml")
TOKENIZER = open_tokenizer("bytes", control=FORMAT.tokens)


def some_rows():
    records = [
        Record([Message("user", "a" * size), Message("assistant", "Mühle")], source="s", file="f.jsonl", line=size)
        for size in range(9)
    ]
    return TurnRenderer(FORMAT, TOKENIZER).render(records)


@pytest.mark.parametrize("tokens", ["<u2", "<u4"])
def test_rows_are_read_back_as_saved(tmp_path, tokens):
    rows, record = some_rows(), np.arange(9) * 2
    save(tmp_path / "x", rows, record, tokens=np.dtype(tokens), extra={"records": 18})
    staged = Staged(tmp_path / "x", check=True)
    assert_equal(staged.rows(), rows)
    assert staged.record.tolist() == record.tolist()
    assert staged.extra == {"records": 18}
    assert staged.ids.dtype == tokens
    staged.release()
    assert_equal(staged.rows(), rows)


def test_an_empty_set_of_rows_can_be_saved_and_read(tmp_path):
    save(tmp_path / "x", EMPTY, np.empty(0, dtype=np.int64), tokens=np.dtype("<u2"), extra=None)
    staged = Staged(tmp_path / "x", check=True)
    assert len(staged) == len(staged.rows()) == 0
    staged.rows().check()


@settings(deadline=None)
@given(st.integers(0, 2**17 + 130), st.integers(0, 2**32))
def test_a_checksum_ignores_padding_and_detects_every_changed_word(size, seed):
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, size, dtype=np.uint8) * rng.integers(0, 2, dtype=np.uint8)
    padded = np.zeros(-(-size // ALIGN) * ALIGN, dtype=np.uint8)
    padded[:size] = data
    assert checksum(data) == checksum(padded)
    if size:
        changed = padded.copy()
        at = int(rng.integers(len(padded) // 8)) * 8
        changed[at : at + 8] ^= rng.integers(1, 256, 8, dtype=np.uint8)
        assert checksum(changed) != checksum(padded)


def test_every_flipped_bit_and_every_truncation_is_detected(tmp_path):
    save(tmp_path / "x", some_rows()[:2], np.arange(2), tokens=np.dtype("<u2"), extra={"records": 2})
    data = (tmp_path / "x").read_bytes()
    for at in range(len(data)):
        (tmp_path / "y").write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(DataError, match=r"y: (is not a file of staged rows|staged rows are damaged); build"):
            Staged(tmp_path / "y", check=True)
        (tmp_path / "y").write_bytes(data[:at])
        with pytest.raises(DataError, match="build without --resume"):
            Staged(tmp_path / "y", check=True)
