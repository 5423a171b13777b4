"""What must stand before an answer: the end of its prompt, from the assistant header on, as plain text.

The prompt for an answer ends with the assistant header: what the template adds to the messages if it is asked for a
generation prompt. An answer begins in the row where this header ends:

    prompt   … Hi<|im_end|>\\n<|im_start|>assistant\\n
    row      … Hi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>
                              context              |answer

White space may differ before the header. Where row and prompt part behind it (`<think>\\n` that only one of them has),
the answer begins where they part. What precedes the header is not compared: templates rewrite earlier messages.

Nothing here knows how an answer was found. It uses plain renderings only, and shares no code with the derivations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from chatmill.errors import RecordError, one_line
from chatmill.format.template.tracing.trace import Rendering

FIELD = "\0"
"""Stands for a character that the conversation says."""
PlainText = Callable[[int, bool], str]
"""The text of the first n messages, with or without the generation prompt; a `RecordError` if there is none."""


class Context(NamedTuple):
    """What stands before an answer, from the assistant header on."""

    text: str
    """What row and prompt have in common."""
    prompt_only: str = ""
    """What only the prompt has behind it."""


class Headers(NamedTuple):
    """What a template writes between the messages of a plain conversation."""

    assistant: str
    """What a generation prompt adds, from its first visible character on."""
    user: str
    """What stands between an answer and the next user message."""


def template_headers(plain: PlainText, words: Sequence[str], token: re.Pattern[str]) -> Headers:
    """The headers of a template; `plain` renders a conversation of at least three messages that hold these words."""
    try:
        user = plain(3, False).split(words[1], 1)[1].split(words[2], 1)[0]
    except (RecordError, IndexError):
        user = ""
    try:
        header = _added(plain(1, True), plain(1, False), token)
        if not header:
            # A template may write the header whether it is asked for a prompt or not. Then it ends every rendering, and
            # what stands there does not stand before the next message.
            after_question, after_answer = (
                plain(1, False).rsplit(words[0], 1)[1],
                plain(2, False).rsplit(words[1], 1)[1],
            )
            header = "" if user.startswith(after_answer) else _common_end(after_question, after_answer, token).lstrip()
    except (RecordError, IndexError):
        header = ""
    return Headers(header, user)


class ContextFinder:
    """Finds what must stand before each answer of one conversation."""

    def __init__(
        self,
        full: Rendering,
        plain: PlainText,
        headers: Headers,
        *,
        token: re.Pattern[str],
        text_tokens: Collection[str],
    ) -> None:
        """`token` matches control tokens, of which `text_tokens` are those that text of a message may become."""
        self.text = full.text
        self.literals = "".join(
            piece.text if piece.source is None else FIELD * len(piece.text) for piece in full.pieces
        )
        """The text with null characters in place of what the conversation says."""
        self.plain, self.headers, self.token, self.text_tokens = plain, headers, token, text_tokens

    def context(self, message: int, start: int, last_text: str) -> tuple[Context, tuple[str, ...]]:
        """The context of the answer that begins at `start`, and how row and prompt differ otherwise.

        `last_text` is that of the message before it.
        """
        prompt, header = self._prompt(message)
        if prompt is None:
            return self._common_with(header, message, start), ()
        if not header:
            if self._is_context(usual := self.headers.assistant, size := self._before(usual, start), start):
                return Context(usual[:size], usual[size:]), ("header_not_in_prompt",)
            return self._without_header(message, start, prompt, "", last_text)
        if not self._is_context(header, self._before(header, start), start) and not self._is_usual(header):
            # The turn goes on, as after a tool result: what the prompt adds is no header.
            return self._without_header(message, start, prompt[: -len(header)], header, last_text)
        context = self._common_with(header, message, start)
        notes = ["parts_behind_header"] if context.prompt_only else []
        before, prompted = self.text[: start - len(context.text)], prompt[: len(prompt) - len(header)]
        if before.rstrip() != prompted.rstrip():
            notes.append("history_rewritten")
        elif before != prompted:
            notes.append("space_before_header")
        return context, tuple(notes)

    def repeated_header(self, start: int, stop: int) -> tuple[int, int] | None:
        """Where the template writes the assistant header again, and where that ends; None if nowhere."""
        header = self.headers.assistant
        core = header[: self._core(header)]
        at = self.literals.find(core, start, stop) if core else -1
        return None if at < 0 else (at, at + common_prefix(self.literals[at:stop], header, self.token))

    def continued(self, message: int, start: int) -> Context:
        """The context of a part of an answer that begins behind a repeated header."""
        return self._common_with(self.headers.assistant, message, start)

    def _prompt(self, message: int) -> tuple[str | None, str]:
        """The prompt and its header. Without a prompt (it may not begin with an answer): the header of others."""
        usual = self.headers.assistant
        try:
            prompt = self.plain(message, True)
        except RecordError as error:
            if not usual:
                what = f"message {message} is an answer that no prompt asks for: {error.what}"
                raise RecordError(what, "begin with what it answers", kind="prompt_mismatch") from None
            return None, usual
        if usual and prompt.endswith(usual):
            return prompt, usual
        try:
            return prompt, _added(prompt, self.plain(message, False), self.token)
        except RecordError:
            return prompt, ""

    def unmatched(self, message: int, start: int) -> str:
        """What the prompt has behind the part of its header that stands before `start`."""
        header = self._prompt(message)[1]
        return header[self._before(header, start) :]

    def _common_with(self, header: str, message: int, start: int) -> Context:
        """The header, or as much of it as row and prompt share."""
        size = self._before(header, start)
        if not self._is_context(header, size, start):
            raise self._mismatch(message, start, header)
        return Context(header[:size], header[size:])

    def _is_context(self, header: str, size: int, start: int) -> bool:
        """Whether so much of a header tells an assistant, and row and prompt part behind it."""
        common = common_prefix(self.text[start - size :][: len(header) + 1], header, self.token)
        if self.literals[start : start + 1] == FIELD:
            # Text of a message is the same as a token of the prompt only if it may become one.
            tokens = (match for match in self.token.finditer(header, size) if match[0] not in self.text_tokens)
            common = min(common, next((match.start() for match in tokens), common))
        return size > 0 and size >= self._core(header) and size == common

    def _is_usual(self, header: str) -> bool:
        """Whether a header opens a turn as that of other prompts does."""
        usual = self.headers.assistant
        return header.startswith(usual[: self._core(usual)])

    def _before(self, header: str, start: int) -> int:
        """How much of a header stands before `start`."""
        return next((size for size in range(len(header), 0, -1) if self.text.endswith(header[:size], 0, start)), 0)

    def _core(self, header: str) -> int:
        """How much of a header tells it from that of a user: up to the end of the first word or token that differs."""
        same = next((n for n in range(len(header), 0, -1) if header[:n] in self.headers.user), 0)
        if same == len(header):
            return same
        for match in re.finditer(rf"(?:{self.token.pattern})|\w+|\W", header):
            if match.end() > same and match[0].strip():
                return match.end()
        return len(header)

    def _without_header(
        self, message: int, start: int, prompt: str, added: str, last_text: str
    ) -> tuple[Context, tuple[str, ...]]:
        """The context where a prompt adds no header: what follows the message before, from its last token on.

        `added` is what it adds instead.
        """
        # Control tokens are of the template, whatever the message says.
        masked = self.token.sub(lambda match: "\0" * len(match[0]), prompt)
        at = masked.rfind(last_text) if last_text else -1
        tail = prompt[at + len(last_text) :] if at >= 0 else prompt
        tokens = list(self.token.finditer(tail))
        header = tail[tokens[-1].start() :] if tokens else tail.lstrip()
        before = self.text[:start]
        if before == prompt:
            return Context(header, added), (("parts_behind_header",) if added else ())
        # They may part in white space at the end of the prompt.
        size = len(header) if before.endswith(header) else len(header.rstrip())
        if not size or not before.endswith(header[:size]) or not _visible(before).endswith(_visible(tail)):
            raise self._mismatch(message, start, tail)
        notes = ["parts_behind_header"] if added or size < len(header) else []
        notes.append("space_before_header" if _visible(before) == _visible(prompt) else "history_rewritten")
        return Context(header[:size], header[size:] + added), tuple(notes)

    def _mismatch(self, message: int, start: int, header: str) -> RecordError:
        before = one_line(self.text[max(0, start - 40) : start], 60)
        what = f'message {message} begins behind "{before}", its prompt ends with "{one_line(header[-60:], 80)}"'
        right = "the template must open an answer as it prompts for it; leave the record out"
        return RecordError(what, right, kind="prompt_mismatch")


def _added(prompt: str, without: str, token: re.Pattern[str]) -> str:
    """What a prompt adds, without leading white space; a token in which they part is added as a whole."""
    return prompt[common_prefix(prompt, without, token) :].lstrip()


def common_prefix(one: str, other: str, token: re.Pattern[str]) -> int:
    """The length of the common prefix, without splitting a token."""
    size = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    for text in (one, other):
        size = next((match.start() for match in token.finditer(text) if match.start() < size < match.end()), size)
    return size


def _common_end(one: str, other: str, token: re.Pattern[str]) -> str:
    """The common suffix, without splitting a token."""
    inside = {at for match in token.finditer(one) for at in range(match.start() + 1, match.end())}
    return next((one[at:] for at in range(len(one)) if at not in inside and other.endswith(one[at:])), "")


def _visible(text: str) -> str:
    return "".join(text.split())
