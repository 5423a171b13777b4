from __future__ import annotations

import pytest
from template_fixtures import answer, own_format, trl_format, user

from chatmill.errors import RecordError
from chatmill.ledger import Ledger
from chatmill.prepare.unroll import render_unrolled, unrolled
from chatmill.records import Message, Record, ToolCall
from chatmill.rows import Part, Role, Rule

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
    # Without unrolling, the earlier reasoning is dropped.
    assert "why one" not in forgets.tokenizer.decode(forgets.render([CHAT]).ids.tolist())


def test_every_answer_is_trained_once_with_its_reasoning_by_qwen3():
    check(trl_format("qwen3"), [AGENT, CHAT, AGENT])


def test_dropped_reasoning_is_noted_for_each_answer_that_has_some(tmp_path):
    silent = own_format(tmp_path, FORGETS.replace("message.reasoning_content and loop.last", "false"))
    ledger = Ledger()
    rows = rows_of(silent, [CHAT, Record([user("?"), answer("no")])], ledger)
    assert len(rows) == 4
    assert ledger.entries["noted", "reasoning_left_out"].rows == 3


def test_a_template_that_rejects_one_prefix_rejects_the_conversation(tmp_path):
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


ENDS_THE_LAST = """{%- for message in messages -%}
  {{- '<|' + message.role + '|>' + message.content -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- else -%}{{- '</s>' -}}{%- endif -%}
"""


def test_a_template_that_ends_only_the_last_answer_ends_each_in_its_own_row(tmp_path):
    renderer = own_format(tmp_path, ENDS_THE_LAST, control=["<|user|>", "<|assistant|>", "</s>"])
    with pytest.raises(RecordError, match="no token ends the answer of message 1"):
        renderer.render([CHAT])
    rows = rows_of(renderer, [Record(CHAT.messages[:4])], Ledger())
    trained = [renderer.tokenizer.decode(row.ids[row.mask()].tolist()) for row in (rows[:1], rows[1:])]
    assert trained == ["1</s>", "2</s>"]


def test_differences_from_the_prompts_of_earlier_answers_are_not_those_of_the_row(forgets):
    whole, rows = Ledger(), Ledger()
    turns = Record(CHAT.messages[:4])
    forgets.render([turns], ledger=whole)
    rows_of(forgets, [turns], rows)
    assert {reason for _, reason in whole.entries} == {"reasoning_left_out"}
    assert {reason for bucket, reason in rows.entries if bucket == "noted"} == set()


def test_context_that_no_row_trains_has_a_rule_with_the_reason(forgets):
    messages = [
        user("one?"),
        Message("assistant", "1", weight=0.0),
        user("two?"),
        answer("2"),
        user("three?"),
        answer("3"),
    ]
    for train_on, rules in (("assistant", ["FLAG", "EARLIER_ROW", "ROLE"]), ("last", ["FLAG", "ROLE", "ROLE"])):
        ledger = Ledger()
        made = list(unrolled([Record(messages)], forgets, train_on=train_on, on_reject=refuse, ledger=ledger))
        row = render_unrolled(forgets, made, ledger)[len(made[0].rows) - 1 :]
        spans = row.spans[(row.spans["role"] == Role.ASSISTANT) & (row.spans["part"] == Part.CONTENT)]
        assert [Rule(rule).name for rule in spans["rule"]] == rules
        assert spans["weight"].tolist() == [0, 0, 1]


def test_parts_of_an_answer_in_an_earlier_row_have_the_rule_earlier_row():
    renderer = trl_format("qwen3")
    rows = rows_of(renderer, [AGENT], Ledger())[2:]
    earlier = {
        (int(span["message"]), Part(span["part"]).name.lower())
        for span in rows.spans[rows.spans["rule"] == Rule.EARLIER_ROW]
    }
    assert earlier == {(2, "tool_call"), (2, "close"), (4, "content"), (4, "close")}
