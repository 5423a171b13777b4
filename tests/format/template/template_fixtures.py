from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

import trl
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from chatmill.format import TemplateOptions, TemplateRenderer, open_renderer
from chatmill.records import Message, Record, ToolCall
from chatmill.tokenizer import train_bpe

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
ORIGINALS = sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))
TRAINING = sorted(path.stem for path in TEMPLATES.glob("*_training.jinja"))

_TOKEN = re.compile(
    r"""<\|[^|<>\n]{1,40}\|>|<｜[^｜\n]+｜>|<\|"\|>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?INST\]|\[gMASK\]|<sop>
    |</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn|start_of_image|image|end_of_utterance|arg_key
    |arg_value)>""",
    re.VERBOSE,
)
TOOLS = (
    '{"type":"function","function":{"name":"lookup","description":"Find a word.","parameters":{"type":"object",'
    '"properties":{"word":{"type":"string","description":"Which word."},"deep":{"type":"boolean"}},'
    '"required":["word"]}}}',
)


def control_strings(*sources: str) -> list[str]:
    return sorted({token for source in sources for token in _TOKEN.findall(source)} | {"<s>", "</s>"})


def write_tokenizer(folder: Path, control: list[str], *, vocab_size: int = 700, **config: object) -> Path:
    texts = ["The quick brown fox jumps over the lazy dog, and the answer is in the user's assistant. " * 3] * 4
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(train_bpe(texts, vocab_size=vocab_size, control=control))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", **config}))
    return folder


def read(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


@lru_cache(1)
def trl_tokenizer() -> Path:
    import tempfile

    control = control_strings(*(path.read_text("utf-8") for path in TEMPLATES.glob("*.jinja")))
    return write_tokenizer(Path(tempfile.mkdtemp()) / "trl", control, vocab_size=900)


@lru_cache(1)
def peer() -> PreTrainedTokenizerFast:
    logging.set_verbosity_error()
    return PreTrainedTokenizerFast(
        tokenizer_file=str(trl_tokenizer() / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )


def open_template(tokenizer: str, **options: object) -> TemplateRenderer:
    """Open the chat template of a tokenizer folder; keyword arguments are passed to `TemplateOptions`."""
    renderer = open_renderer("template", tokenizer, template=TemplateOptions(**options))
    assert isinstance(renderer, TemplateRenderer)
    return renderer


@lru_cache(4)
def trl_format(name: str, mask: str = "derived", allow_no_end_token: bool = False) -> TemplateRenderer:
    template = str(TEMPLATES / f"{name}.jinja")
    return open_template(str(trl_tokenizer()), chat_template=template, mask=mask, allow_no_end_token=allow_no_end_token)


def own_format(tmp_path: Path, source: str, *arguments: str, control: list[str] | None = None, **config: object):
    folder = write_tokenizer(tmp_path / "own", control or control_strings(source), **config)
    (folder / "chat_template.jinja").write_text(source)
    return open_template(str(folder), arguments=arguments)


def messages_of(format: TemplateRenderer, record: Record) -> tuple[list[dict], list[dict] | None]:
    """Convert a record to the messages and tools that a user passes to transformers, without using chatmill's code."""
    style = format.templates[bool(record.tools)].style
    messages = []
    for message in record.messages:
        content = [{"type": "text", "text": message.content}] if style.parts else message.content
        out = {"role": message.role, "content": content}
        if message.reasoning:
            out["reasoning_content"] = message.reasoning
        if message.tool_calls:
            out["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments_text if style.arguments_as_text else json.loads(call.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        for key in ("name", "tool_call_id"):
            if getattr(message, key) is not None:
                out[key] = getattr(message, key)
        messages.append(out)
    return messages, [json.loads(tool) for tool in record.tools] or None


def peer_ids(format: TemplateRenderer, record: Record, **arguments: object) -> list[int]:
    messages, tools = messages_of(format, record)
    source = format.templates[bool(record.tools)].source
    return list(
        peer().apply_chat_template(
            messages, tools=tools, chat_template=source, tokenize=True, return_dict=False, **arguments
        )
    )


def peer_text(format: TemplateRenderer, record: Record, **arguments: object) -> str:
    messages, tools = messages_of(format, record)
    source = format.templates[bool(record.tools)].source
    return peer().apply_chat_template(messages, tools=tools, chat_template=source, tokenize=False, **arguments)


def user(text: str) -> Message:
    return Message("user", text)


def answer(text: str, reasoning: str = "", *calls: ToolCall) -> Message:
    return Message("assistant", text, reasoning, calls)


def trained_texts(format: TemplateRenderer, record: Record) -> dict[int, str]:
    rows = format.render([record])
    rows.check()
    out: dict[int, str] = {}
    for span, start, stop in zip(rows.spans, rows.span_start[:-1], rows.span_start[1:], strict=True):
        if span["weight"] > 0:
            message = int(span["message"])
            out[message] = out.get(message, "") + format.tokenizer.decode(rows.ids[start:stop].tolist())
    return out
