from __future__ import annotations

import json
from pathlib import Path

import pytest
from template_fixtures import open_template, own_format, write_tokenizer

from chatmill.format.template.certify.certificate import certify
from chatmill.format.template.certify.finding import Finding, Level
from chatmill.records import Message, Record

CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.reasoning_content -%}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n' -}}{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls -%}{{- '<tool_call>' + call.function | tojson + '</tool_call>' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def lines(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def certificate(folder: Path, source: str, *arguments: str, stops: list[str] | None = None, **config: object):
    renderer = own_format(folder, source, *arguments, control=CONTROL, **config)
    if stops is not None:
        ids = [renderer.encoder.ids[stop] for stop in stops]
        (folder / "own" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        renderer = open_template(str(folder / "own"), arguments=arguments)
    return lines(certify(renderer))


def test_a_template_without_tool_definitions_passes_with_warnings(tmp_path):
    found = certificate(tmp_path, CHATML, stops=["<|im_end|>"])
    levels = {name: finding.level for name, finding in found.items()}
    assert levels == {
        **dict.fromkeys(("answers", "terminator", "bos", "prompt", "borders", "text_tokens"), "PASS"),
        **dict.fromkeys(("space", "history", "system", "reasoning", "shapes", "sandbox"), "PASS"),
        **dict.fromkeys(("ids", "null"), "SKIP"),
        "tools": "WARN",
    }
    assert found["tools"].text == "tool calls are rendered, but tool definitions are dropped"
    assert found["terminator"].text == "the loss mask includes <|im_end|> at the end of answers; the model stops there"
    assert found["shapes"].text == "all 24 conversation shapes are rendered"


def test_a_missing_end_fails_and_an_end_that_cannot_be_judged_is_skipped(tmp_path):
    found = certificate(tmp_path / "a", CHATML.replace("<|im_end|>", ""))
    assert found.keys() == {"terminator", "sandbox"} and not found["terminator"].passed
    assert "--allow-no-end-token" in found["terminator"].text
    # An end token is missing after this line of the template.
    assert "chat_template.jinja:4: {{- message.content -}}" in found["terminator"].text
    found = lines(certify(open_template(str(tmp_path / "a" / "own"), allow_no_end_token=True)))
    assert found["terminator"].level is Level.WARN and found["answers"].level is Level.PASS
    found = certificate(tmp_path / "b", CHATML)
    assert found["terminator"].level is Level.SKIP and "without generation_config.json" in found["terminator"].text
    found = certificate(tmp_path / "c", CHATML, stops=["</s>"])
    assert found["terminator"].level is Level.FAIL and "the model stops at </s>" in found["terminator"].text


def test_different_ends_of_earlier_answers_are_a_warning_with_a_fix(tmp_path):
    end = "('</s>' if message.role == 'assistant' and (loop.last or message.tool_calls) else '<|im_end|>')"
    found = certificate(tmp_path, CHATML.replace("'<|im_end|>\\n' -", end + " + '\\n' -"), stops=["</s>"])
    assert found["terminator"].level is Level.WARN
    assert "earlier answers end with <|im_end|>" in found["terminator"].text and "--unroll" in found["terminator"].text
    assert found["terminator"].details["ends"] == ["</s>"]


def test_a_bos_for_each_turn_passes_and_a_doubled_or_trained_one_fails(tmp_path):
    turns = CHATML.replace(
        "{{- '<|im_start|>' + message", "{{- ('<s>' if message.role == 'user' else '') + '<|im_start|>' + message"
    )
    found = certificate(tmp_path / "a", turns)
    assert (found["bos"].level, found["bos"].text) == (
        Level.PASS,
        "<s> occurs in several turns, up to 8 times in one row",
    )
    found = certificate(tmp_path / "b", "<s>{{- bos_token -}}" + CHATML)
    assert found["bos"].level is Level.FAIL and "occurs twice" in found["bos"].text
    trained = CHATML.replace(
        "{{- message.content -}}", "{{- ('<s>' if message.role == 'assistant' else '') + message.content -}}"
    )
    found = certificate(tmp_path / "c", trained)
    assert found["bos"].level is Level.FAIL and "the loss mask includes <s> in message 1" in found["bos"].text


def test_text_after_the_header_in_only_prompt_or_row_is_a_warning_with_its_count(tmp_path):
    found = certificate(
        tmp_path, CHATML.replace("'<|im_start|>assistant\\n' -", "'<|im_start|>assistant\\n<think>\\n' -")
    )
    assert found["prompt"].level is Level.WARN and "diverges from the row after the header for" in found["prompt"].text
    counts = found["prompt"].details["counts"]
    assert counts["parts_behind_header"] > 30 and "differs" not in counts


def test_rewritten_history_is_a_warning_with_a_fix(tmp_path):
    source = CHATML.replace("message.reasoning_content -%}", "message.reasoning_content and loop.last -%}")
    found = certificate(tmp_path, source)
    assert found["history"].level is found["reasoning"].level is Level.WARN
    assert "message 1 of probe reasoning" in found["history"].text and "--unroll" in found["history"].text
    assert found["reasoning"].text.startswith("the loss mask includes reasoning only in the last answer")


def test_rejected_shapes_are_warnings_with_their_reason(tmp_path):
    strict = "{%- if messages[0].role != 'user' -%}{{- raise_exception('begin with a user') -}}{%- endif -%}"
    found = certificate(tmp_path, strict + CHATML)
    assert found["system"].level is Level.WARN and "begin with a user" in found["system"].text
    assert found["shapes"].level is Level.WARN
    assert found["shapes"].details["refused"] == ["an assistant message first"]
    assert "chat_template.jinja:1: " in found["shapes"].text


def test_a_reason_to_reject_every_conversation_is_one_line_with_a_fix(tmp_path):
    source = CHATML + "{%- set reads = mode.name -%}"
    findings = certify(own_format(tmp_path, source, control=CONTROL))
    assert [(finding.name, finding.level) for finding in findings] == [("answers", "FAIL"), ("sandbox", "PASS")]
    assert findings[0].text.startswith("every conversation is rejected: ")
    assert findings[0].text.endswith("set it with --template-arg mode=…, or change the template")
    assert certificate(tmp_path, source, 'mode={"name": 1}')["answers"].passed


def test_headers_that_end_with_a_space_are_a_warning_with_the_share_and_a_fix(tmp_path):
    source = """{%- for m in messages -%}{{- m.role + ': ' + m.content + '</s>' -}}{%- endfor -%}
    {%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"""
    folder = write_tokenizer(tmp_path / "own", CONTROL)
    (folder / "chat_template.jinja").write_text(source)
    renderer = open_template(str(folder))
    record = Record([Message("user", "the"), Message("assistant", "the answer")], file="own.jsonl", line=1)
    found = lines(certify(renderer, [record]))
    assert found["borders"].level is Level.WARN
    assert "1 of 1 answers in your records" in found["borders"].text and "--strip-prompt-space" in found["borders"].text
    assert found["borders"].details["of_records"] == {"straddling": 1, "answers": 1}
    found = lines(certify(open_template(str(folder), strip_prompt_space=True), [record]))
    assert found["borders"].level is found["answers"].level is Level.PASS


class NullPeer:
    """A stand-in for transformers that returns the renderer's own ids, except for null content."""

    def __init__(self, renderer, text: str | None) -> None:
        self.renderer, self.text = renderer, text

    def __call__(self, record, *, null_content=False):
        ids = self.renderer.render([record]).ids.tolist()
        if not null_content or self.text is None:
            return [] if null_content else ids
        return [*ids[:3], *self.renderer.encoder.tokenizer.encode(self.text), *ids[3:]]


@pytest.mark.parametrize(("text", "level"), [("None", "WARN"), ("", "PASS"), (None, "WARN")])
def test_null_content_that_transformers_renders_differently_is_a_warning(tmp_path, text, level):
    renderer = own_format(tmp_path, CHATML, control=CONTROL)
    found = lines(certify(renderer, peer=NullPeer(renderer, text), peer_name="transformers"))
    assert found["ids"].level is Level.PASS and found["ids"].details["different"] == 0
    assert found["null"].level == level
    if text == "None":
        assert 'transformers renders it as "None' in found["null"].text


def test_ids_that_differ_fail_and_name_the_conversations(tmp_path):
    renderer = own_format(tmp_path, CHATML, control=CONTROL)
    found = lines(certify(renderer, peer=lambda record, *, null_content=False: [1], peer_name="transformers"))
    assert found["ids"].level is Level.FAIL
    assert found["ids"].text.startswith(
        "the ids differ from those of transformers: probe one turn, probe several turns, "
    )
