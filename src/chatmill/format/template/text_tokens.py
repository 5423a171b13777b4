"""Find the added tokens, such as `<think>`, that are recognized in the text of messages.

Special tokens are never recognized in text. Added tokens that the template writes in a header or at the end of a turn,
such as DeepSeek's `<｜User｜>`, are not recognized either. All other added tokens are considered tags inside answers,
and are recognized. To find the tokens in headers and at turn ends, this module renders small conversations whose words
occur in no template:

    <｜User｜> QzUser0 <｜Assistant｜></think> QzAssistant1 <｜end▁of▁sentence｜> <｜User｜> QzUser2
    header            header       tag                  end                 header
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile

from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.probes import TOOLS, probe_record
from chatmill.records.record import Message, Record, ToolCall, new_message

Render = Callable[[Record, int, bool], str | None]
"""Renders the first n messages, with or without the generation prompt; None if the template rejects them."""

MAX_WORDS = 2
"""Maximum number of words between two tokens of a header.

A token preceded by more than `MAX_WORDS` words is treated as part of a sentence.
"""

PUNCTUATION = frozenset(".,;:!?")
"""Characters that occur in sentences but not in headers."""
ID = "call00001"


def _turns(*roles: str) -> list[Message]:
    """Return messages of the given roles, with the contents `QzUser0`, `QzAssistant1` and so on."""
    return [
        new_message(
            role, f"Qz{role.title()}{at}", **({"name": "weather", "tool_call_id": ID} if role == "tool" else {})
        )
        for at, role in enumerate(roles)
    ]


_DIALOG = probe_record("dialog", *_turns("user", "assistant", "user", "assistant"))
_SYSTEM = probe_record("system", *_turns("system", "user", "assistant"))
_REASONING = probe_record("reasoning", *_turns("user"), new_message("assistant", "QzAssistant1", "QzReasoning"))
_RESULT = probe_record("result", *_turns("user", "assistant", "tool", "assistant"))
_CALLS = probe_record(
    "calls",
    *_turns("user"),
    new_message("assistant", "", "", (ToolCall("weather", '{"city":"QzAssistant1"}', ID),)),
    *_turns("user", "assistant", "tool", "tool", "assistant")[2:],
    tools=TOOLS,
)


def learn_text_tokens(render: Render, tokens: ControlTokens, unmarked: Collection[str]) -> frozenset[str]:
    """Return the tokens in `unmarked` that the template does not write in headers or at turn ends."""
    unmarked = tokens.ids.keys() & unmarked
    return frozenset(unmarked - tokens_of_turns(render, tokens, tokens.ids.keys() - unmarked) if unmarked else ())


def tokens_of_turns(render: Render, tokens: ControlTokens, special: Collection[str]) -> frozenset[str]:
    """Return the tokens that a template writes in headers and at turn ends. `special` contains the special tokens,
    which are never tags.
    """
    return _Turns(render, tokens, special).learn()


def token_notes(texts: Sequence[str], tokens: ControlTokens, text_tokens: ControlTokens) -> tuple[str, ...]:
    """Return the names of ledger entries for texts that contain the characters of control tokens."""
    if not tokens.any_in(texts):
        return ()
    matches = {match[0] for text in texts for match in tokens.find(text)}
    from_text = matches & text_tokens.ids.keys()
    return (*(["control_text"] if matches - from_text else []), *(["text_token"] if from_text else []))


class _Turns:
    def __init__(self, render: Render, tokens: ControlTokens, special: Collection[str]) -> None:
        self.tokens, self.special = tokens, special
        self._render, self._rendered = render, dict[tuple[str | None, int, bool], str | None]()

        # Fall back to two messages, because some templates support only one exchange.
        self.row = self.render(_DIALOG, 4, False) or self.render(_DIALOG, 2, False) or ""
        self.opening = _between(self.row, "QzUser0", "QzAssistant1")

    def learn(self) -> frozenset[str]:
        if not ("QzUser0" in self.row and "QzAssistant1" in self.row):
            # The template drops the texts of the messages, so assume that no token comes from text.
            return frozenset(self.tokens.ids)
        final = self._names(_after(self.render(_DIALOG, 2, False), "QzAssistant1"))
        closing, user_header = self._closing_and_header(_DIALOG, "QzUser2")
        if not user_header:
            user_header = self._near(self.row.partition("QzUser0")[0])
        ends = {*self._ends(closing), *self._ends(final)}
        reasoning = self._reasoning_tags() - ends
        tags = reasoning | (self._call_tags() - ends)
        # If the last answer ends differently from earlier answers, `user_header` includes the token that ends earlier
        # answers.
        size = len(user_header) - bool(final and not closing and len(user_header) > 1)
        turns = ends | {*user_header} | self._before_answers(size, tags)
        return frozenset(turns | (self._tool_turns(tags) - reasoning) | (self._system_turn() - tags))

    def _closing_and_header(self, record: Record, following: str) -> tuple[list[str], list[str]]:
        """Return the tokens between the text of answer 1 and the text `following`, split into the end of the answer and
        the next header.
        """
        between = self._names(_between(self.render(record, len(record.messages), False), "QzAssistant1", following))
        alone = self.render(record, 2, False)
        if alone is None:
            # The template rejects a conversation that ends with this answer, so the header starts at the last special
            # token.
            special = [at for at, token in enumerate(between) if token in self.special]
            return [], between[special[-1] if special else -1 :]
        size = _common(between, self._names(_after(alone, "QzAssistant1")))
        return between[:size], between[size:]

    def _ends(self, closing: Sequence[str]) -> list[str]:
        """Return the tokens that end the turn: all tokens of `closing` after its last special token.

        Tokens before a special token are tags, as in `</response><|im_end|>`.
        """
        last = max((at for at, token in enumerate(closing) if token in self.special), default=-1)
        return [*closing[last + 1 :]]

    def _before_answers(self, size: int, tags: Collection[str]) -> set[str]:
        """Return the tokens at the end of a user turn and the first `size` tokens (at least one) of the assistant
        header.
        """
        prompt, alone = (_after(self.render(_DIALOG, 1, prompt), "QzUser0") for prompt in (True, False))
        ends = self._names(alone)
        if prompt == alone:
            # The template ignores add_generation_prompt, so it has no assistant header or always outputs the header.
            return ({*self._names(self.opening)[: max(1, size)], *ends} & self._in_all_openings()) - {*tags}
        shared = _common(self._names(prompt), ends)
        header = self._names(prompt)[shared:]
        if size == 0 and header and self._word_before(prompt, shared):
            # The assistant header consists of plain words without control tokens.
            header = []
        return {*ends, *(({*header[: max(1, size)]} & self._in_all_openings()) - {*tags})}

    def _word_before(self, text: str, number: int) -> bool:
        matches = self.tokens.find(text)
        return bool(text[matches[number - 1].end() if number else 0 : matches[number].start()].strip())

    def _in_all_openings(self) -> set[str]:
        """Return the control tokens that always occur between a user message and an answer without reasoning, in
        conversations and in prompts.
        """
        openings = []
        for record, answers in ((_DIALOG, (1, 3)), (_SYSTEM, (2,))):
            row = self.render(record, len(record.messages), False)
            for at in answers:
                user = f"QzUser{at - 1}"
                prompt, alone = (_after(self.render(record, at, prompt), user) for prompt in (True, False))
                openings += [_between(row, user, f"QzAssistant{at}")] if row is not None else []
                openings += [prompt] if prompt != alone else []
        return set.intersection(*({*self._names(text)} for text in openings)) if openings else set()

    def _reasoning_tags(self) -> set[str]:
        """Return the control tokens before and after the reasoning of an answer, except a token that also precedes
        answers without reasoning.
        """
        row = self.render(_REASONING, 2, False)
        opening = {*self._last(_between(row, "QzUser0", "QzReasoning"))} - {*self._last(self.opening)}
        return opening | {*self._names(_between(row, "QzReasoning", "QzAssistant1"))}

    def _call_tags(self) -> set[str]:
        """Return the control tokens before and after a tool call, except tokens that also precede answers without tool
        calls.
        """
        row = self.render(_CALLS, 2, False)
        around = _between(row, "QzUser0", "QzAssistant1"), _after(row, "QzAssistant1")
        return {token for text in around for token in self._names(text)} - {*self._names(self.opening)}

    def _tool_turns(self, tags: Collection[str]) -> set[str]:
        """Return the control tokens in the header and at the end of tool results."""
        out: set[str] = set()
        for record, last in ((_CALLS, 3), (_RESULT, 2)):
            row = self.render(record, len(record.messages), False)
            out |= {*self._closing_and_header(record, "QzTool2")[1]}
            if last > 2:
                out |= {*self._names(_between(row, "QzTool2", f"QzTool{last}"))}
            prompt, alone = (_after(self.render(record, last + 1, prompt), f"QzTool{last}") for prompt in (True, False))
            out |= {*self._names(alone)} - ({*tags} if prompt == alone else set())
        return out

    def _system_turn(self) -> set[str]:
        """Return the control tokens before and after the text of a system message, except tokens inside sentences that
        the template adds.
        """
        row = self.render(_SYSTEM, 3, False) or ""
        texts = (row.partition("QzSystem0")[0], _between(row, "QzSystem0", "QzUser1")) if "QzSystem0" in row else ()
        return {token for text in texts for token in self._near(text)}

    def _near(self, text: str) -> list[str]:
        """Return the control tokens at the start and at the end of a text. From each side, stop at punctuation, or at
        more than `MAX_WORDS` words between two tokens.
        """
        matches = self.tokens.find(text)
        starts, stops = [0, *(match.end() for match in matches)], [*(match.start() for match in matches), len(text)]
        gaps = [text[start:stop] for start, stop in zip(starts, stops, strict=True)]
        near = [len(gap.split()) <= MAX_WORDS and not PUNCTUATION.intersection(gap) for gap in gaps]
        first, last = (len([*takewhile(bool, side)]) for side in (near[:-1], near[:0:-1]))
        return [match[0] for at, match in enumerate(matches) if at < first or at >= len(matches) - last]

    def render(self, record: Record, messages: int, prompt: bool) -> str | None:
        key = (record.id, messages, prompt)
        if key not in self._rendered:
            text = self._render(record, messages, prompt)
            if text is None and not record.tools:
                # Try again with tools, because some templates support only conversations with tools.
                text = self._render(probe_record("", *record.messages, tools=TOOLS), messages, prompt)
            self._rendered[key] = text
        return self._rendered[key]

    def _names(self, text: str) -> list[str]:
        return [match[0] for match in self.tokens.find(text)]

    def _last(self, text: str) -> list[str]:
        """Return a list with the control token at which a text ends, ignoring whitespace; return an empty list if there
        is none.
        """
        return [match[0] for match in self.tokens.find(text)[-1:] if not text[match.end() :].strip()]


def _between(text: str | None, before: str, after: str) -> str:
    """Return the part of `text` between the words `before` and `after`, or "" if one of them is missing."""
    _, word, tail = (text or "").partition(before)
    between, end, _ = tail.partition(after)
    return between if word and end else ""


def _after(text: str | None, word: str) -> str:
    """Return the part of `text` after the last occurrence of `word`, or "" if `word` is missing."""
    _, there, after = (text or "").rpartition(word)
    return after if there else ""


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the common prefix of two lists of tokens."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])
