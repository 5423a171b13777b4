"""Compare the text of rendered rows with the prompts of a chat template, independently of the renderer.

The check uses only the ids of a row, the loss mask and the rendered text, so it can find errors in the code that
locates the answers.

    prompt    … Hi <|im_end|>\\n<|im_start|>assistant\\n
    row       … Hi <|im_end|>\\n<|im_start|>assistant\\n | Well … <|im_end|> | \\n
                                                         | trained           |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from chatmill.errors import RecordError
from chatmill.format.template.certify.finding import shown, shown_end
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.records import Message, Record
from chatmill.rows import Ids, Rows
from chatmill.tokenizer import Tokenizer

Relation = Literal[
    "same",
    "space_before_header",
    "parts_behind_header",
    "header_not_in_prompt",
    "history_rewritten",
    "several_turns",
    "differs",
    "unknown",
]
"""How the text of a row before an answer relates to the prompt for the answer.

`same`: the prompt is a prefix of the row.
`space_before_header`: row and prompt differ in whitespace before the header.
`parts_behind_header`: row and prompt diverge after the header, for example if only one of them has `<think>`.
`header_not_in_prompt`: the row has the usual header, but the prompt has no header.
`history_rewritten`: the text before the header differs in more than whitespace, but the header is the same.
`several_turns`: the answer continues in another turn, after a header.
`differs`: row and prompt have different headers, so the model would be prompted differently than in training.
`unknown`: decoding the ids does not restore the text of the row.
"""
MARK = "\0"
"""A mark after each control token, to distinguish the token from message text that looks like a control token."""
_WORD = re.compile(r"\w{2,}")
_LONG_WORD = re.compile(r"\w{4,}")


@dataclass(frozen=True)
class CheckedAnswer:
    """A run of consecutive trained tokens from one message."""

    message: int
    text: str
    ids: tuple[int, ...]
    relation: Relation
    goes_on: bool
    """Whether the answer continues in another turn."""
    straddles: bool
    """Whether the first token of the answer starts in the header and is therefore not trained on."""
    faults: tuple[str, ...]
    """Descriptions of the errors in the trained text, or an empty tuple for a correct answer."""


class _Run(NamedTuple):
    """Consecutive trained tokens of one message, or consecutive untrained tokens."""

    message: int | None
    start: int
    stop: int
    marked: str

    @property
    def text(self) -> str:
        return self.marked.replace(MARK, "")


TextOf = Callable[[int, bool], str]
"""Renders the first n messages as plain text, with or without the generation prompt."""


class PlainCheck:
    """Checks the rows that one chat template renders. The headers of the template are determined from a rendering of
    the conversation `turns`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sources: Sequence[str],
        stops: Sequence[int] | None,
        turns: Record,
        text_of: TextOf,
        *,
        strip_prompt_space: bool = False,
    ) -> None:
        self._strip_prompt_space = strip_prompt_space
        self._tokenizer, self._stops = tokenizer, frozenset(stops or ())
        self._tokens = ControlTokens(tokenizer.control_ids)
        self._control = np.array(list(tokenizer.control_ids.values()), dtype=np.uint32)
        self._source = "\n".join(sources).casefold()
        self.header = ""
        """The text that the generation prompt for the first answer adds."""
        self._marks: tuple[str, ...] = ()
        """Texts that occur only in headers."""
        self._openers: frozenset[str] = frozenset()
        """Control tokens that occur in headers."""
        self._ends = {name for name, id in tokenizer.control_ids.items() if id in self._stops}
        """Control tokens that end a turn."""
        try:
            self._learn_headers(turns, text_of)
        except RecordError:
            return

    def _learn_headers(self, turns: Record, text_of: TextOf) -> None:
        row = text_of(len(turns.messages), False)
        first, answer, second = (message.content.strip() for message in turns.messages[:3])
        before, gap = row.partition(first)[0], row.partition(answer)[2].partition(second)[0]
        # The user header is the common text before the first two user messages, without the token that ends the
        # previous turn.
        of_user = self._without_ends(self._common_end(before, gap))
        self._ends |= {match[0] for match in self._tokens.find(gap[: len(gap) - len(of_user)])[-1:]}
        self.header = self._added(text_of(1, True), text_of(1, False))
        if not self.header.strip():
            # The template may ignore add_generation_prompt and always output the header.
            tails = (text_of(count, False).rpartition(word)[2] for count, word in ((1, first), (2, answer)))
            self.header = self._without_ends(self._common_end(*tails))
        self._marks = tuple(filter(None, (self._opener(self.header), of_user.strip())))
        names = [match[0] for match in (*self._tokens.find(self.header), *self._tokens.find(of_user)[-1:])]
        self._openers = frozenset(name for name in names if self._tokens.ids[name] not in self._stops)

    def _common_end(self, one: str, other: str) -> str:
        """Return the longest common suffix of two strings that does not split a control token."""
        start = len(one) - _common(one[::-1], other[::-1])
        inside = [match.end() for match in self._tokens.find(one) if match.start() < start < match.end()]
        return one[inside[0] if inside else start :]

    def _without_ends(self, header: str) -> str:
        """Return the part of a header after its last end-of-turn token."""
        return header[max((match.end() for match in self._tokens.find(header) if match[0] in self._ends), default=0) :]

    def _opener(self, header: str) -> str:
        """Return the first control token of a header and the text after it up to the next control token or line end."""
        header = header.strip()
        tokens = self._tokens.find(header)
        if not tokens or tokens[0].start():
            return header
        return header[: tokens[1].start() if len(tokens) > 1 else None].partition("\n")[0].rstrip()

    def answers(self, record: Record, rows: Rows, text_of: TextOf) -> list[CheckedAnswer]:
        """Return the runs of trained tokens in a record's row, with the errors found in each run."""
        runs = list(self._runs(rows))
        text, marked = text_of(len(record.messages), False), "".join(run.marked for run in runs)
        decoded = marked.replace(MARK, "")
        exact = decoded == text
        readable = exact or _without_space(decoded) == _without_space(text)
        trained = [run for run in runs if run.message is not None]
        checked = []
        before = ""
        for run in runs:
            if run.message is not None:
                ids = tuple(rows.ids[run.start : run.stop].tolist())
                of_message = [other for other in trained if other.message == run.message]
                relation: Relation = "unknown"
                straddles, faults = False, list[str]()
                if readable:
                    token = self._tokenizer.decode(rows.ids[run.start - 1 : run.start].tolist())
                    after = marked[len(before) :]
                    if run != of_message[0]:
                        relation = self._goes_on(before)
                    else:
                        relation, straddles = self._relation(record, run.message, before, after, token, text_of, exact)
                    if relation == "differs":
                        place = shown_end(before.replace(MARK, ""))
                        faults.append(f"starts after {place}, but its prompt ends differently")
                    faults += self._faults(record, run, ids, token if straddles else "")
                    faults += self._cut_off(ids[-1], after[len(run.marked) :])
                    if run == of_message[-1] and run.message < len(record.messages):
                        whole = (token if straddles else "") + "".join(other.text for other in of_message)
                        faults += self._lost(record.messages[run.message], whole)
                goes_on = run != of_message[-1]
                checked.append(CheckedAnswer(run.message, run.text, ids, relation, goes_on, straddles, tuple(faults)))
            before += run.marked
        return checked

    def _runs(self, rows: Rows) -> Iterator[_Run]:
        lengths = rows.spans["length"].astype(np.int64)
        message = np.repeat(rows.spans["message"].astype(np.int64), lengths)
        message[~rows.mask().astype(bool)] = -1
        edges = [0, *(np.flatnonzero(np.diff(message)) + 1).tolist(), len(message)]
        for start, stop in pairwise(edges):
            of = int(message[start])
            yield _Run(None if of < 0 else of, start, stop, self._marked(rows.ids[start:stop]))

    def _marked(self, ids: Ids) -> str:
        """Decode token ids, and insert `MARK` after each control token."""
        edges = [0, *(np.flatnonzero(np.isin(ids, self._control)) + 1).tolist()]
        parts = [self._tokenizer.decode(ids[start:stop].tolist()) for start, stop in pairwise(edges)]
        return "".join(part + MARK for part in parts) + self._tokenizer.decode(ids[edges[-1] :].tolist())

    def _relation(
        self, record: Record, message: int, before: str, after: str, token: str, text_of: TextOf, exact: bool
    ) -> tuple[Relation, bool]:
        """Compare the text before an answer with the prompt; also return whether a token spans the answer's start."""
        try:
            prompt = text_of(message, True)
        except RecordError:
            # If the template rejects the prompt, the answer must follow the header that other prompts have.
            own = self._mark(self.header)
            known = own.strip() and self._relate(before, after, own, own) != "differs"
            return "header_not_in_prompt" if known else "differs", False
        if self._strip_prompt_space:
            prompt = prompt.rstrip(" ")
        if before.replace(MARK, "") == prompt:
            return "same", False
        try:
            header = self._added(prompt, text_of(message, False))
        except RecordError:
            header = self.header
        own = self.header.lstrip()
        if not header.strip() and own and prompt.endswith(own):
            header = own
        elif not header.strip() and own and before.endswith(self._mark(own)):
            return "header_not_in_prompt", False
        sides = (self._mark(prompt), self._mark(header))
        if not header.strip() or self._opener(own) not in header:
            # The prompt adds no assistant header, because the turn continues, for example after a tool result.
            sides = (self._mark(prompt), self._mark(_after_words(prompt, record.messages[:message])))
            if _ends_alike(before, after, *sides):
                return "space_before_header", False
        for cut in range(max(1, len(token))):
            border = len(before) - cut
            texts = (before[:border], before[border:] + after, *sides)
            relation = self._relate(*(texts if exact else map(_without_space, texts)))
            if relation != "differs":
                return relation, cut > 0
        return "differs", False

    def _goes_on(self, before: str) -> Relation:
        """Return "several_turns" if an assistant header precedes a later turn of an answer, otherwise "differs"."""
        opener = self._mark(self._opener(self.header))
        gap = before[before.rindex(opener) :] if opener and opener in before else None
        return "differs" if gap is None or _WORD.search(gap.removeprefix(opener)) else "several_turns"

    def _relate(self, before: str, after: str, prompt: str, header: str) -> Relation:
        if before == prompt:
            return "same"
        header = header.lstrip()
        if before.endswith(header):
            pair = (before[: -len(header)].rstrip(), prompt[: -len(header)].rstrip())
            return "space_before_header" if pair[0] == pair[1] else "history_rewritten"
        for size in range(len(header) - 1, 0, -1):
            token = next(
                (match[0] + MARK for match in self._tokens.find(header) if match.start() == size), header[size]
            )
            if before.endswith(header[:size]) and not after.startswith(token) and self._is_whole(header, size):
                return "parts_behind_header"
        return "differs"

    def _mark(self, text: str) -> str:
        """Return `text` with `MARK` after each control token.

        All control tokens in `text` must come from the template, not from messages.
        """
        for match in reversed(self._tokens.find(text)):
            text = f"{text[: match.end()]}{MARK}{text[match.end() :]}"
        return text

    def _is_whole(self, header: str, size: int) -> bool:
        """Whether the first `size` characters of `header` contain the whole part that identifies the role."""
        tokens = self._tokens.find(header)
        if not tokens or tokens[0].start():
            after = header[size:].replace(MARK, "").strip()
            return not after or after.startswith("<") or any(match.start() == size for match in tokens)
        inside = any(match.start() < size < match.end() for match in tokens)
        return size >= len(self._opener(header)) and not inside

    def _added(self, prompt: str, without: str) -> str:
        """Return the text that the generation prompt adds, which never starts inside a control token."""
        common = _common(prompt, without)
        split = [match.start() for match in self._tokens.find(prompt) if match.start() < common < match.end()]
        return prompt[split[0] if split else common :]

    def _faults(self, record: Record, run: _Run, ids: Sequence[int], straddling: str) -> Iterator[str]:
        assert run.message is not None
        message = record.messages[min(run.message, len(record.messages) - 1)]
        if message.role != "assistant":
            yield f"has the role {message.role}, but is trained on"
            return
        own_text = "\n".join(_texts(message)).casefold()
        trained = (straddling + run.text).casefold()
        for number, other in enumerate(record.messages):
            foreign = (word for field in _texts(other) for word in _LONG_WORD.findall(field.casefold()))
            stray = next((w for w in foreign if w in trained and w not in own_text and w not in self._source), None)
            if number != run.message and stray is not None:
                yield f"contains {shown(stray)} from message {number} ({other.role})"
        own = [match for word in set(_WORD.findall(own_text)) for match in re.finditer(re.escape(word), trained)]
        leading = trained[: min((match.start() for match in own), default=len(trained))]
        trailing = trained[max((match.end() for match in own), default=len(trained)) :]
        end = self._tokenizer.decode([ids[-1]])
        if end in self._openers:
            yield f"ends with {shown(end)}, which opens a turn"
        if ids[-1] in self._stops:
            trailing = trailing.removesuffix(end.casefold())
        for mark in self._marks:
            if mark.casefold() in leading or mark.casefold() in trailing:
                yield f"contains the header {shown(mark)}"
        inner = next((id for id in ids[:-1] if id in (self._stops or ids[-1:])), None)
        if inner is not None and (self._stops or any(mark.casefold() in trained for mark in self._marks)):
            yield f"continues after {shown(self._tokenizer.decode([inner]))}, which ends a turn"

    def _lost(self, message: Message, trained: str) -> Iterator[str]:
        """Yield an error message for each word that the trained text lacks: the last word of the content, or a word in
        tool call arguments.
        """
        last_words = [] if "<think" in message.content else _WORD.findall(message.content)[-1:]
        for word in (*last_words, *(word for call in message.tool_calls for word in _WORD.findall(call.arguments))):
            if word.casefold() not in trained.casefold():
                yield f"lacks {shown(word)}"

    def _cut_off(self, last: int, following: str) -> Iterator[str]:
        """Yield an error message if the trained text ends just before the end-of-turn token."""
        end = next((name for name in self._ends if following.lstrip().startswith(name + MARK)), None)
        if end is not None and last not in (self._tokens.ids[name] for name in self._ends):
            yield f"stops before {shown(end)}, which ends the turn"


def _texts(message: Message) -> list[str]:
    calls = [text for call in message.tool_calls for text in (call.name, call.arguments)]
    return [message.content, message.reasoning, *calls]


def _ends_alike(before: str, after: str, prompt: str, tail: str) -> bool:
    """Whether `before` and the prompt end with the same text, ignoring trailing whitespace that only the prompt has."""
    space, own = (text[len(text.rstrip()) :] for text in (prompt, before))
    goes_on = own + after[: len(after) - len(after.lstrip())]
    same = _common(space, goes_on) == len(own)
    return bool(tail.strip()) and same and _without_space(before).endswith(_without_space(tail))


def _after_words(prompt: str, messages: Sequence[Message]) -> str:
    """Return the text that follows the last word of the messages in a prompt."""
    words = (word for message in reversed(messages) for word in reversed(_WORD.findall(message.content)))
    word = next((word for word in words if word in prompt), "")
    return prompt.rpartition(word)[2] if word else prompt


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix of two strings."""
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _without_space(text: str) -> str:
    return "".join(text.split())
