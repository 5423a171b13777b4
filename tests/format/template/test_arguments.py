from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_fixtures import own_format

from chatmill.format.template.template import ChatTemplate
from chatmill.format.template.template_input import Style
from chatmill.records import Message, Record, record_key

HEAD = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<call>"
TAIL = "</call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
CONTROL = ["<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
OWN = '{ "city":"Lisboa",  "days": 3.50 }'
OBJECT = json.loads(OWN)
WRITTEN = {
    # Maps an expression in a template to three values: the rendered text if the record has the arguments as an object,
    # the rendered text if the record has them as a string, and whether the template receives a string.
    "c.function.arguments | tojson": ('{"city": "Lisboa", "days": 3.5}', '{"city": "Lisboa", "days": 3.5}', False),
    "c.function.arguments if c.function.arguments is string else c.function.arguments | tojson": (
        '{"city": "Lisboa", "days": 3.5}',
        '{"city": "Lisboa", "days": 3.5}',
        False,
    ),
    "c.function.arguments.items() | map('join', '=') | join(',')": ("city=Lisboa,days=3.5",) * 2 + (False,),
    "'' + c.function.arguments": ('{"city": "Lisboa", "days": 3.5}', OWN, True),
    # No model was trained on the Python repr of an object, so these templates receive the arguments as a string.
    "c.function.arguments": ('{"city": "Lisboa", "days": 3.5}', OWN, True),
    "c.function.arguments | string": ('{"city": "Lisboa", "days": 3.5}', OWN, True),
    # This template renders neither objects nor strings well, so it receives an object, as it does from inference
    # servers.
    "c.function | string": (f"{{'name': 'weather', 'arguments': {OBJECT}}}",) * 2 + (False,),
}


def conversation(arguments: object) -> Record:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return Record(
        [
            Message("user", "Rain?"),
            Message(role="assistant", content=None, tool_calls=[call]),
            Message("tool", "no"),
            Message("assistant", "No."),
        ]
    )


@pytest.mark.parametrize("expression", WRITTEN)
def test_a_template_that_cannot_render_an_object_gets_the_text_of_the_record(tmp_path, expression):
    of_object, of_text, as_text = WRITTEN[expression]
    format = own_format(tmp_path, HEAD + "{{ " + expression + " }}" + TAIL, control=CONTROL)
    assert format.templates[False].style == Style(arguments_as_text=as_text)
    for arguments, expected in ((OBJECT, of_object), (OWN, of_text)):
        record = conversation(arguments)
        text = (
            f"<|user|>Rain?<|end|><|assistant|><call>{expected}</call><|end|><|tool|>no<|end|><|assistant|>No.<|end|>"
        )
        assert format.text(record) == text
        for _ in range(3):
            rows = format.render([record])
            assert format.tokenizer.decode(rows.ids.tolist()) == text


def test_a_template_that_renders_calls_but_no_results_is_probed_without_results():
    source = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
    source += "{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.arguments }}{% endfor %}{% endfor %}"
    assert ChatTemplate(source, "t", variables={}).style == Style(arguments_as_text=True)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), st.sampled_from([None, 0, 2]), st.booleans())
@settings(max_examples=60)
def test_the_text_of_arguments_is_kept_but_is_not_part_of_the_records_identity(arguments, indent, ascii):
    for separators in ((",", ":"), (", ", ": ")):
        own = json.dumps(arguments, indent=indent, separators=separators, ensure_ascii=ascii)
        given_text, given_object = conversation(own), conversation(arguments)
        assert given_text.messages[1].tool_calls[0].arguments_text == own
        assert given_object.messages[1].tool_calls[0].arguments_text == json.dumps(arguments, ensure_ascii=False)
        assert record_key(given_text) == record_key(given_object)
