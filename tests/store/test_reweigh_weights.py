"""`reweigh` keeps the weights of records, messages and ranges, or raises an error. The expected weights are computed
from the records.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

from chatmill.errors import UsageError
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.rows import Role, Rows, Rule, TrainOn
from chatmill.store import reweigh as module
from chatmill.store.read import open_dataset
from chatmill.store.reweigh import reweigh_dataset
from chatmill.store.verify import verify_dataset

FITS: dict[str, dict[str, Any]] = {
    "whole": {},
    "packed": {"pack": 300},
    "turns": {"fit": "turns", "max_tokens": 90},
    "windows": {"fit": "windows", "max_tokens": 90},
    "blocks": {"fit": "blocks", "max_tokens": 70, "format": "post-training"},
}


def some_record(rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for number in range(rng.randint(1, 3)):
        answer = {"role": "assistant", "content": f"an answer {number}"}
        own = ({}, {}, {"train": False}, {"weight": 2}, {"train_ranges": [[0, 2, 0.5]]})
        messages += [{"role": "user", "content": f"question {number}"}, {**answer, **rng.choice(own)}]
    return {"messages": messages, **rng.choice(({}, {"weight": 0.5}, {"weight": 3}))}


def prepared(folder: Path, records: list[dict[str, Any]], train_on: str = "assistant", **job: Any) -> Path:
    chats = folder / "chat.jsonl"
    chats.write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare_dataset(Job((InputSource((str(chats),)),), train_on=train_on, **job), folder / "v1")
    return folder / "v1"


def stored(path: Path) -> Rows:
    episodes = open_dataset(path)["train"]
    return episodes.rows(np.arange(len(episodes)))


def by_role(rows: Rows) -> list[tuple[int, list[tuple[int, float]]]]:
    """Return the line number of each conversation, and the message index and weight of each span with the rule ROLE."""
    spans = [rows.spans[start:stop] for start, stop in zip(rows.first_span, rows.first_span[1:], strict=False)]
    return [
        (int(line), [(int(span["message"]), float(span["weight"])) for span in part if span["rule"] == Rule.ROLE])
        for line, part in zip(rows.origins["line"], spans, strict=True)
    ]


@pytest.mark.parametrize("fit", FITS)
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32), chunk=st.integers(1, 9), choices=st.tuples(*[st.sampled_from(get_args(TrainOn))] * 2)
)
def test_trained_tokens_have_the_weight_of_their_record_or_reweighing_is_refused(
    tmp_path_factory, fit, seed, chunk, choices
):
    before, after = choices
    folder = tmp_path_factory.mktemp("weights")
    rng = random.Random(seed)
    records = [some_record(rng) for _ in range(rng.randint(1, 12))]
    source = prepared(folder, [*records, {"messages": [{"role": "user", "content": "hi"}, YES]}], before, **FITS[fit])
    old = stored(source)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "SEGMENTS", chunk)
            reweigh_dataset(source, folder / "v2", train_on=after)
    except UsageError as refused:
        assert not (folder / "v2").exists()
        if "its rows are parts of conversations" not in str(refused):
            shown = {line for line, spans in by_role(old) if any(weight for _, weight in spans)}
            named = re.search(
                r"the record weight of .*chat\.jsonl:(\d+) (?:\(and of (\d+) more\) )?is unk", str(refused)
            )
            assert int(named[1]) not in shown
            assert int(named[2] or 0) < len({line for line, _ in by_role(old)} - shown)
            assert any("weight" in record for record in records)
        return
    new = stored(folder / "v2")
    kept = old.spans["rule"] != Rule.ROLE
    assert np.array_equal(new.spans[kept], old.spans[kept])
    for line, spans in by_role(new):
        record = records[line - 1] if 0 < line <= len(records) else {}
        assert {weight for _, weight in spans} <= {0.0, float(record.get("weight", 1))}
    assert verify_dataset(folder / "v2", full=True).faults == ()


YES = {"role": "assistant", "content": "yes"}
FLAGGED = [{"role": "user", "content": "a"}, YES, {"role": "user", "content": "b"}, {**YES, "weight": 2}]


def test_a_weight_that_only_flagged_answers_contain_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = [*FLAGGED, {"role": "user", "content": "c"}, YES]
    prepared(Path(), [{"messages": FLAGGED, "weight": 0.5}, {"messages": more, "weight": 3}], "last")
    with pytest.raises(UsageError) as refused:
        reweigh_dataset("v1", "v2", train_on="assistant")
    assert str(refused.value) == (
        "v1: the record weight of chat.jsonl:1 is unknown, because no trained token of the conversation has this "
        "weight; prepare the dataset with --train-on assistant instead"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat.jsonl", "v1"]


def test_without_record_weights_all_weights_are_one(tmp_path):
    source = prepared(tmp_path, [{"messages": FLAGGED}], "last")
    reweigh_dataset(source, tmp_path / "v2", train_on="assistant")
    assert by_role(stored(tmp_path / "v2")) == [(1, [(0, 0.0), (0, 0.0), (1, 1.0), (1, 1.0), (2, 0.0), (2, 0.0)])]
    assert stored(tmp_path / "v2").weights().max() == 2


def test_parts_of_a_conversation_get_the_weight_that_another_part_contains(tmp_path):
    turns = [
        {"role": "user", "content": "a question"},
        YES,
        {"role": "user", "content": "long " * 9},
        {**YES, "train": False},
    ]
    job = {"fit": "blocks", "max_tokens": 50, "format": "post-training"}
    source = prepared(tmp_path, [{"messages": turns, "weight": 0.25}, {"messages": turns[:2]}], **job)
    lines = [(line, max([weight for _, weight in spans], default=0.0)) for line, spans in by_role(stored(source))]
    assert (1, 0.0) in lines and (1, 0.25) in lines
    reweigh_dataset(source, tmp_path / "v2", train_on="all")
    for line, spans in by_role(stored(tmp_path / "v2")):
        assert {weight for _, weight in spans} <= {{1: 0.25, 2: 1.0}.get(line)}


def space_tokenizer(folder: Path) -> str:
    """Write a tokenizer that adds a space before every text, like that of Llama 2."""
    engine = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<s>", "</s>"])
    engine.train_from_iterator(["the quick brown fox was the first to answer "] * 9, trainer)
    folder.mkdir()
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return str(folder)


@pytest.mark.filterwarnings("ignore:.*fastokens")
@pytest.mark.parametrize(("before", "after"), [("assistant", "all"), ("all", "assistant"), ("all", "last")])
def test_prompts_that_are_encoded_with_their_completions_are_refused(tmp_path, before, after):
    records = [{"prompt": "the quick", "completion": " fox"}]
    text = {"format": "text", "tokenizer": space_tokenizer(tmp_path / "spaces")}
    source = prepared(tmp_path, records, before, **text)
    same = "all" if before == "all" else "last"
    reweigh_dataset(source, tmp_path / "same", train_on=same)
    assert np.array_equal(stored(tmp_path / "same").spans, stored(source).spans)
    with pytest.raises(UsageError, match=rf"encoded as one text, .* the dataset with --train-on {after} instead$"):
        reweigh_dataset(source, tmp_path / "v2", train_on=after)
    assert not (tmp_path / "v2").exists()


def test_prompts_with_their_own_tokens_are_reweighed(tmp_path):
    records = [{"prompt": "the quick", "completion": [{**YES, "train_ranges": [[0, 1, 0]]}]}]
    source = prepared(tmp_path, records, "all", format="text")
    assert Role.USER in stored(source).spans["role"]
    reweigh_dataset(source, tmp_path / "v2", train_on="assistant")
    assert stored(tmp_path / "v2").mask().tolist() == [False] * 10 + [True] * 3
