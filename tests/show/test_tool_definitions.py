from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import trl
from show_fixtures import make

from chatmill.errors import ChatmillError
from chatmill.show.dataset import open_view
from chatmill.show.explain import explain_token
from chatmill.show.row_view import part_name, span_views, turn_name, turns
from chatmill.show.terminal import conversation_lines
from chatmill.show.viewer import Viewer
from chatmill.tokenizer import train_bpe

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CONTROL = re.compile(r"<\|[^|<>\n]{1,40}\|>|<｜[^｜\n]+｜>|<\|\"\|>|<\|[a-z_]+>|<[a-z_]+\|>")
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup_word",
        "description": "Find a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
CHAT = [{"role": "user", "content": "What is 7 * 6?"}, {"role": "assistant", "content": "It is 42."}]


def record(*messages: dict, **more: object) -> str:
    return json.dumps({"messages": [*messages, *CHAT], **more}) + "\n"


RECORDS = [record(tools=[TOOL]), record({"role": "system", "content": "Be brief."}, tools=[TOOL]), record()]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    sources = [path.read_text("utf-8") for path in TEMPLATES.glob("*.jinja")]
    control = sorted({token for source in sources for token in CONTROL.findall(source)} | {"<s>", "</s>"})
    (folder / "tokenizer.json").write_bytes(train_bpe(["The answer is 42. " * 4], vocab_size=900, control=control))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return str(folder)


@pytest.mark.parametrize("name", ["gemma4_v5", "gptoss", "lfm2", "llama3_1", "nemotron_3_nano", "qwen2_5", "qwen3"])
def test_published_templates_have_spans_named_tool_definitions(name, tokenizer, tmp_path):
    template = str(TEMPLATES / f"{name}.jinja")
    try:
        shown = make(tmp_path, RECORDS, format="template", tokenizer=tokenizer, chat_template=template)
    except ChatmillError as refused:
        pytest.skip(f"this TRL version's template is refused: {refused}")
    view = open_view(shown.path, tokenizer)
    for episode, defines in enumerate([True, True, False]):
        row = view.row("train", episode)
        texts = {
            view.text.text(row.ids[span.start : span.stop].tolist()): part_name(row, span, view.text)
            for span in span_views(row)
        }
        assert [name == "tool definitions" for text, name in texts.items() if "lookup_word" in text] == [True] * defines
        assert list(texts.values()).count("tool definitions") == defines


def test_a_format_that_adds_a_system_message_names_it_after_the_definitions(tmp_path):
    view = make(tmp_path, RECORDS, format="chatml")
    names = [
        [turn_name(row, turn, view.text) for turn in turns(row, 0)] for row in (view.row("train", n) for n in range(3))
    ]
    assert names == [
        ["tool definitions", "user 0", "assistant 1"],
        ["system 0", "user 1", "assistant 2"],
        ["user 0", "assistant 1"],
    ]
    headings = [str(line) for line in conversation_lines(view.row("train", 0), view.text, plain=True)]
    assert headings[0] == "tool definitions"
    viewer = Viewer(view, cache=tmp_path / "index")
    answer = viewer.episode("train", 0, 0, "")
    assert [turn["name"] for turn in answer["turns"]] == names[0]
    assert [span["name"] for span in answer["spans"]][:2] == ["open", "tool definitions"]
    [with_text] = [span for span in viewer.episode("train", 1, 0, "")["spans"] if "tool" in span["name"]]
    assert (with_text["role"], with_text["name"]) == ("system", "content and tool definitions")
    assert "part of the tool definitions, from chat.jsonl:1, is context" in explain_token(view, "train", 0, 60).sentence


def test_json_in_a_user_message_is_not_a_tool_definition(tmp_path):
    asked = {"role": "user", "content": json.dumps(TOOL)}
    view = make(tmp_path, [json.dumps({"messages": [asked, CHAT[1]]}) + "\n"], format="chatml")
    row = view.row("train", 0)
    assert {part_name(row, span, view.text) for span in span_views(row)} == {"open", "content", "close"}
