"""Chat templates that each have one unusual feature, and their expected loss masks, written by hand.

In the expected text, « and » enclose the text that is trained on.
"""

from __future__ import annotations

import json
import re

import pytest
from template_fixtures import TOOLS, answer, open_template, own_format, trained_texts, trl_format, user

from chatmill.errors import RecordError
from chatmill.ledger import Ledger
from chatmill.records import Message, Record, ToolCall

TALK = Record([user("Hi"), answer(" Hello. "), user("Go"), answer("Bye")])
THINKING = Record([user("Hi"), answer("Hello.", "First."), user("Go"), answer("Bye", "Second.")])
CALL = ToolCall("lookup", '{"word":"sun"}', "c1")
CALLING = Record(
    [user("Hi"), answer("", "", CALL), Message("tool", "a star", name="lookup", tool_call_id="c1"), answer("A star.")],
    tools=TOOLS,
)

PLAIN = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

GOLDEN = {
    "reasoning stripped from earlier turns": (
        """{%- for message in messages -%}
        {{- '<|im_start|>' + message.role + '\\n' -}}
        {%- if message.reasoning_content and loop.last -%}
          {{- '<think>' + message.reasoning_content + '</think>' -}}
        {%- endif -%}
        {{- message.content + '<|im_end|>\\n' -}}
        {%- endfor -%}
        {%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}""",
        THINKING,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Hello.<|im_end|>»\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n«<think>Second.</think>Bye<|im_end|>»\n",
    ),
    "an empty think block in the answer but not in its prompt": (
        """{%- for message in messages -%}
        {{- '<|im_start|>' + message.role + '\\n' -}}
        {%- if message.role == 'assistant' and loop.last -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
        {{- message.content + '<|im_end|>\\n' -}}
        {%- endfor -%}
        {%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}""",
        TALK,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n« Hello. <|im_end|>»\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\nBye<|im_end|>»\n",
    ),
    "a think block that the prompt opens": (
        """{%- for message in messages -%}
        {{- '<|im_start|>' + message.role + '\\n' -}}
        {%- if message.role == 'assistant' -%}
          {{- '<think>\\n' + (message.reasoning_content or '') + '</think>' -}}
        {%- endif -%}
        {{- message.content + '<|im_end|>\\n' -}}
        {%- endfor -%}
        {%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}""",
        THINKING,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n«First.</think>Hello.<|im_end|>»\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n<think>\n«Second.</think>Bye<|im_end|>»\n",
    ),
    "a turn closed by the header of the next turn": (
        """{%- for message in messages -%}
        {{- '<|' + message.role + '|>\\n' + message.content -}}
        {%- endfor -%}
        {{- '<|assistant|>\\n' if add_generation_prompt else '<|user|>' -}}""",
        TALK,
        "<|user|>\nHi<|assistant|>\n« Hello. <|user|>»\nGo<|assistant|>\n«Bye<|user|>»",
    ),
    "whitespace around messages is stripped": (
        PLAIN.replace("message.content", "message.content | trim"),
        TALK,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Hello.<|im_end|>»\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n«Bye<|im_end|>»\n",
    ),
    "the text is concatenated first and written at once": (
        """{%- set all = namespace(text='') -%}
        {%- for message in messages -%}
        {%- set all.text = all.text ~ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -%}
        {%- endfor -%}
        {%- if add_generation_prompt -%}{%- set all.text = all.text ~ '<|im_start|>assistant\\n' -%}{%- endif -%}
        {{- all.text -}}""",
        TALK,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n« Hello. <|im_end|>»\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n«Bye<|im_end|>»\n",
    ),
    "tool results inside the turn": (
        """{%- for message in messages -%}
        {%- if message.role == 'user' -%}{{- '<|user|>' + message.content + '<|end|>' -}}
        {%- elif message.role == 'tool' -%}{{- '<|result|>' + message.content + '<|done|>' -}}
        {%- else -%}
          {%- if not (loop.previtem and loop.previtem.role == 'tool') -%}{{- '<|assistant|>' -}}{%- endif -%}
          {{- message.content -}}
          {%- for call in message.tool_calls -%}
            {{- '<|call|>' + call.function.name + (call.function.arguments | tojson) + '<|run|>' -}}
          {%- endfor -%}
          {%- if not message.tool_calls -%}{{- '<|end|>' -}}{%- endif -%}
        {%- endif -%}
        {%- endfor -%}
        {%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{- '<|assistant|>' -}}{%- endif -%}""",
        CALLING,
        '<|user|>Hi<|end|><|assistant|>«<|call|>lookup{"word": "sun"}<|run|>»<|result|>a star<|done|>«A star.<|end|>»',
    ),
    "reasoning removed from the content": (
        """{%- for message in messages -%}
        {%- set said = message.content.split('</think>')[-1].lstrip('\\n') -%}
        {{- '<|im_start|>' + message.role + '\\n' -}}
        {%- if '</think>' in message.content and loop.last -%}
          {{- '<think>' + message.content.split('</think>')[0].split('<think>')[-1] + '</think>' -}}
        {%- endif -%}
        {{- said + '<|im_end|>\\n' -}}
        {%- endfor -%}
        {%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}""",
        Record([user("Hi"), answer("<think>a</think>\nHello."), user("Go"), answer("<think>b</think>\n\nBye")]),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Hello.<|im_end|>»\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n«<think>b</think>Bye<|im_end|>»\n",
    ),
    "text after the end of the turn, and a macro": (
        """{%- macro turn(role, text) -%}{{- '<|' + role + '|>\\n' + text + '<|end|>\\n' -}}{%- endmacro -%}
        {{- bos_token -}}
        {%- for message in messages -%}{{- turn(message.role, message.content) -}}{%- endfor -%}
        {{- '<|assistant|>\\n' if add_generation_prompt else eos_token -}}""",
        TALK,
        "<s><|user|>\nHi<|end|>\n<|assistant|>\n« Hello. <|end|>»\n"
        "<|user|>\nGo<|end|>\n<|assistant|>\n«Bye<|end|>»\n</s>",
    ),
}
STOPS = {"a turn closed by the header of the next turn": ["<|user|>"]}


def marked(format, record: Record) -> str:
    rows = format.render([record])
    rows.check()
    out = []
    for span, start, stop in zip(rows.spans, rows.span_start[:-1], rows.span_start[1:], strict=True):
        text = format.tokenizer.decode(rows.ids[start:stop].tolist())
        out.append(f"«{text}»" if span["weight"] > 0 else text)
    return "".join(out).replace("»«", "")


def opened(tmp_path, source: str, name: str):
    format = own_format(tmp_path, source, control=[*re.findall(r"<[|/]?\w+\|?>|\[/?INST\]", source), *EXTRA])
    if name not in STOPS:
        return format
    ids = [format.tokenizer.token_id(token) for token in STOPS[name]]
    (tmp_path / "own" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return open_template(str(tmp_path / "own"))


EXTRA = ["<s>", "</s>", "<|user|>", "<|assistant|>"]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_mask_of_a_difficult_template_is_exact(tmp_path, name):
    source, record, expected = GOLDEN[name]
    format = opened(tmp_path, source, name)
    # The first two calls derive the mask, and the last call replays it from the cache.
    for _ in range(3):
        assert marked(format, record) == expected


@pytest.mark.parametrize("written", ["{}", '{"eos_token_id": null}'])
def test_a_generation_config_without_an_end_token_is_accepted(tmp_path, written):
    # If the config of a model has no EOS token, transformers writes a file with one of these contents.
    name = next(name for name in GOLDEN if name not in STOPS)
    source, record, expected = GOLDEN[name]
    opened(tmp_path, source, name)
    (tmp_path / "own" / "generation_config.json").write_text(written)
    assert marked(open_template(str(tmp_path / "own")), record) == expected


def test_a_first_answer_starts_after_the_header_of_other_answers(tmp_path):
    # The first answer has no prompt, because the template fails without messages.
    source = PLAIN.replace("{%- for", "{{- messages[0].role[:0] -}}{%- for", 1)
    talk = Record([answer("Hello."), user("Go"), answer("Bye")])
    expected = (
        "<|im_start|>assistant\n«Hello.<|im_end|>»\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n«Bye<|im_end|>»\n"
    )
    for _ in range(3):
        assert marked(own_format(tmp_path, source), talk) == expected


def test_an_answer_that_starts_inside_a_literal_is_not_compared_with_the_text_after_it(tmp_path):
    """In the prompt, a newline follows `<think>`; in the rendered conversation, `</think>` follows."""
    source = """{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + ('<think></think>' if message.role == 'assistant' else '') -}}
    {{- message.content + '<|im_end|>\\n' -}}
    {%- endfor -%}
    {%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}"""
    format = own_format(tmp_path, source)
    for text in ("\n\nHome.", "Home.", "\nHome."):
        assert trained_texts(format, Record([user("Where?"), answer(text)])) == {1: f"</think>{text}<|im_end|>"}


def test_answers_without_an_end_are_trained_if_allowed(tmp_path):
    source, record, _ = REFUSED["only the last turn is closed"]
    opened(tmp_path, source, "")
    format, ledger = open_template(str(tmp_path / "own"), allow_no_end_token=True), Ledger()
    assert marked(format, record) == "[INST]Hi[/INST]« Hello. »[INST]Go[/INST]«Bye</s>»"
    format.render([record], ledger=ledger)
    assert ledger.entries["noted", "no_end_token"].rows == 1


def test_the_text_around_the_answers_is_the_rendering(tmp_path):
    for name, (source, record, expected) in GOLDEN.items():
        format = opened(tmp_path, source, name)
        assert expected.replace("«", "").replace("»", "") == format.text(record)


REFUSED = {
    "the header differs from the prompt": (
        PLAIN.replace("'<|im_start|>assistant\\n' -}}{%- endif", "'<|assistant|>' -}}{%- endif"),
        TALK,
        r'message 1 starts with "<\|im_start\|>assistant\\n", '
        r'but its prompt ends with "<\|im_end\|>\\n<\|assistant\|>"',
    ),
    "the answer is rendered before the question": (
        """{%- for message in messages | reverse -%}
        {{- '<|' + message.role + '|>' + message.content + '<|end|>' -}}
        {%- endfor -%}
        {%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}""",
        Record([user("Hi"), answer("Hello.")]),
        "the text before message 1 in its prompt is missing from the row",
    ),
    "a message is omitted": (
        PLAIN.replace("{%- for message in messages -%}", "{%- for message in messages if message.role != 'user' -%}"),
        Record([user("Hi"), answer("Hello."), user("Go"), answer("Bye")]),
        r"the template drops the content of message 0 \(user\)",
    ),
    "an answer is rendered empty": (
        PLAIN.replace("message.content + '<|im_end|>\\n'", "message.content"),
        Record([user("Hi"), answer("")]),
        "no part of message 1 would be trained on",
    ),
    "a control token that cannot be distinguished from text": (
        PLAIN.replace(
            "message.content + '<|im_end|>\\n'",
            "((message.content + '<|im_end|>\\n') | center(15) if loop.first else message.content + '<|im_end|>\\n')",
        ),
        TALK,
        r'cannot determine whether a control token in " Hi<\|im_end\|>\\n " comes from the template or from message 0',
    ),
    "only the last turn is closed": (
        """{%- for message in messages -%}
        {%- if message.role == 'user' -%}{{- '[INST]' + message.content + '[/INST]' -}}
        {%- else -%}{{- message.content -}}{%- if loop.last -%}{{- eos_token -}}{%- endif -%}{%- endif -%}
        {%- endfor -%}""",
        TALK,
        r'no token ends the answer of message 1, after "\[INST\]Hi\[/INST\] Hello. "',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_undecidable_conversation_is_rejected_with_the_disputed_text(tmp_path, name):
    source, record, said = REFUSED[name]
    with pytest.raises(RecordError, match=said):
        opened(tmp_path, source, name).lay_out(record)


def test_an_answer_with_a_part_rendered_elsewhere_is_rejected():
    # If a message has both content and a tool call, Gemma renders its content after the tool result.
    talk = Record([CALLING.messages[0], answer("I look.", "", CALL), *CALLING.messages[2:]], tools=TOOLS)
    with pytest.raises(RecordError, match=r'content of message 1 is rendered outside its turn: "I look\."'):
        trl_format("gemma4").lay_out(talk)
