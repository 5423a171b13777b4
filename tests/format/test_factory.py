from __future__ import annotations

import json

import numpy as np
import pytest

from chatmill.errors import DataError
from chatmill.format import (
    PRESETS,
    TEMPLATE,
    TemplateOptions,
    control_tokens_from_json,
    open_renderer,
    renderer_from_json,
)
from chatmill.records import Message, Record
from chatmill.tokenizer import open_tokenizer, train_bpe

RECORDS = [
    Record([Message("user", "hi"), Message("assistant", "yo"), Message("user", "<|eot|>"), Message("assistant", "no")]),
    Record([Message("system", "s"), Message("user", "bye"), Message("assistant", "so long", reasoning="hm")]),
]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def rows(format):
    (made,) = format.render_chunks(format.renderable(RECORDS))
    return made


def same(one, other) -> None:
    assert one.to_json() == other.to_json()
    first, second = rows(one), rows(other)
    assert first.ids.tolist() == second.ids.tolist()
    assert np.array_equal(first.spans, second.spans)


def reopened(format, spec: str):
    value = json.loads(json.dumps(format.to_json()))
    tokenizer = open_tokenizer(spec, control=control_tokens_from_json(value), add_tokens=True)
    return renderer_from_json(value, tokenizer, spec=spec, where="model")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_restored_from_json_and_from_its_name(name):
    format = open_renderer(name, "bytes")
    same(reopened(format, "bytes"), format)
    same(renderer_from_json(name, format.tokenizer, spec="bytes", where="model"), format)
    assert control_tokens_from_json(name) == control_tokens_from_json(format.to_json()) == format.format.tokens


def test_a_chat_template_is_restored_with_all_its_options(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(
        train_bpe(["some words"], vocab_size=270, control=["<|im_start|>", "<|im_end|>"])
    )
    config = {"chat_template": CHAT + "{{ mood }}", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    format = open_renderer(
        TEMPLATE, str(tmp_path), template=TemplateOptions(arguments=["mood=fine"], date="2025-01-31")
    )
    again = reopened(format, str(tmp_path))
    same(again, format)
    assert again.arguments == {"mood": "fine"}


@pytest.mark.parametrize(
    "value", [None, "chatlm", {}, {"name": "template"}, {"name": "x", "tokens": {"eot": "<|eot|>"}}, 7]
)
def test_an_invalid_format_is_one_line(value):
    with pytest.raises(DataError, match=r"^model: .*set the format with --format$"):
        renderer_from_json(value, open_tokenizer("bytes"), spec="bytes", where="model")


def test_a_format_with_unknown_keys_is_rejected():
    value = open_renderer("primer", "bytes").to_json() | {"colour": "red"}
    with pytest.raises(DataError, match="model: the format primer was stored by another version"):
        renderer_from_json(value, open_tokenizer("bytes"), spec="bytes", where="model")
