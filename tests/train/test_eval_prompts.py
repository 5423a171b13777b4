from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_fixtures import write_files

from chatmill.format import TurnRenderer, load_format
from chatmill.records import Message, Record
from chatmill.rows import Rows
from chatmill.store.read import open_dataset
from chatmill.tokenizer import open_tokenizer
from chatmill.train.score import EvalPrompt, RowOrigin, eval_prompts, origins

FORMATS = {name: load_format(name) for name in ("chatml", "ngpt", "primer", "post-training")}
TOKENIZERS = {name: open_tokenizer("bytes", control=format.tokens) for name, format in FORMATS.items()}
EOT = {name: TOKENIZERS[name].special_token_ids()[format.eot] for name, format in FORMATS.items()}


def rendered(name: str, *conversations: list[Message], **kw: str) -> Rows:
    records = [
        Record(messages, file="chat.jsonl", line=at, source="chat") for at, messages in enumerate(conversations, 1)
    ]
    return TurnRenderer(FORMATS[name], TOKENIZERS[name]).render(records, **kw)


texts = st.text(max_size=6)
turns = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "assistant", "tool"]), texts).map(lambda pair: Message(*pair)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150)
@given(name=st.sampled_from(sorted(FORMATS)), before=st.booleans(), conversation=turns, other=turns)
def test_the_prompt_of_every_answer_equals_the_generation_prompt(name, before, conversation, other):
    conversation = [Message("system", "s")] * before + [Message("user", "u"), *conversation]
    other = [Message("user", "u"), *other]
    wanted = []
    for segment, messages in enumerate((conversation, other)):
        for at, message in enumerate(messages):
            if message.role == "assistant":
                prompt = TurnRenderer(FORMATS[name], TOKENIZERS[name]).prompt_ids(Record(messages[:at]))
                answer = [*TOKENIZERS[name].encode(message.content), EOT[name]]
                wanted.append(EvalPrompt(prompt, answer, segment))
    assert list(eval_prompts(rendered(name, conversation, other), [EOT[name]])) == wanted


def test_answers_without_a_usable_prompt_are_counted_by_reason():
    said = [
        Message("user", "a"),
        Message("assistant", "not trained", weight=0),
        Message("user", "b"),
        Message("assistant", "never ends", complete=False),
    ]
    left_out: Counter[str] = Counter()
    rows = rendered("primer", said, [Message("user", "c"), Message("assistant", "d")])
    rows.spans["weight"][rows.spans["length"] == len("never ends")] = 1
    assert [q.answer for q in eval_prompts(rows, [EOT["primer"]], left_out)] == [[*b"d", EOT["primer"]]]
    assert left_out == {"unfinished": 1}

    rows = rendered("primer", [Message("user", "c"), Message("assistant", "d")])
    rows.spans["weight"][-2] = 0
    assert list(eval_prompts(rows, [EOT["primer"]], left_out)) == []
    assert left_out == {"unfinished": 1, "partly_trained": 1}

    rows.spans["weight"][-2], rows.spans["target"][-1] = 1, 7
    assert list(eval_prompts(rows, [EOT["primer"]], left_out)) == []
    assert left_out == {"unfinished": 1, "partly_trained": 2}


def test_user_messages_are_not_answers_even_if_trained():
    rows = rendered("primer", [Message("user", "c"), Message("assistant", "d")], train_on="all")
    assert [q.answer for q in eval_prompts(rows, [EOT["primer"]])] == [[*b"d", EOT["primer"]]]


def test_in_data_of_other_programs_every_trained_span_is_an_answer(tmp_path):
    folder = write_files(tmp_path / "x", [[5, 6, 9, 7, 8, 9], [1, 9]], [[0, 1, 1, 0, 1, 1], [1, 1]])
    left_out: Counter[str] = Counter()
    rows = open_dataset(folder)["train"].rows([0, 1])
    assert list(eval_prompts(rows, [9], left_out)) == [EvalPrompt([5], [6, 9], 0), EvalPrompt([5, 6, 9, 7], [8, 9], 0)]
    assert left_out == {"nothing_before": 1}
    assert origins(rows, "x") == [RowOrigin("x", ""), RowOrigin("x", "")]


@pytest.mark.parametrize("ends", [[], [3]])
def test_an_answer_without_its_end_token_is_unfinished(ends):
    left_out: Counter[str] = Counter()
    rows = rendered("chatml", [Message("user", "c"), Message("assistant", "d")])
    assert list(eval_prompts(rows, ends, left_out)) == []
    assert left_out == {"unfinished": 1}


def test_the_origin_of_a_conversation_is_its_source_and_line():
    rows = rendered("primer", [Message("user", "c")], [Message("user", "d")])
    assert origins(rows, "x") == [RowOrigin("chat", "chat.jsonl:1"), RowOrigin("chat", "chat.jsonl:2")]
    assert np.array_equal(rows.origins["line"], [1, 2])
