from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from chatmill.errors import DataError
from chatmill.format import PRESETS, TurnRenderer, load_format
from chatmill.records import Message, Record
from chatmill.rollout.target import build_answer, build_target
from chatmill.rollout.task import check_prompts, join_prompts, prompt_rows
from chatmill.rollout.vocabulary import COORDINATES
from chatmill.rows import NO_MESSAGE, Rule
from chatmill.tokenizer import open_tokenizer

RECORDS = [
    Record([Message("user", "what is here?")], "a", source="s", file="t.jsonl", line=4),
    Record(
        [Message("system", "s"), Message("user", "q"), Message("assistant", "early"), Message("user", "and?")],
        "b",
        source="s",
        file="u.jsonl",
        line=9,
    ),
]
CAT = {"desc": "cat", "bbox_2d": [1, 2, 3, 4]}


@pytest.fixture(params=PRESETS)
def renderer(request):
    format = load_format(request.param)
    return TurnRenderer(format, open_tokenizer("bytes", control=format.tokens, besides=COORDINATES, add_tokens=True))


def test_a_prompt_equals_the_generation_prompt_and_is_context(renderer):
    rows = prompt_rows(RECORDS, renderer)
    rows.check()
    assert [rows.ids[start:stop].tolist() for start, stop in pairwise(rows.row_start)] == [
        renderer.prompt_ids(record) for record in RECORDS
    ]
    assert not rows.mask().any()
    assert set(rows.spans["rule"].tolist()) == {int(Rule.PROMPT)}
    assert not rows.reweigh("all").mask().any()
    assert [(rows.files[origin["file"]].path, int(origin["line"])) for origin in rows.origins] == [
        ("t.jsonl", 4),
        ("u.jsonl", 9),
    ]


def test_an_answer_follows_its_prompt_as_the_next_message_of_the_same_conversation(renderer):
    prompts = prompt_rows(RECORDS, renderer)
    answers = [
        build_target([], [CAT], tokenizer=renderer.tokenizer).rows,
        build_answer([CAT], tokenizer=renderer.tokenizer),
    ]
    rows = join_prompts(prompts, answers)
    rows.check()
    for row, (record, answer) in enumerate(zip(RECORDS, answers, strict=True)):
        one, prompt = rows[row : row + 1], renderer.prompt_ids(record)
        assert one.ids.tolist() == prompt + answer.ids.tolist()
        assert one.weights().tolist() == [0.0] * len(prompt) + answer.weights().tolist()
        messages = one.per_token(one.spans["message"])
        assert set(messages[len(prompt) :].tolist()) == {len(record.messages)}
        known = [number for number in dict.fromkeys(messages.tolist()) if number != NO_MESSAGE]
        assert known == list(range(len(record.messages) + 1))
        assert len(one.origins) == 1 and one.origins["line"][0] == record.line


def test_the_tokens_of_an_answer_begin_where_a_rendered_answer_begins(renderer):
    full = Record([*RECORDS[0].messages, Message("assistant", "x")])
    rendered = renderer.render([full]).ids.tolist()
    prompt = prompt_rows(RECORDS[:1], renderer).ids.tolist()
    assert rendered[: len(prompt)] == prompt
    assert bytes([rendered[len(prompt)]]) == b"x"


def test_a_different_or_trained_prompt_is_detected():
    format = load_format("primer")
    tokenizer = open_tokenizer("bytes", control=format.tokens, besides=COORDINATES, add_tokens=True)
    prompts = prompt_rows(RECORDS, TurnRenderer(format, tokenizer))
    rows = join_prompts(prompts, [build_answer([], tokenizer=tokenizer)] * 2)
    own = [TurnRenderer(format, tokenizer).prompt_ids(record) for record in RECORDS]
    check_prompts(rows, own)
    with pytest.raises(DataError, match="row 1: the prompt for training differs"):
        check_prompts(rows, [own[0], [*own[1][:-1], 7]])
    rows.spans["weight"] = np.where(np.arange(len(rows.spans)) == 1, 1, rows.spans["weight"])
    with pytest.raises(DataError, match="row 0: the loss mask includes token 1 of the prompt"):
        check_prompts(rows, own)
    with pytest.raises(DataError, match="2 prompts and 1 answers"):
        join_prompts(prompts, [build_answer([], tokenizer=tokenizer)])
