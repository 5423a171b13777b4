"""An oracle for chat templates that computes the expected loss mask only from the text that transformers renders.

The oracle shares no code with chatmill. An answer starts after the assistant header, where the row diverges from the
prompt that a server would send. An answer ends with the first end-of-turn token after the last text of its message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

from published_conversations import CONVERSATIONS, Messages, with_tools
from published_reference import Places, Reference, locate, pieces, read_piece

ROLE_WORD = re.compile(r"(?i)\b(?:assistant|chatbot|bot|gpt)\b")


@dataclass
class Verdict:
    text: str = ""
    answers: dict = field(default_factory=dict)
    """(start, stop) of the trained text of each assistant message, in characters; None if the message is not
    rendered.
    """
    problem: str = ""
    """`unrenderable`, `no_end`, `mismatch`, `interleaved`, or ""."""
    detail: str = ""
    left_out: bool = False
    """Whether reasoning is dropped. If so, the rest may be trained, or the conversation may be rejected."""
    inner: dict = field(default_factory=dict)
    """The end tokens between the texts of each answer, as (stop of the token, position where the answer continues
    after a header, whether servers stop there).
    """
    loose: dict = field(default_factory=dict)
    """Other valid starts of answers, in the whitespace before them."""

    def ways(self) -> list[list[tuple[int, int]]]:
        ways = [[]]
        for number, answer in self.answers.items():
            if answer is None:
                continue
            inner = self.inner.get(number, ())
            choices = [self._parts(answer, inner)]
            if inner and not any(stops for _, _, stops in inner):
                # The model generates the header itself, so the loss mask may include it.
                choices.append([answer])
            first = self.loose.get(number, answer[0])
            more = [
                [(start, parts[0][1]), *parts[1:]] for parts in choices for start in range(answer[0], first - 1, -1)
            ]
            ways = [[*way, *choice] for way in ways for choice in more]
        return ways

    @staticmethod
    def _parts(answer, inner) -> list[tuple[int, int]]:
        begin, stop = answer
        parts = []
        for left, right, _ in inner:
            parts.append((begin, left))
            begin = right
        return [*parts, (begin, stop)]


def common(left: str, right: str) -> int:
    length = min(len(left), len(right))
    for at in range(length):
        if left[at] != right[at]:
            return at
    return length


def header_of(reference: Reference, messages, *, tools: bool) -> str:
    prompt, plain = (reference.text(messages, prompt=generation, tools=tools) for generation in (True, False))
    if not prompt.startswith(plain):
        # The generation prompt also changes earlier text, so compare only the parts after the last message text.
        prompt, plain = (
            behind_texts(locate(reference, messages, prompt=generation, tools=tools)) for generation in (True, False)
        )
    length = common(prompt, plain)
    return prompt[min(reference.border(prompt, length), reference.border(plain, length)) :].lstrip()


def behind_texts(places: Places) -> str:
    return places.text[max((span[1] for span in places.spans.values() if span is not None), default=0) :]


@dataclass(frozen=True)
class Header:
    """The assistant header of a chat template, determined by rendering a conversation without tools."""

    whole: str = ""
    """The text that the generation prompt adds; "" if the template always adds it, or never."""
    least: str = ""
    """The part of the added text that also precedes answers in a row."""
    of_users: int = 0
    """The length of the header's common prefix with user headers."""
    tail: str = ""
    """The text between a question and its answer that row and prompt share: the end of the user turn, and the header.
    """
    opening: str = ""
    """The text between the header and the answer's text, which the model generates."""


@lru_cache(None)
def plain_header(reference: Reference) -> Header:
    messages = CONVERSATIONS["turns"]
    try:
        whole = header_of(reference, messages[:1], tools=False)
        places = locate(reference, messages)
        prompted = locate(reference, messages[:1], prompt=True)
        tail = prompted.text[prompted.of(0)[0][1] :]
        least = whole
        for number in (1, 3, 5):
            gap = places.text[places.of(number - 1)[0][1] : places.of(number)[0][0]]
            least = least[: best_match(reference, gap, least)[1]]
            length = common(tail, gap)
            tail = tail[: min(reference.border(tail, length), reference.border(gap, length))]
        between = gap[len(tail) :]
        users = max(
            best_match(reference, places.text[places.of(number)[0][1] : places.of(number + 1)[0][0]], whole)[1]
            for number in (1, 3)
        )
    except Exception:
        return Header()
    return Header(whole, least, users, tail, between)


def best_match(reference: Reference, gap: str, header: str, *, first: bool = False) -> tuple[int, int]:
    """Return the position and the length of the longest prefix of `header` in `gap` that starts and ends at token
    boundaries.
    """
    best = (0, 0)
    if not header:
        return best
    for match in re.finditer(re.escape(header[0]), gap):
        at = match.start()
        if reference.border(gap, at) != at:
            continue
        length = common(gap[at:], header)
        length = min(reference.border(gap, at + length) - at, reference.border(header, length))
        if length > best[1] or (length == best[1] and not first):
            best = (at, length)
    return best


def judge(reference: Reference, messages) -> Verdict:
    tools = with_tools(messages)
    try:
        places = locate(reference, messages, tools=tools)
    except Exception as error:
        return Verdict(problem="unrenderable", detail=f"{type(error).__name__}: {error}"[:200])
    verdict = Verdict(places.text)
    for piece in pieces(messages):
        if places.spans.get(piece) is None and read_piece(messages, piece).strip():
            own = read_piece(messages, piece)
            if piece[1] == ("reasoning_content",) or (
                "</think>" in own and own.split("</think>")[-1].strip() in places.text
            ):
                verdict.left_out = True
                continue
            verdict.problem, verdict.detail = "unrenderable", f"{'.'.join(map(str, piece[1]))} of message {piece[0]}"
            return verdict
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and verdict.problem in ("", "no_end"):
            judge_answer(reference, messages, number, places, verdict, tools=tools)
    written = [answer for answer in verdict.answers.values() if answer is not None]
    if not verdict.problem and not written:
        verdict.problem, verdict.detail = "unrenderable", "no answer is written"
    return verdict


def judge_answer(reference, messages, number, places, verdict, *, tools) -> None:
    text = places.text
    own = sorted(places.of(number))
    others = [span for (owner, _), span in places.spans.items() if owner != number and span is not None]
    if own:
        start = own[0][0]
        before = max((span[1] for span in others if span[1] <= start), default=0)
    else:
        # The answer has no text with a known position, so it starts somewhere after the previous message.
        before = max((stop for owner in range(number) for _, stop in places.of(owner)), default=0)
        start = min((span[0] for span in others if span[0] > before), default=len(text))
    if any(own[0][0] < span[0] < own[-1][0] for span in others if own):
        verdict.problem, verdict.detail = "interleaved", f"message {number} continues after the text of another message"
        return
    begin, loose = answer_begin(reference, messages, number, text, before, start, bool(own), tools=tools)
    if begin is None:
        if own:
            verdict.problem, verdict.detail = "mismatch", f"message {number}: {text[before:start][-200:]!r}; {loose}"
        else:
            verdict.answers[number] = None
        return
    last = max([begin, *(span[1] for span in own)])
    bound = min((span[0] for span in others if span[0] >= last), default=len(text))
    match = reference.ends.search(text, last, bound)
    if match is None or opens_turn(reference, messages, places, text[last : match.start()], text[begin:last]):
        verdict.problem = "no_end"
        verdict.detail = f"message {number}: {text[begin:][:80]!r}"
        verdict.answers[number] = (begin, last)
        return
    verdict.answers[number] = (begin, match.end())
    if loose is not None:
        verdict.loose[number] = loose
    gaps = zip([(begin, begin), *own], own, strict=False)
    if inner := [end for (_, left), (right, _) in gaps for end in inner_ends(reference, text, left, right)]:
        verdict.inner[number] = inner


def inner_ends(reference: Reference, text: str, start: int, stop: int) -> list[tuple[int, int, bool]]:
    """Return the end-of-turn tokens between two texts of an answer or, if there are none, the assistant header. See
    `Verdict.inner` for the form of the result.
    """
    ends = [
        (match.end(), behind_header(reference, text, match.end(), stop), match[0] in reference.tokens["stops"])
        for match in reference.ends.finditer(text, start, stop)
    ]
    least = plain_header(reference).least
    header = text.find(least, start, stop) if least and not ends else -1
    return ends if header < 0 else [(header, header + len(least), False)]


def opens_turn(reference: Reference, messages: Messages, places: Places, text: str, answer: str) -> bool:
    """Whether `text` contains the special token that starts a user header, and `answer` does not."""
    for number, message in enumerate(messages):
        if message["role"] == "user" and places.of(number):
            header = places.text[: places.of(number)[0][0]][-60:]
            header = header[max((match.end() for match in reference.ends.finditer(header)), default=0) :].split()
            tokens = reference.added.findall("".join(header[-1:]))
            if tokens and tokens[0] in reference.tokens["control"] and tokens[0] in text and tokens[0] not in answer:
                return True
    return False


def behind_header(reference: Reference, text: str, start: int, stop: int) -> int:
    """Return the position after the header that follows an end-of-turn token: after the assistant header or, if there
    is none, after the last added token.
    """
    least = plain_header(reference).least
    at = text.rfind(least, start, stop) if least else -1
    if at >= 0:
        return at + len(least)
    last = max((match.end() for match in reference.added.finditer(text, start, stop)), default=start)
    return last + len(text[last:stop]) - len(text[last:stop].lstrip())


def loosely_alike(reference: Reference, text: str, start: int, tail: str, least: int) -> int | None:
    """Return the position at which a row diverges from the end of a prompt, ignoring whitespace. Return None if fewer
    than `least` characters match.
    """
    at, in_tail = start, 0
    for character in re.finditer(r"\S", tail):
        spaces = len(text[at:]) - len(text[at:].lstrip())
        in_word = (
            at > start and tail[character.start() - 1].strip() and not reference.added.match(tail, character.start())
        )
        if text[at + spaces : at + spaces + 1] != character[0] or (spaces and in_word):
            break
        at, in_tail = at + spaces + 1, character.end()
    if at == start or tail[in_tail:least].strip():
        return None
    at, in_tail = reference.border(text, at), reference.border(tail, in_tail)
    return at + common(text[at:], tail[in_tail:])


def asks_for_role(reference: Reference, known: Header, header: str) -> bool:
    if known.least:
        return header.startswith(known.least.rstrip())
    token = reference.added.match(header)
    return token is not None and token[0] in known.tail


def answer_begin(reference, messages, number, text, before, start, written, *, tools):
    """Return the start of an answer, and the earliest start that is also valid (None if there is no other valid start).

    Return (None, reason) if the row does not continue its prompt.
    """
    known = plain_header(reference)
    begin, header, prompt, tail = None, known.whole, "", ""
    if number:
        try:
            prompted = locate(reference, messages[:number], prompt=True, tools=tools)
            header = header_of(reference, messages[:number], tools=tools)
        except Exception as error:
            return None, f"no prompt: {error}"[:200]
        prompt = prompted.text
        tail = prompt[max((stop for owner in range(number) for _, stop in prompted.of(owner)), default=len(prompt)) :]
        length = common(text[before:], tail)
        length = min(reference.border(text, before + length) - before, reference.border(tail, length))
        at, matched = best_match(reference, text[before:start], header, first=not written)
        if written and matched and before + at + matched == start:
            # The start of the answer's text may match the header too.
            matched = common(text[before + at :], header)
            matched = min(
                reference.border(text, before + at + matched) - before - at, reference.border(header, matched)
            )
        if length == len(tail) and (tail or not known.least):
            begin = before + length
        elif header and matched > known.of_users:
            begin = before + at + matched
        elif not asks_for_role(reference, known, header):
            # The prompt has no role header, so the answer starts where the row diverges from the prompt.
            begin = loosely_alike(reference, text, before, tail, len(tail) - len(header))
    # A header between the prompt and the answer is not part of the answer.
    least = known.least or known.tail.lstrip()
    first = before if begin is None else begin
    if least.strip() and written:
        at = text.rfind(least, first, start)
        if at >= 0:
            in_prompt = tail.rfind(least)
            length = common(text[at:], tail[in_prompt:] if in_prompt >= 0 else least)
            begin = max(at + len(least), reference.border(text, at + length))
    if begin is None and not number and written:
        # The conversation starts with this answer, so there is no prompt. The answer may start with the text
        # that opens other answers.
        opening = len(known.opening) if text[:start].endswith(known.opening) else 0
        return start, start - max(opening, len(text[:start]) - len(text[:start].rstrip()))
    if begin is not None and number and ROLE_WORD.search(text, begin, start) and not known.least:
        return None, f"the row has a header that its prompt lacks: {text[begin:start]!r}"
    if begin is None:
        return None, f"its prompt ends with {prompt[-80:]!r}"
    return reference.border(text, begin), None
