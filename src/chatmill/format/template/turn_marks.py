"""Learn how a chat template opens and ends turns, by rendering small conversations.

An answer must not contain the header of another turn, and must end with a token that ends a turn. The headers and end
tokens are learned from the output of the template, because token names are not reliable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from chatmill.errors import RecordError
from chatmill.format.template.answers.contexts import common_prefix, template_headers
from chatmill.format.template.answers.derived import DerivedAnswers
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.probes import CALL, TURNS
from chatmill.records import Record

Render = Callable[[Record, int, bool], str]
"""Renders the first n messages of a record, with or without the generation prompt."""
Derive = Callable[[Record], DerivedAnswers]


class TurnMarks(NamedTuple):
    headers: tuple[str, ...]
    """The headers of user and tool turns, each of which starts with a control token."""
    ends: frozenset[str]
    """The tokens that end an answer."""


def learn_turn_marks(
    render: Render, derive: Derive, tokens: ControlTokens, *, stops: Iterable[str] | None, eos: str | None
) -> TurnMarks:
    """Return the turn headers and the end tokens of a chat template. `stops` contains the tokens at which an inference
    server stops generating, if known.
    """
    derived = {}
    for record in (TURNS, CALL):
        try:
            derived[record.id] = derive(record)
        except RecordError:
            continue
    user_header, tool_header = _user_header(render, tokens), _tool_header(render, tokens)
    opening = (
        *filter(None, (user_header, tool_header)),
        *(context.text for result in derived.values() for context in result.contexts if context.text),
    )
    ends = {*(stops or ()), *([eos] if eos in tokens.ids else [])}
    for record_id, result in derived.items():
        for answer in result.answers:
            matches = tokens.find(result.rendering.text[: answer.stop])
            if not answer.closed or not matches or matches[-1].end() != answer.stop:
                continue
            end = matches[-1][0]
            if record_id == TURNS.id:
                ends.add(end)
            elif stops is None and not _closes_tag(
                end, [match[0] for match in matches[:-1] if match.start() >= answer.start]
            ):
                # Use the surrounding text to determine whether the last token of a tool call ends the turn or only the
                # call.
                closes_call = len(matches) > 1 and matches[-2].end() == matches[-1].start()
                if closes_call or result.rendering.text[answer.stop :].lstrip().startswith(opening):
                    ends.add(end)
    # A tool header that also occurs inside a tool call does not open a turn.
    calling = derived.get(CALL.id)
    calls = [calling.rendering.text[answer.start : answer.stop] for answer in calling.answers] if calling else []
    tool = _without_ends(tool_header, ends, tokens) if tool_header else ""
    headers = (
        _without_ends(user_header, ends, tokens) if user_header else "",
        tool if tool not in "".join(calls) else "",
    )
    return TurnMarks(tuple(dict.fromkeys(header for header in headers if header)), frozenset(ends))


def _closes_tag(token: str, before: Collection[str]) -> bool:
    """Whether a token, such as `</tool_call>` or `<|tools_suffix|>`, closes a tag that an earlier token opened."""
    return token.startswith("</") or _name(token) in map(_name, before)


def _name(token: str) -> str:
    return re.sub(r"begin|end|start|stop|prefix|suffix|[^a-z]", "", token.lower())


def _without_ends(header: str, ends: Collection[str], tokens: ControlTokens) -> str:
    """Return a header without the token that ends the previous turn."""
    matches = tokens.find(header)
    last = max((at for at, match in enumerate(matches[:-1]) if match[0] in ends), default=-1)
    return header[matches[last + 1].start() :]


def _user_header(render: Render, tokens: ControlTokens) -> str:
    """Return the text before the second user message, without the end of the previous answer."""
    words = [message.content for message in TURNS.messages]
    token = tokens.pattern
    headers = template_headers(lambda count, prompt: render(TURNS, count, prompt), words, token)
    try:
        closing = render(TURNS, 2, True).rsplit(words[1], 1)[1]
    except (RecordError, IndexError):
        return ""
    closing = closing.removesuffix(headers.assistant)
    return _opening(headers.user[common_prefix(headers.user, closing, token) :], tokens)


def _tool_header(render: Render, tokens: ControlTokens) -> str:
    """Return the text between a tool call and its result, without the text that follows every tool call."""
    try:
        alone, row = render(CALL, 2, False), render(CALL, 4, False)
        call = re.search(r"(?s)Lisbon(?!.*Lisbon)(.*)", alone.split("Rain?", 1)[1])
        between = re.search(r"(?s)Lisbon((?:(?!Lisbon).)*?)clear", row.split("Rain?", 1)[1])
    except (RecordError, IndexError):
        return ""
    if call is None or between is None:
        return ""
    header = _opening(between[1][common_prefix(between[1], call[1], tokens.pattern) :], tokens)
    # A tool header that also occurs in the tool call itself does not open a turn.
    return "" if header in alone.split("Rain?", 1)[1] else header


def _opening(header: str, tokens: ControlTokens) -> str:
    """Return the part of a header from its first control token to the word after its last control token, or "" if it
    has no control tokens.
    """
    matches = tokens.find(header)
    if not matches:
        return ""
    word = re.match(r"\s*\w*", header[matches[-1].end() :])
    return header[matches[0].start() : matches[-1].end()] + (word[0].rstrip() if word else "")
