"""Find the context that must precede an answer: the end of the prompt, starting at the assistant header.

The prompt for an answer ends with the assistant header, which the template adds if `add_generation_prompt` is true. In
the row, the answer starts after the assistant header:

    prompt   … Hi<|im_end|>\\n<|im_start|>assistant\\n
    row      … Hi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>
                              context              |answer

The whitespace before the header can differ between the row and the prompt. The row and the prompt can also diverge
after the header, for example if only one of them contains `<think>\\n`; the answer then starts at the first difference.
Text before the header is not compared, because templates rewrite earlier messages.

This module shares no code with `by_origin` and `by_prefix`, so that it can check their results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from chatmill.errors import RecordError, one_line
from chatmill.format.template.tracing.trace import Rendering

FIELD = "\0"
"""The placeholder for each character that comes from a field of the conversation."""
PlainText = Callable[[int, bool], str]
"""Renders the first n messages, with or without the generation prompt; raises `RecordError` for rejected messages."""


class Context(NamedTuple):
    """The text before an answer, starting at the assistant header."""

    text: str
    """The part of the header that the row and the prompt have in common."""
    prompt_only: str = ""
    """The rest of the header, which is in the prompt but not in the row."""


class Headers(NamedTuple):
    """The headers that a chat template outputs in a conversation without tools or reasoning."""

    assistant: str
    """The text that the generation prompt adds, without leading whitespace."""
    user: str
    """The text between an answer and the next user message."""


def template_headers(plain: PlainText, words: Sequence[str], token: re.Pattern[str]) -> Headers:
    """Return the assistant and user headers of a chat template.

    `plain` renders a conversation of at least three messages, whose contents are `words`.
    """
    try:
        user = plain(3, False).split(words[1], 1)[1].split(words[2], 1)[0]
    except (RecordError, IndexError):
        user = ""
    try:
        prompt = plain(1, True)
        header = _added(prompt, plain(1, False), token)
        if words[0] in header:
            # Here, add_generation_prompt also changes text before the first message, for example the system message.
            # Compare the ends of two prompts instead.
            after_question, after_answer = prompt.rsplit(words[0], 1)[1], plain(2, True).rsplit(words[1], 1)[1]
            header = _common_end(after_question, after_answer, token).lstrip()
        if not header:
            # The template may ignore add_generation_prompt. If every rendering ends with the assistant header, the text
            # after the last answer differs from the text between an answer and a user message.
            after_question, after_answer = (
                plain(1, False).rsplit(words[0], 1)[1],
                plain(2, False).rsplit(words[1], 1)[1],
            )
            header = "" if user.startswith(after_answer) else _common_end(after_question, after_answer, token).lstrip()
    except (RecordError, IndexError):
        header = ""
    return Headers(header, user)


class ContextFinder:
    """Finds the context that must precede each answer of one conversation."""

    def __init__(
        self,
        full: Rendering,
        plain: PlainText,
        headers: Headers,
        *,
        token: re.Pattern[str],
        text_tokens: Collection[str],
    ) -> None:
        """`token` matches control tokens; `text_tokens` lists the control tokens that are allowed in message text."""
        self.text = full.text
        self.literals = "".join(
            piece.text if piece.source is None else FIELD * len(piece.text) for piece in full.pieces
        )
        """The rendering with all characters from fields of the conversation replaced by null characters."""
        self.plain, self.headers, self.token, self.text_tokens = plain, headers, token, text_tokens

    def context(self, message: int, start: int) -> tuple[Context, tuple[str, ...]]:
        """Return the context of the answer at `start`, and notes on how the row and the prompt differ."""
        prompt, header = self._prompt(message)
        if prompt is None:
            return self._common_with(header, message, start), ()
        if not header:
            if self._is_context(usual := self.headers.assistant, size := self._before(usual, start), start):
                return Context(usual[:size], usual[size:]), ("header_not_in_prompt",)
            return self._without_header(message, start, prompt, "")
        if not self._is_context(header, self._before(header, start), start) and not self._is_usual(header):
            # The prompt adds text that is not a header, because the turn continues, for example after a tool result.
            return self._without_header(message, start, prompt[: -len(header)], header)
        context = self._common_with(header, message, start)
        notes = ["parts_behind_header"] if context.prompt_only else []
        before, prompted = self.text[: start - len(context.text)], prompt[: len(prompt) - len(header)]
        if before.rstrip() != prompted.rstrip():
            notes.append("history_rewritten")
        elif before != prompted:
            notes.append("space_before_header")
        return context, tuple(notes)

    def repeated_header(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return the start and stop of the next assistant header inside an answer, or None if there is none."""
        header = self.headers.assistant
        core = header[: self._core(header)]
        at = self.literals.find(core, start, stop) if core else -1
        return None if at < 0 else (at, at + common_prefix(self.literals[at:stop], header, self.token))

    def continued(self, message: int, start: int) -> Context:
        """Return the context of a later turn of an answer that spans several turns."""
        return self._common_with(self.headers.assistant, message, start)

    def _prompt(self, message: int) -> tuple[str | None, str]:
        """Return the prompt for a message, and the header at the end of the prompt. If the template rejects the prompt,
        return None and the usual header.
        """
        usual = self.headers.assistant
        try:
            prompt = self.plain(message, True)
        except RecordError as error:
            if not usual:
                what = f"the template rejects the prompt for message {message}: {error.what}"
                right = "start the conversation with a user message"
                raise RecordError(what, right, kind="prompt_mismatch") from None
            return None, usual
        if usual and prompt.endswith(usual):
            return prompt, usual
        try:
            return prompt, _added(prompt, self.plain(message, False), self.token)
        except RecordError:
            return prompt, ""

    def unmatched(self, message: int, start: int) -> str:
        """Return the part of the prompt's header that the row lacks before `start`."""
        header = self._prompt(message)[1]
        return header[self._before(header, start) :]

    def _common_with(self, header: str, message: int, start: int) -> Context:
        """Return the part of the header that is in both the row and the prompt.

        Raise a `RecordError` if this part does not include the role-specific part (`_core`) of the header.
        """
        size = self._before(header, start)
        if not self._is_context(header, size, start):
            raise self._mismatch(message, start, header)
        return Context(header[:size], header[size:])

    def _is_context(self, header: str, size: int, start: int) -> bool:
        """Whether the row and the prompt have exactly the first `size` characters of the header in common, including
        its `_core`.
        """
        common = common_prefix(self.text[start - size :][: len(header) + 1], header, self.token)
        if self.literals[start : start + 1] == FIELD:
            # Message text cannot match a control token of the prompt, except for the tokens in `text_tokens`.
            tokens = (match for match in self.token.finditer(header, size) if match[0] not in self.text_tokens)
            common = min(common, next((match.start() for match in tokens), common))
        return size > 0 and size >= self._core(header) and size == common

    def _is_usual(self, header: str) -> bool:
        """Whether a header starts with the role-specific part (`_core`) of the usual assistant header."""
        usual = self.headers.assistant
        return header.startswith(usual[: self._core(usual)])

    def _before(self, header: str, start: int) -> int:
        """Return the length of the longest header prefix that directly precedes `start` in the row."""
        return next((size for size in range(len(header), 0, -1) if self.text.endswith(header[:size], 0, start)), 0)

    def _core(self, header: str) -> int:
        """Return the length of a header up to and including the first word or control token that differs from the user
        header.
        """
        same = next((n for n in range(len(header), 0, -1) if header[:n] in self.headers.user), 0)
        if same == len(header):
            return same
        for match in re.finditer(rf"(?:{self.token.pattern})|\w+|\W", header):
            if match.end() > same and match[0].strip():
                return match.end()
        return len(header)

    def _without_header(self, message: int, start: int, prompt: str, added: str) -> tuple[Context, tuple[str, ...]]:
        """Return the context of an answer whose prompt adds no header: the template's own text before the answer.

        `added` is the text that the prompt adds instead of a header. Message text is not compared, because templates
        rewrite the text of earlier messages.
        """
        before = self.text[:start]
        tail = before[self.literals.rfind(FIELD, 0, start) + 1 :]
        first_field = self.literals.find(FIELD, start)
        opening = self.literals[start : first_field if first_field >= 0 else len(self.literals)]
        tokens = list(self.token.finditer(tail))
        header = tail[tokens[-1].start() :] if tokens else tail.lstrip()
        # The row and the prompt may differ in whitespace at the end of the prompt.
        ends_alike = prompt.endswith(header) or prompt.rstrip().endswith(header)
        same = before == prompt or (bool(header) and ends_alike and _visible(prompt).endswith(_visible(tail)))
        if not same or (not message and opening.strip() and (self.headers.assistant or not prompt)):
            # The first message cannot continue a turn, so the literals before its text are a header that the prompt
            # lacks.
            raise self._mismatch(message, start, prompt)
        if before == prompt:
            return Context(header, added), (("parts_behind_header",) if added else ())
        space = "" if prompt.endswith(header) else prompt[len(prompt.rstrip()) :]
        notes = ["parts_behind_header"] if added or space else []
        notes.append("space_before_header" if _visible(before) == _visible(prompt) else "history_rewritten")
        return Context(header, space + added), tuple(notes)

    def _mismatch(self, message: int, start: int, header: str) -> RecordError:
        before = one_line(self.text[max(0, start - 40) : start], 60)
        what = f'message {message} starts after "{before}", but its prompt ends with "{one_line(header[-60:], 80)}"'
        right = "use a template whose rows and prompts have the same assistant header, or remove the record"
        return RecordError(what, right, kind="prompt_mismatch")


def _added(prompt: str, without: str, token: re.Pattern[str]) -> str:
    """Return the text that `prompt` adds to `without`, stripped of leading whitespace; control tokens are not split."""
    return prompt[common_prefix(prompt, without, token) :].lstrip()


def common_prefix(one: str, other: str, token: re.Pattern[str]) -> int:
    """Return the length of the longest common prefix of two strings that does not split a control token."""
    size = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    for text in (one, other):
        size = next((match.start() for match in token.finditer(text) if match.start() < size < match.end()), size)
    return size


def _common_end(one: str, other: str, token: re.Pattern[str]) -> str:
    """Return the longest common suffix of two strings that does not split a control token."""
    inside = {at for match in token.finditer(one) for at in range(match.start() + 1, match.end())}
    return next((one[at:] for at in range(len(one)) if at not in inside and other.endswith(one[at:])), "")


def _visible(text: str) -> str:
    return "".join(text.split())
