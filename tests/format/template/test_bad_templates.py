from __future__ import annotations

import json
import re

import pytest
from hostile_templates import ENDLESS, GOOD, PROMPT
from template_fixtures import answer, open_template, own_format, user, write_tokenizer

from chatmill.errors import DataError, RecordError, UsageError
from chatmill.records import Message, Record

TALK = Record([user("Hi"), answer("Hello.")], file="chat.jsonl", line=7, id="a1")


def refused(tmp_path, bad: str) -> RecordError:
    format = own_format(tmp_path, GOOD + PROMPT + "\n" + bad, control=["<|user|>", "<|assistant|>", "<|end|>"])
    with pytest.raises(RecordError) as found:
        format.lay_out(TALK)
    fault = found.value
    assert "\n" not in str(fault)
    assert str(fault).startswith("chat.jsonl:7 (id=a1): ")
    assert "chat_template.jinja:2: " in str(fault)
    return fault


@pytest.mark.parametrize(
    ("bad", "said", "kind"),
    [
        (
            "{{ raise_exception('no\nway') }}",
            r'the template rejects the conversation: "no\\nway"',
            "template_refuses",
        ),
        (
            "{{ 'mode: ' + safety_mode }}",
            "uses an undefined value: 'safety_mode' is undefined; set it with --template-arg safety_mode=…, or change",
            "template_undefined",
        ),
        ("{{ nonsense.x }}", "'nonsense' is undefined; set it with --template-arg nonsense=…", "template_undefined"),
        (
            "{{ messages[0].nothing.x }}",
            "has no attribute 'nothing'; change the template, which fails",
            "template_undefined",
        ),
        ("{{ messages[9].content }}", "the template uses an undefined value", "template_undefined"),
        ("{{ messages[0].content + 1 }}", "the template fails with TypeError", "template_fails"),
        ("{{ 1 / 0 }}", "the template fails with ZeroDivisionError", "template_fails"),
        ("{{ ''.__class__ }}", "blocked by the sandbox", "template_security"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "blocked by the sandbox", "template_security"),
        ("{{ messages.append(1) }}", "blocked by the sandbox", "template_security"),
        ("{{ messages[0].update(role='x') }}", "blocked by the sandbox", "template_security"),
        ("{% set ns = namespace(__init__=1) %}", "blocked by the sandbox", "template_security"),
        ("{{ raise_exception.__globals__ }}", "blocked by the sandbox", "template_security"),
        ("{{ '{0.__class__}'.format(messages) }}", "blocked by the sandbox|TypeError", None),
        ("{{ [1, 2] | random }}", "random functions are not available", "template_refuses"),
        ("{{ lipsum() }}", "random functions are not available", "template_refuses"),
    ],
)
def test_an_error_of_a_template_is_one_line_with_its_location(tmp_path, bad, said, kind):
    fault = refused(tmp_path, bad)
    assert re.search(said, str(fault)), str(fault)
    assert kind is None or fault.kind == kind


@pytest.mark.parametrize("bad", ENDLESS)
def test_a_template_that_loops_or_grows_forever_is_stopped(tmp_path, bad):
    fault = refused(tmp_path, bad)
    assert fault.kind == "template_limit", str(fault)


def test_a_long_conversation_does_not_exceed_the_growth_limit(tmp_path):
    format = own_format(tmp_path, GOOD + PROMPT, control=["<|user|>", "<|assistant|>", "<|end|>"])
    long = Record([user("x" * 2_000_000), answer("y" * 10)])
    assert format.text(long).count("x") == 2_000_000


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for m in messages %}", "chat_template.jinja:1: Unexpected end of template"),
        ("line\n{{ a b }}", "chat_template.jinja:2: expected token 'end of print statement', got 'b'"),
        ("{% include 'other' %}", "chat_template.jinja:1: a chat template cannot read other files"),
        (
            "{% autoescape true %}x{% endautoescape %}",
            "chat_template.jinja:1: autoescape is not available to templates",
        ),
        ("{{ x | nofilter }}", "chat_template.jinja:1: No filter named 'nofilter'"),
    ],
)
def test_an_invalid_template_is_reported_with_its_line(tmp_path, source, said):
    with pytest.raises(DataError) as refused:
        own_format(tmp_path, source)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "undefined",
    [
        *(
            "{{ unk_token }}",
            "{{ messages[0].nothing }}",
            "{% if missing is defined %}x{% endif %}",
            "{{ safety_mode }}",
        ),
        *("{% if safety_mode %}x{% endif %}", "{{ safety_mode | trim ~ ([] | first) }}", "{{ '%s' % safety_mode }}"),
        "{% for x in safety_mode %}{{ x }}{% endfor %}",
    ],
)
def test_an_undefined_variable_renders_as_nothing(tmp_path, undefined):
    format = own_format(tmp_path, GOOD + PROMPT + undefined, control=["<|user|>", "<|assistant|>", "<|end|>"])
    assert format.text(TALK) == "<|user|>Hi<|end|><|assistant|>Hello.<|end|>"
    assert format.derive(TALK).rendering.text == format.text(TALK)


def test_only_a_template_that_renders_nothing_is_reported_as_always_failing(tmp_path):
    source = "{% if messages | length > 2 %}{{ 1 / 0 }}{% endif %}" + GOOD + PROMPT
    format = own_format(tmp_path, source, control=["<|user|>", "<|assistant|>", "<|end|>"])
    with pytest.raises(RecordError, match=r"ZeroDivisionError.*; change the conversation or the template"):
        format.text(Record([user("Hi"), answer("Hello."), user("Bye")]))


def test_an_incomplete_turn_and_an_empty_record_are_rejected(tmp_path):
    format = own_format(tmp_path, GOOD + PROMPT, control=["<|user|>", "<|assistant|>", "<|end|>"])
    with pytest.raises(RecordError, match="message 1 is incomplete"):
        format.lay_out(Record([user("Hi"), Message("assistant", "Hel", complete=False)]))
    with pytest.raises(RecordError, match="the record has no messages"):
        format.lay_out(Record([]))


@pytest.mark.parametrize(
    ("file", "content", "place"),
    [
        ("tokenizer_config.json", "SOURCE", "tokenizer_config.json:chat_template:3"),
        ("chat_template.json", "SOURCE", "chat_template.json:chat_template:3"),
        (
            "tokenizer_config.json",
            [{"name": "default", "template": "SOURCE"}],
            "tokenizer_config.json:chat_template.default:3",
        ),
    ],
)
def test_a_template_inside_a_json_file_is_reported_with_its_key_and_line(tmp_path, file, content, place):
    def written(source):
        text = json.dumps({"chat_template": content}).replace('"SOURCE"', json.dumps(source))
        (folder / file).write_text(text)
        return open_template(str(folder))

    folder = write_tokenizer(tmp_path / "own", ["<|user|>", "<|assistant|>", "<|end|>"])
    with pytest.raises(RecordError, match=re.escape(f"{place}: the template fails with ZeroDivisionError")):
        written("{# one #}\n{# two #}\n{{ 1 / 0 }}").text(TALK)
    with pytest.raises(DataError, match=re.escape(f"{place}: unexpected '}}'")):
        written("{# one #}\n{# two #}\n{{ } }}")
    assert written("{# one #}\n{# two #}\nHi").templates[False].quote(3).endswith(f"{place}: Hi")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no chat template; pass a template with --chat-template FILE"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "rag", "template": ""}]}'}, "rag but no default"),
        (
            {"tokenizer_config.json": '{"chat_template": [{"name": "default"}]}'},
            "must be a list of objects with a name and a template",
        ),
        ({"tokenizer_config.json": '{"chat_template": 3}'}, "chat_template is 3; expected a string"),
        ({"tokenizer_config.json": "[1]"}, "tokenizer_config.json: expected a JSON object"),
        ({"generation_config.json": '{"eos_token_id": "x"}', "chat_template.jinja": GOOD}, "eos_token_id is 'x'"),
        ({"chat_template.jinja": b"\xff"}, "chat_template.jinja: cannot be read"),
    ],
)
def test_a_folder_with_a_missing_or_invalid_part_is_reported(tmp_path, files, said):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((DataError, UsageError), match=said):
        open_template(str(tmp_path))


@pytest.mark.parametrize("argument", ["enable", "=1", "messages=[]", "a b=1"])
def test_an_invalid_template_argument_is_rejected(tmp_path, argument):
    with pytest.raises(UsageError, match="is not NAME=VALUE"):
        own_format(tmp_path, GOOD + PROMPT, argument)
