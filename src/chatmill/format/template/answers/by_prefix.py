"""Locate the answers in a rendered conversation by comparing its text with the prompt for each answer.

If the prompt for an answer is a prefix of the rendering, the answer starts where the prompt ends. If the messages up to
and including the answer also render to a prefix, the answer ends with the control tokens at the end of that prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from chatmill.errors import RecordError

RenderText = Callable[[int, bool], str]
"""Renders the first n messages as text, with or without the generation prompt."""


class PrefixAnswer(NamedTuple):
    """The start and stop of an answer in the rendered text; a value is None if no prefix determines it."""

    message: int
    start: int | None
    stop: int | None


def answers_by_prefix(
    text: str,
    assistants: Sequence[int],
    prompts: Sequence[int],
    render_text: RenderText,
    tokens: Collection[str],
    ends: Collection[str],
    eos: str | None = None,
) -> list[PrefixAnswer]:
    """Return the start and stop of the answer in each message of `assistants`; None if no prefix determines them.

    `ends` contains the tokens at which an inference server stops generating. The assistant header is taken from the
    first prompt that has one; `prompts` lists the number of messages in each of these prompts.
    """
    token = token_pattern(tokens)

    def rendered(messages: int, prompt: bool) -> str | None:
        try:
            return render_text(messages, prompt)
        except RecordError:
            return None

    def added(message: int) -> str:
        """Return the text that the generation prompt adds before `message`."""
        prompt, before = rendered(message, True), rendered(message, False)
        return "" if prompt is None or before is None else header_of(prompt, before, token)

    usual = next(filter(None, map(added, prompts)), "")

    def header(message: int, prompt: str) -> str:
        """Return the usual header if the prompt ends with it, otherwise the text that the generation prompt adds."""
        return usual if usual and prompt.endswith(usual) else added(message)

    def end_of(message: int, prompt: str) -> int | None:
        """Return the offset in the rendering at which a message ends, or None if no prefix determines it."""
        alone = rendered(message + 1, False)
        last = [match[0] for match in token.finditer(prompt)][-1:]
        if not usual and alone is not None and last and alone.rstrip().endswith(last[0]):
            # The prefix does not show where the message ends, because the template ignores add_generation_prompt and
            # always outputs the header.
            return None
        if alone is not None and alone != text and text.startswith(alone):
            return len(alone)
        next_prompt, own = rendered(message + 1, True), header(message, prompt)
        body = next_prompt[: -len(own)] if own and next_prompt and next_prompt.endswith(own) else None
        lengths = [len(prefix) for prefix in (alone, body) if prefix is not None and text.startswith(prefix)]
        return min(lengths, default=None)

    def closing_tokens(body: str) -> list[re.Match[str]]:
        """Return the control tokens at the end of `body`, which are separated only by whitespace."""
        closing: list[re.Match[str]] = []
        end = len(body)
        for match in reversed(list(token.finditer(body))):
            if body[match.end() : end].strip():
                break
            closing.insert(0, match)
            end = match.start()
        return closing

    answers = []
    for message in assistants:
        prompt = rendered(message, True)
        if prompt is None or not text.startswith(prompt):
            answers.append(PrefixAnswer(message, None, None))
            continue
        start = len(prompt)
        if usual and not header(message, prompt):
            if not text.startswith(usual, start):
                # A prompt without the usual header does not show where the answer starts.
                answers.append(PrefixAnswer(message, None, None))
                continue
            start += len(usual)
        end = end_of(message, prompt)
        matches = closing_tokens(text[start:end]) if end is not None else []
        stops = [match for match in matches if match[0] in ends] or [match for match in matches if match[0] == eos]
        stop = start + (stops or matches[-1:])[0].end() if matches else None
        answers.append(PrefixAnswer(message, start, stop))
    return answers


def token_pattern(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a regular expression that matches any of the tokens and prefers longer tokens."""
    return re.compile("|".join(re.escape(name) for name in sorted(tokens, key=len, reverse=True) if name) or r"(?!)")


def header_of(prompt: str, before: str, token: re.Pattern[str]) -> str:
    """Return the text that the generation prompt adds, which never starts inside a control token."""
    parting = (at for at, (one, other) in enumerate(zip(prompt, before, strict=False)) if one != other)
    common = len(before) if prompt.startswith(before) else next(parting, len(prompt))
    split = [match.start() for match in token.finditer(prompt) if match.start() < common < match.end()]
    return prompt[split[0] if split else common :]
