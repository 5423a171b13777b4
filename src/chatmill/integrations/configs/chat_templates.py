"""Chat templates for prompt styles, such as Alpaca's, that other trainers implement in code.

A prompt style defines the text around each question. The system prompt precedes the first question.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)


@dataclass(frozen=True)
class PromptStyle:
    """The text around each message of a conversation; `{}` is replaced by the text of the message."""

    question: str
    system: str = "{}\n\n"
    default_system: str = ""
    after_answer: str = ""
    """Text between an answer's end token and the next question."""
    ends_messages: bool = False
    """Whether the end token also follows questions and system texts."""

    def template(self) -> str:
        """Return a Jinja chat template that ends each answer with the tokenizer's EOS token."""
        end = "eos_token" if self.ends_messages else ""
        lines = ["{%- if bos_token is defined and bos_token -%}{{- bos_token -}}{%- endif -%}"]
        if self.default_system:
            lines.append(
                "{%- if messages[0].role != 'system' -%}{{- "
                + _around(self.system, json.dumps(self.default_system, ensure_ascii=True), end)
                + " -}}{%- endif -%}"
            )
        lines += [
            "{%- for message in messages -%}",
            "{%- if message.role == 'system' -%}{{- " + _around(self.system, "message.content", end) + " -}}",
            "{%- elif message.role == 'user' -%}{{- " + _around(self.question, "message.content", end) + " -}}",
            "{%- else -%}{{- message.content + eos_token -}}"
            + (
                "{%- if not loop.last -%}{{- " + _quoted(self.after_answer) + " -}}{%- endif -%}"
                if self.after_answer
                else ""
            ),
            "{%- endif -%}",
            "{%- endfor -%}",
        ]
        return "\n".join(lines) + "\n"


def _around(text: str, inner: str, end: str) -> str:
    """Return a Jinja expression for `text` in which `{}` is replaced by the expressions `inner` and `end`."""
    before, _, after = text.partition("{}")
    parts = [_quoted(before)] if before else []
    parts += [inner, *([end] if end else []), *([_quoted(after)] if after else [])]
    return " + ".join(parts)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=True)


INSTRUCT = PromptStyle("### Instruction:\n{}\n\n### Response:\n", default_system=ALPACA_SYSTEM)
STYLES = {
    "instruct": INSTRUCT,
    "chat": PromptStyle("USER: {}\nASSISTANT:", "SYSTEM: {}\n", ALPACA_SYSTEM),
    "chatml": PromptStyle(
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>system\n{}<|im_end|>\n", ALPACA_SYSTEM
    ),
    "phi": PromptStyle("<|user|>\n{}<|end|>\n<|assistant|>\n", "<|system|>\n{}<|end|>\n", ALPACA_SYSTEM),
}
"""Axolotl's prompt styles for `type: alpaca` and `alpaca:STYLE`."""
NAMED = {
    "alpaca": PromptStyle("### Instruction:\n{}\n\n### Response:\n", default_system=ALPACA_SYSTEM, after_answer="\n\n"),
    "default": PromptStyle("Human: {}\nAssistant:", "System: {}\n", after_answer="\n", ends_messages=True),
}
"""Prompt styles for LLaMA-Factory templates that only wrap messages in fixed text."""
