from __future__ import annotations

import pytest
from template_fixtures import TOOLS, TRAINING, answer, messages_of, open_template, own_format, peer, trl_format, user

from chatmill.errors import RecordError, UsageError
from chatmill.records import Message, Record, ToolCall

RECORDS = [
    Record([user("Hi there"), answer("Hello.")]),
    Record([user("Hi"), answer(" Hello. "), user("And?"), answer("Bye.", "I see.")]),
    Record(
        [
            user("Hi"),
            answer("", "", ToolCall("lookup", '{"word":"sun"}', "c12345678")),
            Message("tool", "a star", name="lookup", tool_call_id="c12345678"),
            answer("A star."),
        ],
        tools=TOOLS,
    ),
]


@pytest.mark.parametrize("name", TRAINING)
def test_the_mask_of_tags_matches_transformers(name):
    format = trl_format(name, "tags")
    compared = 0
    for record in RECORDS:
        messages, tools = messages_of(format, record)
        try:
            rows = format.render([record])
        except RecordError:
            continue
        theirs = peer().apply_chat_template(
            messages,
            tools=tools,
            chat_template=format.templates[bool(tools)].source,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert rows.ids.tolist() == theirs["input_ids"]
        assert rows.mask().astype(int).tolist() == theirs["assistant_masks"]
        compared += 1
    assert compared >= 2


def test_a_template_without_tags_is_rejected(tmp_path):
    source = "{% for m in messages %}{{ '<|a|>' + m.content + '<|b|>' }}{% endfor %}{# {% generation %} #}"
    own_format(tmp_path, source)
    with pytest.raises(UsageError, match="has no generation tags; remove --mask tags"):
        open_template(str(tmp_path / "own"), mask="tags")


def test_an_answer_outside_all_tags_is_rejected_instead_of_masked(tmp_path):
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if loop.last %}{% generation %}{{ m.content }}<|end|>"
        "{% endgeneration %}{% else %}{{ m.content + '<|end|>' }}{% endif %}{% endfor %}"
    )
    own_format(tmp_path, source, control=["<|user|>", "<|assistant|>", "<|end|>"])
    format = open_template(str(tmp_path / "own"), mask="tags")
    assert format.render([Record([user("Hi"), answer("Yo")])]).mask().sum() > 0
    with pytest.raises(RecordError, match=r"no part of message 1 \(assistant\) is trained on"):
        format.lay_out(Record([user("Hi"), answer("Yo"), user("Hi"), answer("Yo")]))
