from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from template_fixtures import TEMPLATES, answer, open_template, trl_tokenizer, user

from chatmill.errors import RecordError
from chatmill.format import TemplateRenderer
from chatmill.format.template.answers.derived import DerivedAnswers
from chatmill.format.template.row_check import RowCheck, _Answers
from chatmill.records import Record

TALK = Record([user("Which way?"), answer("North."), user("And then?"), answer("West.")], file="talk.jsonl", line=7)
TEMPLATE_NAMES = ("qwen2_5", "llama3", "gemma3", "phi3", "cohere", "deepseek_r1_distill", "lfm2")


def renderer_of(name: str) -> TemplateRenderer:
    """Return a renderer with an empty trace cache, so that the patched code derives every row."""
    renderer = opened(name)
    renderer._cache.clear()
    return renderer


@cache
def opened(name: str) -> TemplateRenderer:
    return open_template(str(trl_tokenizer()), chat_template=str(TEMPLATES / f"{name}.jinja"))


def with_fault(renderer: TemplateRenderer, fault: str, derived: DerivedAnswers) -> DerivedAnswers:
    if len(derived.answers) < 2:
        return derived
    text, last = derived.rendering.text, derived.answers[-1]
    tokens = [match.span() for match in renderer.control_tokens.find(text)]
    if fault == "starts one token late":
        last = last._replace(start=last.start + 2)
    elif fault == "starts one token early":
        before = [begin for begin, end in tokens if end <= last.start]
        last = last._replace(start=last.start - 1 if text[last.start - 1].isspace() else before[-1])
    elif fault == "starts one header early":
        last = last._replace(start=last.start - len(derived.contexts[-1].text))
    elif fault == "ends before its end token":
        last = last._replace(stop=max(begin for begin, end in tokens if end <= last.stop), closed=False)
    else:
        # The first answer extends past its end token into the header of the next turn.
        first = derived.answers[0]
        stop = min(end for _, end in tokens if end > first.stop)
        return replace(derived, answers=(first._replace(stop=stop), *derived.answers[1:]))
    return replace(derived, answers=(*derived.answers[:-1], last))


FAULTS = {
    "starts one token late": "prompt_mismatch",
    "starts one token early": "prompt_mismatch",
    "starts one header early": "prompt_mismatch",
    "ends before its end token": "no_end_token",
    "continues into the next header": "no_end_token",
}


@pytest.mark.parametrize("by_text", [True, False], ids=["checked on the text", "checked only on the ids"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_derivation_that_is_slightly_off_is_rejected(monkeypatch, fault, by_text):
    right = TemplateRenderer.derive
    monkeypatch.setattr(
        TemplateRenderer,
        "derive",
        lambda self, record, **options: with_fault(self, fault, right(self, record, **options)),
    )
    if not by_text:
        monkeypatch.setattr("chatmill.format.template.renderer.check_answers", lambda *args, **options: ())
    for name in TEMPLATE_NAMES:
        with pytest.raises(RecordError) as refused:
            renderer_of(name).render([TALK])
        assert refused.value.kind in (FAULTS[fault], "foreign_text"), name
        assert (refused.value.file, refused.value.line) == ("talk.jsonl", 7), name


def test_a_header_of_another_turn_inside_an_answer_is_found_at_any_position():
    renderer = renderer_of("qwen2_5")
    laid_out = [renderer.lay_out(TALK), renderer.lay_out(TALK)]
    rows = renderer.render(laid_out)
    check = renderer._row_check()
    assert isinstance(check, RowCheck)
    expected = [record.laid_out.expected for record in laid_out]
    which = np.arange(2)
    check.check(rows, laid_out, expected, which)
    header = check.other_headers[0]
    inside = np.flatnonzero(rows.mask())
    places = [at for at in inside.tolist() if {*range(at, at + len(header))} <= {*inside.tolist()}]
    assert places
    for at in places:
        ids = rows.ids.copy()
        ids[at : at + len(header)] = header
        with pytest.raises(RecordError, match=r"talk.jsonl:7: the answer of message [13] "):
            check.check(replace(rows, ids=ids), laid_out, expected, which)


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_goes_on_if_an_end_token_comes_before_its_last_token(seed):
    check = RowCheck(
        [[1, 2]], {3}, vocab_size=5, byte_lengths=lambda ids: np.ones(len(ids), np.int32), allow_no_end=True
    )
    random = np.random.default_rng(seed)
    ids = random.integers(0, 5, 200, dtype=np.uint32)
    start, stop = np.sort(random.choice(201, 60, replace=False)).reshape(-1, 2).T
    goes_on = check._goes_on(ids, check._places(ids), _Answers(start, start, start, stop))
    assert goes_on.tolist() == [3 in ids[begin : end - 1] for begin, end in zip(start, stop, strict=True)]
