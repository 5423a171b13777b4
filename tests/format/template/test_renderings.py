"""Answers derived with kept renderings must equal answers derived without them, including the guards and the errors."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_fixtures import ORIGINALS, TEMPLATES, answer, control_strings, user

from chatmill.errors import RecordError
from chatmill.format.template.answers.derive import derive
from chatmill.format.template.answers.renderings import KeptRenderings, Renderings
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.template import ChatTemplate
from chatmill.records import Message, Record, ToolCall

PUBLISHED = sorted((Path(__file__).resolve().parents[4] / "shared" / "data" / "templates").glob("*.jinja"))
FILES = [*(TEMPLATES / f"{name}.jinja" for name in ORIGINALS[::2]), *PUBLISHED[::5]]
TEXTS = st.sampled_from(
    ["", " ", "\n", "Yes.", " yes \n", "<think>\nhm\n</think>\n\nNo.", "</think>", "<|im_end|>", "[INST] no", "漢字"]
)
CALL = ToolCall("lookup", '{"word":"moon"}', "call00001")


@st.composite
def messages(draw):
    messages = [Message("system", draw(TEXTS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages += [user(draw(TEXTS)), answer(draw(TEXTS), draw(st.sampled_from(["", "", "so", "\nhm\n"])))]
        if draw(st.integers(0, 4)) == 0:
            messages[-1] = answer("", "", CALL)
            messages += [Message("tool", "Bright.", name="lookup", tool_call_id="call00001"), answer(draw(TEXTS))]
    return messages


@cache
def opened(path: Path) -> tuple[ChatTemplate, ControlTokens]:
    source = path.read_text("utf-8")
    template = ChatTemplate(source, path.name, variables={"bos_token": "<s>", "eos_token": "</s>"})
    return template, ControlTokens(dict.fromkeys(control_strings(source), 0))


def outcome(path: Path, record: Record, kept: KeptRenderings | None, cacheable: bool):
    template, tokens = opened(path)
    try:
        options = {"ends": (), "mask": "derived", "cacheable": cacheable, "eos": "</s>"}
        return derive(record, template, tokens, kept=kept, **options)
    except RecordError as fault:
        return fault.what, fault.right, fault.kind


def check(path: Path, all_messages: list[Message], cacheable: bool) -> None:
    whole = Record(all_messages)
    kept = KeptRenderings(whole, opened(path)[0])
    for count in range(len(all_messages), 0, -1):
        record = Record(all_messages[:count])
        assert kept.contains(record, opened(path)[0])
        assert outcome(path, record, kept, cacheable) == outcome(path, record, None, cacheable)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kept_renderings_give_the_same_answers_and_guards(path):
    talk = [
        user("Where is it?"),
        answer("There."),
        user("<think>"),
        answer(" far ", "\nhm\n"),
        user("And?"),
        answer(""),
    ]
    check(path, [Message("system", "Be brief."), *talk, *talk[:2]], True)


@pytest.mark.parametrize("old", ["far", "missing"])
def test_a_rendering_that_cannot_be_replayed_makes_every_trace_that_uses_it_not_cacheable(tmp_path, old):
    path = tmp_path / "replacing.jinja"
    source = (TEMPLATES / "qwen2_5.jinja").read_text("utf-8")
    path.write_text(source.replace("message.content", f"message.content | replace('{old}', 'near')"), "utf-8")
    talk = [user("Where is it?"), answer("There."), user("How far?"), answer("Not far."), user("And?"), answer("No.")]
    check(path, talk, True)
    kept = KeptRenderings(Record(talk), opened(path)[0])
    cacheable = [outcome(path, Record(talk[:count]), kept, True).steps is not None for count in (6, 4, 2)]
    assert cacheable == ([False, False, True] if old == "far" else [True, True, True])


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "gemma3", "deepseekv3", "llama3"])
def test_kept_renderings_give_the_same_outcome_for_any_texts(name):
    @settings(max_examples=8)
    @given(messages(), st.booleans())
    def any_texts(all_messages, cacheable):
        check(TEMPLATES / f"{name}.jinja", all_messages, cacheable)

    any_texts()


def test_conversations_with_the_same_first_messages_share_each_rendering():
    path = TEMPLATES / "qwen2_5.jinja"
    template, _ = opened(path)
    talk = [user("Where?"), answer("There.")] * 4
    outcome(path, Record(talk), None, True)
    kept = KeptRenderings(Record(talk), template)
    with (
        patch.object(template, "render", wraps=template.render) as render,
        patch.object(template, "trace", wraps=template.trace) as trace,
    ):
        for count in (8, 6, 4, 2):
            assert outcome(path, Record(talk[:count]), kept, True).steps is not None
    for calls in (render.call_args_list, trace.call_args_list):
        rendered = [(call.args[1], call.kwargs["prompt"]) for call in calls]
        assert len(rendered) == len(set(rendered)) >= 8


def test_only_the_first_messages_of_the_same_conversation_are_contained():
    template, other = opened(TEMPLATES / "qwen2_5.jinja")[0], opened(TEMPLATES / "qwen3.jinja")[0]
    talk = [user("Where?"), answer("There."), user("Really?"), answer("Yes.")]
    kept = KeptRenderings(Record(talk), template)
    assert kept.contains(Record(talk), template)
    assert kept.contains(Record(talk[:3]), template)
    assert not kept.contains(Record(talk[:2]), other)
    assert not kept.contains(Record(talk[1:]), template)
    assert not kept.contains(Record([*talk, user("Good.")]), template)
    assert not kept.contains(Record([user("Where? "), talk[1]]), template)
    tool = '{"type":"function","function":{"name":"lookup"}}'
    assert not kept.contains(msgspec.structs.replace(Record(talk[:2]), tools=(tool,)), template)


def test_a_rendering_over_the_lowest_limit_is_not_kept_but_still_allowed():
    template, _ = opened(TEMPLATES / "qwen2_5.jinja")
    long = Record([user("a" * 2**19), answer("b" * 2**19)])
    kept = KeptRenderings(long, template)
    assert kept.text(2, False) is None
    assert kept.traced(2, False) is None
    renderings = Renderings(long, template, kept)
    assert renderings.text(2, False) == renderings.traced(2, False).text
    assert len(renderings.text(2, False)) > 2**20
