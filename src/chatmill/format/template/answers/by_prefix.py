"""Answers by prefix: what a server would send before an answer is compared with the rendering, as plain text.

Nothing is known here of where characters came from. Where the prompt for an answer is the beginning of the rendering,
the answer begins at its end. Where the conversation up to the answer, as it would be sent with the next prompt or as
it stands alone, is the beginning of the rendering, the answer ends with the control tokens there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from chatmill.errors import RecordError

Writing = Callable[[int, bool], str]
"""The text of the first so many messages, with or without the prompt."""


class PrefixAnswer(NamedTuple):
    """What prefixes say of one answer; None where they say nothing."""

    message: int
    start: int | None
    stop: int | None


def answers_by_prefix(
    text: str, assistants: Sequence[int], writing: Writing, tokens: Collection[str], ends: Collection[str]
) -> list[PrefixAnswer]:
    """What the beginnings of the conversation tell of each of these messages."""
    each = one_of(tokens)
    openers: list[str] = []
    closing = re.compile(rf"(?:(?:{each.pattern})\s*)+\Z")

    def written(messages: int, prompt: bool) -> str | None:
        try:
            return writing(messages, prompt)
        except RecordError:
            return None

    def opener(message: int, prompt: str) -> str:
        """What this prompt adds; if it ends like the first one, that."""
        if openers and prompt.endswith(openers[0]):
            return openers[0]
        before = written(message, False)
        return "" if before is None else opener_of(prompt, before, each)

    def end_of(message: int, prompt: str) -> int | None:
        """How much of the text is there when the answer is, before anything follows."""
        alone = written(message + 1, False)
        if alone is not None and alone != text and text.startswith(alone):
            return len(alone)
        asked, added = written(message + 1, True), opener(message, prompt)
        body = asked[: -len(added)] if added and asked and asked.endswith(added) else None
        lengths = [len(body) for body in (alone, body) if body is not None and text.startswith(body)]
        return min(lengths, default=None)

    def found(message: int) -> PrefixAnswer:
        prompt = written(message, True)
        if prompt is None or not text.startswith(prompt):
            return PrefixAnswer(message, None, None)
        start = len(prompt)
        if openers and text.startswith(openers[0], start) and not opener(message, prompt):
            # A header is given, also where this prompt lacks the one that others have.
            start += len(openers[0])
        elif not openers and (added := opener(message, prompt)):
            openers.append(added)
        end = end_of(message, prompt)
        run = closing.search(text[start:end]) if end is not None else None
        if run is None:
            return PrefixAnswer(message, start, None)
        markers = list(each.finditer(text[start:end], run.start()))
        last = next((marker for marker in markers if marker[0] in ends), markers[-1])
        return PrefixAnswer(message, start, start + last.end())

    return [found(message) for message in assistants]


def one_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Finds control tokens."""
    return re.compile("|".join(re.escape(name) for name in sorted(tokens, key=len, reverse=True) if name) or r"(?!)")


def opener_of(prompt: str, before: str, token: re.Pattern[str]) -> str:
    """What a prompt adds to the same messages without one; where they part inside a control token, all of that."""
    parting = (at for at, (one, other) in enumerate(zip(prompt, before, strict=False)) if one != other)
    common = len(before) if prompt.startswith(before) else next(parting, len(prompt))
    cut = [found.start() for found in token.finditer(prompt) if found.start() < common < found.end()]
    return prompt[cut[0] if cut else common :]
