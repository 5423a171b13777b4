from __future__ import annotations

import numpy as np
import pytest
from prepare_fixtures import assert_equal

from chatmill.errors import DataError
from chatmill.format import TurnRenderer, load_format
from chatmill.prepare.staging import Staged, save
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
