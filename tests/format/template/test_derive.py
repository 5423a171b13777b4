from __future__ import annotations

import ast
from pathlib import Path

import pytest
from template_fixtures import answer, control_strings, read, user

from chatmill.errors import RecordError
from chatmill.format.template.answers import by_origin, by_prefix, derive
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.template import ChatTemplate
from chatmill.records import Record

TALK = Record([user("Which way?"), answer("North."), user("And then?"), answer("West.")])


def derived(name: str):
    template = ChatTemplate(read(name), name, variables={"bos_token": "<s>", "eos_token": "</s>"})
    tokens = ControlTokens(dict.fromkeys(control_strings(read(name)), 0))
    return derive.derive(TALK, template, tokens, ends=(), mask="derived", cacheable=False)


def imported(module) -> set[str]:
    tree = ast.parse(Path(module.__file__).read_text("utf-8"))
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


def test_both_derivations_share_no_chatmill_module_except_errors():
    shared = {name for name in imported(by_origin) & imported(by_prefix) if name.startswith("chatmill")}
    assert shared == {"chatmill.errors"}


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gptoss", "gemma3", "phi3"])
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("edge", ["start", "stop"])
@pytest.mark.parametrize("derivation", ["answers_by_origin", "answers_by_prefix"])
def test_an_answer_shifted_by_one_character_in_either_derivation_is_rejected(monkeypatch, name, by, edge, derivation):
    right = getattr(derive, derivation)

    def shifted(*args):
        *first, last = right(*args)
        return [*first, last._replace(**{edge: getattr(last, edge) + by})]

    assert derived(name).answers
    monkeypatch.setattr(derive, derivation, shifted)
    with pytest.raises(
        RecordError, match=r"whether the answer of message 3 (begins|ends) before or after .*: the origins of"
    ):
        derived(name)


def test_the_error_shows_the_disputed_text_and_both_results(monkeypatch):
    right = derive.answers_by_prefix
    monkeypatch.setattr(
        derive, "answers_by_prefix", lambda *args: [p._replace(start=p.start + 3) for p in right(*args)]
    )
    with pytest.raises(RecordError) as refused:
        derived("llama3")
    assert refused.value.kind == "mask_disputed"
    assert refused.value.what == (
        'cannot determine whether the answer of message 1 begins before or after "Nor": '
        "the origins of the characters indicate before, but the rendered prefixes indicate after"
    )
