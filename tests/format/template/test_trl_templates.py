from __future__ import annotations

import importlib.util
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from template_fixtures import (
    ORIGINALS,
    TOOLS,
    answer,
    peer_ids,
    peer_text,
    trained_texts,
    trl_format,
    user,
)

from chatmill.errors import RecordError
from chatmill.records import Message, Record, ToolCall

ROOT = Path(__file__).resolve().parents[3]
CALL = ToolCall("lookup", '{"word":"gammaword","deep":true}', "call12345")
RESULT = Message("tool", "deltaword", name="lookup", tool_call_id="call12345")
# Each text contains a unique word, so that tests notice if the text of one message appears in another.
CONVERSATIONS = {
    "plain": Record([user("alphaword one"), answer("betaword two")]),
    "system": Record([Message("system", "omegaword rules"), user("alphaword one"), answer("betaword two")]),
    "turns": Record(
        [
            user("alphaword"),
            answer("betaword"),
            user("gammaword"),
            answer("deltaword"),
            user("sigmaword"),
            answer("omicron."),
        ]
    ),
    "spaces": Record([user("  alphaword\n"), answer("\n betaword  "), user(" gammaword"), answer("  deltaword\n\n")]),
    "reasoning": Record(
        [user("alphaword"), answer("betaword", "kappaword"), user("gammaword"), answer("deltaword", "lambdaword")]
    ),
    "tools": Record([user("alphaword"), answer("", "", CALL), RESULT, answer("betaword")], tools=TOOLS),
    "tools and reasoning": Record(
        [user("alphaword"), answer("", "kappaword", CALL), RESULT, answer("betaword", "lambdaword")], tools=TOOLS
    ),
}
NO_SYSTEM = {"gemma"}
NO_TOOLS = {
    *("cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next"),
    *("phi3", "phi3_5", "qwen2_5_vl", "smolvlm"),
}
# The header of an answer in each family, and the tokens that may end it, written by hand.
CHATML = ("<|im_start|>assistant\n", {"<|im_end|>"})
FAMILIES = {
    "cohere": ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", {"<|END_OF_TURN_TOKEN|>"}),
    "cohere2": ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>", {"<|END_OF_TURN_TOKEN|>"}),
    "deepseek": ("<｜Assistant｜>", {"<｜end▁of▁sentence｜>"}),
    "diffusion_gemma": ("<|turn>model\n", {"<turn|>", "<|tool_response>"}),
    "gemma": ("<start_of_turn>model\n", {"<end_of_turn>"}),
    "gemma4": ("<|turn>model\n", {"<turn|>", "<|tool_response>"}),
    "glm4moe": ("<|assistant|>", {""}),
    "gptoss": ("<|start|>assistant", {"<|return|>", "<|end|>", "<|call|>"}),
    "idefics3": ("Assistant:", {"<end_of_utterance>"}),
    "lfm2": CHATML,
    "llama3": ("<|start_header_id|>assistant<|end_header_id|>\n\n", {"<|eot_id|>"}),
    "llava_next": (" [/INST]", {"</s>"}),
    "muse_glimmer": ("<|start|>assistant", {"<|eot|>"}),
    "nemotron": CHATML,
    "phi3": ("<|assistant|>\n", {"<|end|>"}),
    "qwen": CHATML,
    "smolvlm": ("Assistant:", {"<end_of_utterance>"}),
}
# In these templates, the turn continues after a tool result, without a header.
GOES_ON = {
    "deepseekv3": "<｜tool▁outputs▁end｜>",
    **{f"gemma4{v}": "<tool_response|>" for v in ("", "_v3", "_v4", "_v5")},
}

GIVEN = ("", "<think>", "<think>\n", "<think>\n\n</think>\n\n")


def family(name: str) -> tuple[str, set[str]]:
    return FAMILIES[max((key for key in FAMILIES if name.startswith(key)), key=len)]


def supported(name: str) -> dict[str, Record]:
    return {
        kind: record
        for kind, record in CONVERSATIONS.items()
        if not (kind == "system" and name in NO_SYSTEM) and not (record.tools and name in NO_TOOLS)
    }


NO_END = {"glm4moe"}
"""Templates without a token at the end of answers."""
# With module scope, pytest groups tests by template, so each template is opened only once.
each_template = pytest.mark.parametrize("name", ORIGINALS, scope="module")


@each_template
def test_ids_and_text_match_transformers(name):
    format = trl_format(name, allow_no_end_token=name in NO_END)
    for kind, record in supported(name).items():
        assert format.text(record) == peer_text(format, record), kind
        ids = peer_ids(format, record)
        for _ in range(3):
            # Rendering also runs the check that test_row_check.py tests.
            rows = format.render([record])
            rows.check()
            assert rows.ids.tolist() == ids, kind


@each_template
def test_exactly_the_text_from_the_header_to_the_end_of_each_answer_is_trained(name):
    format = trl_format(name, allow_no_end_token=name in NO_END)
    header, terminators = family(name)
    for kind, record in supported(name).items():
        trained = trained_texts(format, record)
        text = format.text(record)
        answers = [number for number, message in enumerate(record.messages) if message.role == "assistant"]
        assert sorted(trained) == answers, kind
        place = 0
        for number in answers:
            message, got = record.messages[number], trained[number].strip()
            others = [m.content for n, m in enumerate(record.messages) if n != number] + [
                m.reasoning for n, m in enumerate(record.messages) if n != number
            ]
            assert not [other for other in others if other.strip() and other.strip() in got], (kind, number)
            # Only control tokens may occur between the content and the end token.
            said = message.content.strip() or "gammaword"
            assert said in got, (kind, number)
            rest = got[got.rindex(said) + len(said) :]
            terminator = next(t for t in sorted(terminators, key=len, reverse=True) if rest.endswith(t))
            rest = rest.removesuffix(terminator)
            if message.content:
                assert rest.strip() in ("", "<|END_RESPONSE|>"), (kind, number)
            # The answer starts after the header and any text that the prompt adds to it. gpt-oss renders an answer as
            # several turns; the headers between them are not in the mask.
            first = re.split(r"(?<=<\|end\|>|<\|eom\|>)", trained[number], maxsplit=1)[0]
            place = text.index(first, place)
            goes_on = number > 0 and record.messages[number - 1].role == "tool" and name in GOES_ON
            opener = GOES_ON[name] if goes_on else header
            assert text[:place].endswith(tuple(opener + given for given in GIVEN)), (kind, number)
            place += len(first)


def test_an_answer_in_several_turns_is_trained_without_the_headers_between_them():
    trained = trained_texts(trl_format("gptoss"), CONVERSATIONS["reasoning"])
    assert trained == {
        1: "<|channel|>final<|message|>betaword<|end|>",
        3: "<|channel|>analysis<|message|>lambdaword<|end|><|channel|>final<|message|>deltaword<|return|>",
    }


@pytest.mark.parametrize("name", sorted(NO_END))
def test_answers_without_an_end_token_are_rejected(name):
    with pytest.raises(RecordError, match="no token ends the answer of message 1"):
        trl_format(name).lay_out(CONVERSATIONS["plain"])


@each_template
def test_tool_calls_that_a_template_cannot_render_are_rejected_instead_of_lost(name):
    format = trl_format(name, allow_no_end_token=name in NO_END)
    with pytest.raises(RecordError) if name in NO_TOOLS else nullcontext():
        format.lay_out(CONVERSATIONS["tools"])


IN_THE_TABLE = [
    name
    for at, name in enumerate(ORIGINALS)
    if at % 4 == 0 or name in ("glm4moe", "deepseekv3", "qwen3", "gemma", "gptoss")
]


@pytest.fixture(scope="module")
def table():
    path = ROOT / "scripts" / "template_table.py"
    spec = importlib.util.spec_from_file_location("template_table", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module, module.lines(IN_THE_TABLE)


def test_all_originals_except_one_certify_and_a_rejection_quotes_the_template(table):
    _, lines = table
    refused = {line.name: [f for f in line.findings if not f.passed] for line in lines if not line.certified}
    assert [line.name for line in lines] == IN_THE_TABLE
    assert sorted(refused) == ["glm4moe"]
    (finding,) = refused["glm4moe"]
    assert finding.name == "terminator"
    assert "glm4moe.jinja:66: {{ '\\n' + content.strip() }}" in finding.text


def test_a_template_that_renders_calls_but_no_tool_definitions_gets_a_warning(table):
    _, lines = table
    found = {line.name: finding for line in lines for finding in line.findings if finding.name == "tools"}
    left_out = [name for name, finding in found.items() if "tool definitions are dropped" in finding.text]
    assert left_out == ["deepseekv3"] and found["deepseekv3"].level == "WARN"
    assert (found["qwen3"].level, found["gemma"].level) == ("PASS", "WARN")


def test_both_derivations_apply_to_at_least_half_of_the_templates(table):
    _, lines = table
    assert sum(line.starts == line.origin and line.stops > 0 for line in lines) * 2 >= len(lines)


def test_the_page_on_templates_has_the_table_that_the_command_prints(table):
    module, lines = table
    page = (ROOT / "docs" / "explanation" / "templates.md").read_text("utf-8").split(module.BEGIN)[1]
    shown = {row.split("`")[1]: row for row in re.findall(r"^\| `.*$", page.split(module.END)[0], re.MULTILINE)}
    assert list(shown) == ORIGINALS and len(ORIGINALS) == 41
    certified = sum("| yes |" in row for row in shown.values())
    assert certified == 40
    assert f"\n{certified} of {len(ORIGINALS)} templates pass `certify`. Both methods find answers in " in page
    made = module.markdown(lines)
    head, _, rows = made.partition("|---|---|---:|---:|---|\n")
    assert head.split("\n", 1)[1] in page
    rows, _, refusals = rows.partition("\n\n")
    assert [shown[name] for name in IN_THE_TABLE] == rows.split("\n")
    assert f"\n\n{refusals}\n{module.END}" in page
