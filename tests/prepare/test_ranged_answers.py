"""Answers with `train_ranges`: with every truncation mode, the mask leaves out characters that a range excludes.

In these conversations the ranges exclude every x and nothing else, so an x in the mask is an error.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepare_fixtures import Faults, build, digests, job_of, lines, stored_rows

from chatmill.records import Message, Record, unroll_record
from chatmill.rows import Rows, Rule
from chatmill.show.dataset import open_view
from chatmill.show.explain import explain_token
from chatmill.store.reweigh import reweigh_dataset

X, Y = ord("x"), ord("y")
FITS: dict[str, dict[str, Any]] = {
    "windows": {"fit": "windows", "max_tokens": 100},
    "exchanges": {"fit": "exchanges", "max_tokens": 100},
    "turns": {"fit": "turns", "max_tokens": 100},
    "unrolled": {"unroll": True, "pack": 400},
    "blocks": {"format": "post-training", "fit": "blocks", "max_tokens": 120},
}


def answer(rng: random.Random) -> dict[str, Any]:
    text, ranges = "", []
    for _ in range(rng.randrange(1, 6)):
        size = rng.randrange(1, 12)
        ranges.append([len(text), len(text) + size, 0])
        text += "x" * size + "y" * rng.randrange(1, 12)
    return {"role": "assistant", "content": text, "train_ranges": ranges}


def corpus(folder: Path, count: int = 30) -> tuple[str, ...]:
    rng = random.Random(3)
    user = {"role": "user", "content": "q"}
    sizes = [rng.randrange(1, 4) for _ in range(count)]
    records = [{"messages": [turn for _ in range(size) for turn in (user, answer(rng))]} for size in sizes]
    (folder / "chat.jsonl").write_bytes(lines(records))
    return (str(folder / "chat.jsonl"),)


def trained(rows: Rows, character: int) -> int:
    return int(((rows.ids == character) & (rows.weights() > 0)).sum())


@pytest.mark.parametrize("name", FITS)
def test_no_fit_trains_characters_that_a_range_excludes(tmp_path, name):
    inputs = corpus(tmp_path)
    metadata = build(job_of(inputs, **FITS[name]), tmp_path / "one")
    rows = stored_rows(tmp_path / "one", "train")
    assert trained(rows, X) == 0 < (rows.ids == X).sum()
    assert trained(rows, Y) > 0
    in_ranges = rows.per_token(rows.spans["rule"])[(rows.ids == X)]
    assert Rule.RANGE in in_ranges and Rule.ROLE not in in_ranges
    metadata.ledger.check()
    if name == "windows":
        every = Path(inputs[0]).read_text().count("y")
        assert trained(rows, Y) == every
        build(job_of(inputs, **FITS[name]), tmp_path / "two", workers=2)
        assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_reweighing_a_dataset_keeps_its_ranges(tmp_path):
    inputs = corpus(tmp_path)
    for train_on in ("assistant", "last"):
        build(job_of(inputs, train_on=train_on), tmp_path / train_on)
    reweigh_dataset(tmp_path / "assistant", tmp_path / "other", train_on="last")
    other, last = (stored_rows(tmp_path / name, "train") for name in ("other", "last"))
    np.testing.assert_array_equal(other.weights(), last.weights())
    np.testing.assert_array_equal(other.spans, last.spans)
    assert 0 < trained(other, Y) < trained(stored_rows(tmp_path / "assistant", "train"), Y)


def test_the_reason_of_a_token_mentions_the_ranges(tmp_path):
    (tmp_path / "chat.jsonl").write_bytes(
        lines([{"messages": [{"role": "assistant", "content": "xxyy", "train_ranges": [[0, 2, 0]]}]}])
    )
    build(job_of((str(tmp_path / "chat.jsonl"),)), tmp_path / "set")
    view = open_view(tmp_path / "set")
    place = view.row("train", 0).ids.tolist().index(X)
    sentence = explain_token(view, "train", 0, place).sentence
    assert "is context: the train_ranges of the message give these characters weight 0 (rule range)." in sentence


def test_a_record_whose_ranges_cannot_be_read_is_skipped_with_its_reason(tmp_path):
    good, bad = ({"role": "assistant", "content": "xy", "train_ranges": [[0, stop, 0]]} for stop in (1, 3))
    (tmp_path / "chat.jsonl").write_bytes(lines([{"messages": [each]} for each in (bad, good, bad)]))
    faults = Faults()
    build(job_of((str(tmp_path / "chat.jsonl"),), on_error="skip"), tmp_path / "set", on_fault=faults)
    assert faults == [("chat.jsonl", 1, "ranges"), ("chat.jsonl", 3, "ranges")]
    assert len(stored_rows(tmp_path / "set", "train")) == 1


def test_an_answer_trained_only_by_ranges_has_a_row_that_trains_only_the_ranges(tmp_path):
    user = {"role": "user", "content": "q"}
    first = {"role": "assistant", "content": "yyxx", "train_ranges": [[0, 2, 1]]}
    never = {"role": "assistant", "content": "xx", "train": False, "train_ranges": [[0, 1, 0]]}
    last = {"role": "assistant", "content": "y"}
    (tmp_path / "chat.jsonl").write_bytes(lines([{"messages": [user, first, user, never, user, last]}]))
    metadata = build(job_of((str(tmp_path / "chat.jsonl"),), unroll=True, train_on="last"), tmp_path / "set")
    rows = stored_rows(tmp_path / "set", "train")
    shown = [bytes(one.ids[one.mask()].clip(0, 255).astype(np.uint8)) for one in (rows[:1], rows[1:2])]
    assert (len(rows), shown) == (2, [b"yy", b"y\xff"])
    assert metadata.ledger.to_json()["noted"]["answer_without_row"]["rows"] == 1
    messages = [Message("user", "q"), Message("assistant", "yyxx", train_ranges=[[0, 2, 1]])]
    assert unroll_record(Record(messages), "last").answers == [1]
