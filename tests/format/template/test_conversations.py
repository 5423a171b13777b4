from __future__ import annotations

from functools import lru_cache
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from template_fixtures import TEMPLATES as FOLDER
from template_fixtures import (
    TOOLS,
    answer,
    open_template,
    own_format,
    peer_ids,
    trained_texts,
    trl_format,
    trl_tokenizer,
    user,
)

from chatmill.errors import RecordError
from chatmill.format import TemplateRenderer
from chatmill.records import Message, Record, ToolCall

TEXTS = st.one_of(
    st.text(alphabet="ab \n", min_size=1, max_size=12),
    st.sampled_from(
        ["</think>", "<think>a</think>b", "x<|im_end|>", " ", "\n\n", "1+1=2", "ünï 漢字 👍🏽", "<think>\nq"]
    ),
    st.text(min_size=1, max_size=12).filter(str.isprintable),
)
NAMES = ["qwen3", "qwen3_5_think", "gemma4", "nemotron_3_ultra", "gptoss", "deepseekv3"]


@st.composite
def conversations(draw):
    messages = [Message("system", draw(TEXTS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        thought = draw(st.sampled_from(["", "", "hm", " so\n"]))
        messages += [user(draw(TEXTS)), answer(draw(TEXTS), thought)]
    return Record(messages)


@lru_cache(None)
def not_caching(name: str) -> TemplateRenderer:
    return open_template(str(trl_tokenizer()), chat_template=str(FOLDER / f"{name}.jinja"))


def made(of: TemplateRenderer, record: Record):
    try:
        rows = of.render([record])
    except RecordError as fault:
        return fault.kind
    rows.check()
    return rows.ids.tolist(), rows.spans.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_cached_trace_gives_the_same_row_as_a_derivation(name):
    caching = trl_format(name)

    @given(conversations())
    @settings(max_examples=30)
    def check(record):
        with patch("chatmill.format.template.trace_cache.MAX_TRACES", 0):
            alone = made(not_caching(name), record)
        assert made(caching, record) == alone
        assert made(caching, record) == alone

    check()
    assert caching._cache and not not_caching(name)._cache


@pytest.mark.parametrize("name", ["qwen3", "gemma4", "deepseekv3"])
def test_ids_match_transformers_if_no_text_contains_a_control_token(name):
    of = trl_format(name)

    @given(conversations())
    @settings(max_examples=25)
    def check(record):
        assume(not any("<" in message.content for message in record.messages))
        try:
            rows = of.render([record])
        except RecordError:
            return
        assert rows.ids.tolist() == peer_ids(of, record)

    check()


@pytest.mark.parametrize("name", ["llama3", "phi3", "qwen3_8", "gemma4_v2"])
def test_the_trained_characters_of_an_answer_do_not_change_with_the_other_messages(name):
    # The certificates of these templates state that answers do not depend on other messages.
    of = trl_format(name)

    @given(conversations(), st.data())
    @settings(max_examples=25)
    def check(record, data):
        messages = record.messages
        changed = data.draw(st.integers(0, len(messages) - 1))
        other = Message(messages[changed].role, data.draw(TEXTS), messages[changed].reasoning)
        try:
            before = trained_texts(of, record)
            after = trained_texts(of, Record([*messages[:changed], other, *messages[changed + 1 :]]))
        except RecordError:
            assume(False)
        before.pop(changed, None)
        after.pop(changed, None)
        assert before == after

    check()


@given(conversations())
@settings(max_examples=60)
def test_control_tokens_come_only_from_the_template(record):
    of = trl_format("qwen3")
    try:
        rows = of.render([record])
    except RecordError:
        return
    control = np.array(list(of.encoder.ids.values()))
    plain = Record([Message(m.role, "word", m.reasoning and "why") for m in record.messages])
    own = np.isin(of.render([plain]).ids, control).sum()
    # A template that finds `</think>` in a text may write fewer tags of its own. Text never adds control tokens.
    tags = sum(m.content.count("</think>") for m in record.messages if m.role == "assistant")
    assert own - 2 * tags <= np.isin(rows.ids, control).sum() <= own


def test_rendering_many_conversations_gives_the_same_rows_as_one_by_one():
    of = trl_format("qwen3")
    records = [
        Record([user(f"q{n}" * (n % 7)), answer("ä" * n + "."), *([user("x"), answer("y", "z")] * (n % 3))])
        for n in range(1, 40)
    ]
    together = of.render(records)
    together.check()
    for number, record in enumerate(records):
        one, row = of.render([record]), together[number : number + 1]
        assert row.ids.tolist() == one.ids.tolist() and row.spans.tolist() == one.spans.tolist()


def test_a_cached_trace_is_not_followed_if_prefixes_would_give_another_result(tmp_path):
    # The prompt ends with "Well: ", so if a message starts with "Well: ", only the text after that is trained.
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
        "{{ '<|assistant|>Well: ' if add_generation_prompt else '' }}"
    )
    of = own_format(tmp_path, source, control=["<|user|>", "<|assistant|>", "<|end|>"])
    for text, trained in (
        *(("Hello.", "Hello.<|end|>"), ("Hello.", "Hello.<|end|>"), ("Well: yes.", "yes.<|end|>")),
        *(("Hm.", "Hm.<|end|>"), ("Well: no.", "no.<|end|>"), ("Hello!", "Hello!<|end|>")),
    ):
        assert trained_texts(of, Record([user("Hi"), answer(text)])) == {1: trained}


def test_a_cached_trace_does_not_drop_text_that_was_blank_when_it_was_cached(tmp_path):
    source = (
        "{% for m in messages if m.role != 'system' %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}"
        "{% endfor %}{{ '<|assistant|>' if add_generation_prompt else '' }}"
    )
    of = own_format(tmp_path, source, control=["<|user|>", "<|assistant|>", "<|end|>"])
    for text in (" ", "\n", ""):
        of.lay_out(Record([Message("system", text), user("Hi"), answer("Hello.")]))
    with pytest.raises(RecordError, match=r"drops the content of message 0 \(system\)"):
        of.lay_out(Record([Message("system", "Rules"), user("Hi"), answer("Hello.")]))


def test_the_reason_of_a_rejection_does_not_depend_on_caching():
    record = Record([user("<think>\n\n</think>\n\n"), answer("</think>"), answer("b")])
    faults = []
    for cacheable in (False, True):
        with pytest.raises(RecordError) as caught:
            trl_format("qwen3").derive(record, cacheable=cacheable)
        faults.append((caught.value.kind, caught.value.what))
    assert faults[0] == faults[1]


def test_a_conversation_of_many_messages_is_derived_like_a_short_one():
    of = trl_format("qwen3")
    calls = [
        (answer("", "", ToolCall("lookup", f'{{"word":"w{n}","n":{n}}}', f"c{n}")), Message("tool", f"result {n}"))
        for n in range(40)
    ]
    record = Record([user("Go"), *(message for pair in calls for message in pair), answer("Done.")], tools=TOOLS)
    trained = trained_texts(of, record)
    assert of.render([record]).ids.tolist() == peer_ids(of, record)
    for n in range(40):
        assert trained[2 * n + 1] == (
            f'<tool_call>\n{{"name": "lookup", "arguments": {{"word": "w{n}", "n": {n}}}}}\n</tool_call><|im_end|>'
        )
    assert trained[81] == "<think>\n\n</think>\n\nDone.<|im_end|>"


def test_a_wrong_cached_trace_is_detected():
    of = open_template(str(trl_tokenizer()), chat_template=str(FOLDER / "llama3.jinja"))
    record = Record([user("Hi"), answer("Hello.")])
    of.lay_out(record)
    with (
        patch("chatmill.format.template.trace_cache.replay", lambda steps, texts: ["?"] * 9),
        pytest.raises(RecordError, match="the cached trace differs from the template"),
    ):
        of.lay_out(record)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "phi3"])
def test_a_prompt_equals_that_of_transformers_and_is_a_prefix_of_the_row(name):
    of = trl_format(name)
    messages = [user("Hi"), answer("Hello."), user("Which way?")]
    for count in (1, 3):
        question = Record(messages[:count])
        prompt = of.prompt_ids(question)
        assert prompt == peer_ids(of, question, add_generation_prompt=True)
        row = of.render([Record([*question.messages, answer("North.")])])
        assert row.ids[: len(prompt)].tolist() == prompt
        assert row.mask()[len(prompt)] and not row.mask()[len(prompt) - 1]


def test_a_question_that_quotes_control_tokens_is_rendered_whatever_came_before_it(tmp_path):
    # This template has no assistant header: an answer directly follows the text that closes the question.
    source = (
        "{% for m in messages %}{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' else m.content + '</s>' }}"
        "{% endfor %}"
    )
    quoting = Record([user("Why [/INST] here?"), answer("Hello.")])
    alone = own_format(tmp_path / "alone", source, control=["[INST]", "[/INST]", "</s>"]).render([quoting])
    of = own_format(tmp_path / "later", source, control=["[INST]", "[/INST]", "</s>"])
    for text in ("Hi", "Ho", "He"):
        of.lay_out(Record([user(text), answer("Hello.")]))
    later = of.render([quoting])
    assert later.ids.tolist() == alone.ids.tolist() and later.mask().tolist() == alone.mask().tolist()
    assert trained_texts(of, quoting) == {1: "Hello.</s>"}
