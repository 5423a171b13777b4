"""Templates that forget earlier reasoning: unrolled, each answer is trained once, as the server is to give it."""

from __future__ import annotations

import pytest
from template_fixtures import answer, own_format, trl_format, user

from chatmill.errors import RecordError
from chatmill.ledger import Ledger
from chatmill.prepare.unroll import render_unrolled, unrolled
from chatmill.records import Message, Record, ToolCall
from chatmill.rows import Role

FORGETS = """{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' -}}
  {%- if message.reasoning_content and loop.last -%}
    {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
  {%- endif -%}
  {{- message.content | trim + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
CALL = ToolCall("lookup", '{"word":"fox"}', id="c1")
CHAT = Record([user("one?"), answer("1", "why one"), user("two?"), answer("2", "why two"), answer("3", "why three")])
AGENT = Record(
    [
        Message("system", "Look it up."),
        user("fox?"),
        answer("", "I look.", CALL),
        Message("tool", "an animal", tool_call_id="c1", name="lookup"),
        answer("An animal.", "It is there."),
        user("sure?"),
        answer("Yes.", "I am."),
    ]
)


def refuse(fault: RecordError) -> None:
    raise fault


def rows_of(renderer, records, ledger):
    made = list(unrolled(records, renderer, train_on="assistant", on_reject=refuse, ledger=ledger))
    return render_unrolled(renderer, made, ledger)


@pytest.fixture
def forgets(tmp_path):
    return own_format(tmp_path, FORGETS)


def check(renderer, records: list[Record]) -> None:
    ledger = Ledger()
    rows = rows_of(renderer, records, ledger)
    rows.check()
    row = 0
    for record in records:
        for number, message in enumerate(record.messages):
            if message.role != "assistant":
                continue
            one = rows[row : row + 1]
            whole, prompt = renderer.text(record, number + 1), renderer.text(record, number, prompt=True)
            assert renderer.tokenizer.decode(one.ids.tolist()) == whole
            assert whole.startswith(prompt)
            trained = renderer.tokenizer.decode(one.ids[one.mask()].tolist())
            assert whole[len(prompt) :] in (trained, f"{trained}\n")
            assert message.content in trained and message.reasoning in trained
            assert set(one.spans["message"][one.spans["weight"] > 0].tolist()) == {number}
            row += 1
    assert row == len(rows)
    assert ledger.total("rendered").tokens + ledger.total("repeated").tokens == len(rows.ids)
    assert ("noted", "reasoning_left_out") not in ledger.entries


def test_every_answer_is_trained_once_with_its_reasoning_by_a_small_template(forgets):
    turns = Record([*CHAT.messages[:4], user("three?"), answer("3", "why three")])
    check(forgets, [turns, turns, Record([user("?"), answer("no", "hm")])])
    # Not so without unrolling.
    assert "why one" not in forgets.tokenizer.decode(forgets.render([CHAT]).ids.tolist())


def test_every_answer_is_trained_once_with_its_reasoning_by_qwen3():
    check(trl_format("qwen3"), [AGENT, CHAT, AGENT])


def test_reasoning_that_the_template_never_writes_is_noted_for_each_answer_that_has_some(tmp_path):
    silent = own_format(tmp_path, FORGETS.replace("message.reasoning_content and loop.last", "false"))
    ledger = Ledger()
    rows = rows_of(silent, [CHAT, Record([user("?"), answer("no")])], ledger)
    assert len(rows) == 4
    assert ledger.entries["noted", "reasoning_left_out"].rows == 3


def test_a_template_that_refuses_one_prefix_refuses_the_conversation(tmp_path):
    strict = own_format(
        tmp_path, FORGETS + "{%- if messages | length == 2 -%}{{ raise_exception('too short') }}{%- endif -%}"
    )
    faults, ledger = [], Ledger()
    records = [Record(CHAT.messages, file="chat.jsonl", line=7), Record([user("?")], file="chat.jsonl", line=8)]
    made = list(unrolled(records, strict, train_on="assistant", on_reject=faults.append, ledger=ledger))
    assert [each.record.line for each in made] == [8]
    assert [(fault.file, fault.line, "too short" in str(fault)) for fault in faults] == [("chat.jsonl", 7, True)]
    rows = render_unrolled(strict, made, ledger)
    assert Role.ASSISTANT not in rows.spans["role"] and not rows.mask().any()
