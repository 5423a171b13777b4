"""Find where each answer starts and ends, using the origin of each character of the rendered text.

Between the previous message and the answer, the rendered text consists of literals of the template. The prompt that an
inference server would pass to the model also ends with literals of the template. What the rendering and the prompt have
in common is context; the answer starts where the rendering and the prompt diverge.

    prompt      … Hi <|im_end|>\\n<|im_start|>assistant\\n
    rendering   … Hi <|im_end|>\\n<|im_start|>assistant\\n<think>\\n  Well …
                     common                              | trained

The answer ends with a control token after the last field of its message. Only literals next to the answer are compared,
so earlier messages may differ between the prompt and the rendering.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

from chatmill.errors import RecordError, one_line
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.tracing.trace import OUTSIDE, FieldPath, Rendering, common_length

SHOWN = 40


class AnswerSpan(NamedTuple):
    """The trained text of one message: characters [start, stop) of the rendering."""

    message: int
    start: int
    stop: int
    closed: bool
    """Whether the trained text ends with a control token."""


def disputed(what: str, right: str = "rewrite the conversation, or remove it") -> RecordError:
    return RecordError(what, right, kind="mask_disputed")


def shown(text: str) -> str:
    """Return the first characters of a text in quotes, for error messages."""
    return f'"{one_line(text, SHOWN)}"'


def shown_end(text: str) -> str:
    """Return the last characters of a text in quotes, for error messages."""
    return f'"{"…" if len(text) > SHOWN else ""}{one_line(text[-SHOWN:], SHOWN)}"'


RenderTraced = Callable[[int, bool], Rendering]
"""Renders the first n messages with tracing, with or without the generation prompt."""
PromptEnds = Callable[[int, str], bool]
"""Returns whether the prompt after the first n messages ends with the given text."""


def answers_by_origin(
    full: Rendering,
    assistants: Sequence[int],
    prompts: Sequence[int],
    render_traced: RenderTraced,
    tokens: ControlTokens,
    ends: Collection[str],
    eos: str | None = None,
    prompt_ends: PromptEnds | None = None,
) -> list[AnswerSpan]:
    """Return the trained text of each message whose index is in `assistants`. `ends` contains the tokens at which an
    inference server stops generating, if known.

    The assistant header is taken from the first prompt that has one. `prompts` contains the number of messages of each
    prompt that is searched for the header.

    If `prompt_ends` is given, a prompt that ends with the same literals as an earlier prompt is not rendered with
    tracing.
    """
    search = _OriginSearch(full, prompts, render_traced, tokens, ends, eos, prompt_ends)
    return [search.answer(message) for message in assistants]


class _OriginSearch:
    def __init__(
        self,
        full: Rendering,
        prompts: Sequence[int],
        render_traced: RenderTraced,
        tokens: ControlTokens,
        ends: Collection[str],
        eos: str | None,
        prompt_ends: PromptEnds | None,
    ) -> None:
        self.full, self.pieces, self.prompts = full, full.pieces, prompts
        self.render_traced, self.tokens, self.prompt_ends = render_traced, tokens, prompt_ends
        self.ends, self.eos = ends, eos
        self.places = list(accumulate((len(piece.text) for piece in full.pieces), initial=0))
        """Start offset of each piece, followed by the length of the text."""
        self.fields = [at for at, piece in enumerate(full.pieces) if piece.source is not None]
        self.visited = {
            piece.owner
            for piece in full.pieces
            if piece.source is not None and piece.source.message not in (piece.owner, OUTSIDE)
        }
        """Messages whose loop iteration outputs a field of another message."""
        self.known_starts: dict[str, tuple[str, int]] = {}
        """Maps the literals before an answer to the end of the prompt, and to the length of the common prefix of the
        literals and the end of the prompt.
        """
        self.known_closings: dict[str, int] = {}
        """Maps the literals after an answer, from the first control token on, to the number of closing characters."""

    def answer(self, message: int) -> AnswerSpan:
        start = self._start(message)
        stop, closed = self._stop(message, start)
        return AnswerSpan(message, start, stop, closed)

    def _start(self, message: int) -> int:
        own = next((at for at in self.fields if self._message_of(at) == message), len(self.pieces))
        before = max((at for at in self.fields if at < own), default=-1)
        known = self.known_starts.get(self._between(before, own))
        if known is not None and before >= 0 and own < len(self.pieces) and self.prompt_ends is not None:
            prompt_end, common = known
            if self.prompt_ends(message, self.pieces[before].text + prompt_end):
                return self.places[before + 1] + common
        return self._traced_start(message, own)

    def _traced_start(self, message: int, own: int) -> int:
        try:
            prompt = self.render_traced(message, True)
        except RecordError as error:
            return self._start_without_prompt(message, own, error)
        anchor, prompt_end = _tail(prompt)
        before = self._anchor(message, anchor, own)
        after = next((at for at in self.fields if at > before), len(self.pieces))
        literals = self._between(before, after)
        if own < len(self.pieces) and after != own:
            what = f"text of message {self._message_of(after)} is rendered between the prompt and message {message}"
            raise disputed(f"{what}: {shown(self.pieces[after].text)}")
        begin = self.places[before + 1]
        common = self._common(literals, prompt_end)
        if common < len(prompt_end):
            header = self._visible_header(message, prompt_end)
            place = len(prompt_end) - len(header)
            if common == place and self._opening(self._usual_header()) not in header:
                # The prompt adds text that is not a header, because the turn continues, for example after a tool
                # result.
                return begin + common
            if common <= place:
                header_at = self._header_place(literals, prompt_end, header)
                if header_at is None:
                    what = f"message {message} starts with {shown(literals[common:])}, but its prompt ends with"
                    right = "use a template whose rows and prompts have the same assistant header"
                    raise disputed(f"{what} {shown_end(prompt_end)}", right)
                place = header_at
            return begin + place + self._common(literals[place:], header)
        header = self._usual_header() if common < len(literals) and not self._header(message) else ""
        header_at = self._header_place(literals[common:], header, header) if header else None
        if header_at is not None:
            # Treat the usual header as context even if the prompt for this answer lacks it.
            return begin + common + header_at + self._common(literals[common + header_at :], header)
        self.known_starts.setdefault(literals, (prompt_end, common))
        return begin + common

    def _usual_header(self) -> str:
        """Return the assistant header from the first prompt of this conversation that has a header."""
        headers = map(self._header, self.prompts)
        return next((header for header in headers if header), "").lstrip()

    def _start_without_prompt(self, message: int, own: int, error: RecordError) -> int:
        """Search for the usual header to find the start of an answer whose prompt the template cannot render."""
        before = max((at for at in self.fields if at < own), default=-1)
        literals = self._between(before, own)
        header = self._usual_header()
        opening = self._opening(header)
        places = [match.start() for match in re.finditer(re.escape(opening), literals)] if header else []
        # The opening of the header may occur several times, for example after a default system message, so take the
        # longest match.
        common, place = max(((self._common(literals[at:], header), at) for at in places), default=(0, -1))
        if not common:
            what = f"the template rejects the prompt for message {message}: {error.what}"
            raise disputed(what, "start the conversation with a user message")
        return self.places[before + 1] + place + common

    def _visible_header(self, message: int, prompt_end: str) -> str:
        """Return the header at the end of a prompt, even if the template ignores `add_generation_prompt`."""
        if header := (self._header(message) or "").lstrip():
            return header
        # If the template ignores add_generation_prompt and always outputs the header, the row also ends with the
        # header.
        last = _tail(self.full)[1]
        always = next((at for at in range(len(prompt_end)) if last.endswith(prompt_end[at:])), len(prompt_end))
        matches = [match.start() for match in self.tokens.find(prompt_end)]
        at = next((match for match in matches if match >= always), matches[-1] if matches else None)
        return prompt_end.lstrip() if at is None else prompt_end[at:]

    def _opening(self, header: str) -> str:
        """Return a header up to the end of its first control token, or the whole header if it has no control token."""
        matches = self.tokens.find(header)
        return header[: matches[0].end()] if matches else header.rstrip()

    def _header_place(self, literals: str, prompt_end: str, header: str) -> int | None:
        """Return the offset of the header in the literals before an answer.

        Whitespace before the header may differ between the row and the prompt.
        """
        prompted = "".join(prompt_end[: len(prompt_end) - len(header)].split())
        opening = self._opening(header)
        places = [match.start() for match in re.finditer(re.escape(opening), literals)]
        alike = [place for place in places if "".join(literals[:place].split()) == prompted]
        return alike[0] if alike else places[0] if len(places) == 1 else None

    def _header(self, message: int) -> str | None:
        """Return the text that `add_generation_prompt` adds at the end of the prompt for a message."""
        try:
            prompt_end = _tail(self.render_traced(message, True))[1]
            without = _tail(self.render_traced(message, False))[1]
        except RecordError:
            return None
        return prompt_end[self._common(prompt_end, without) :]

    def _anchor(self, message: int, source: FieldPath | None, own: int) -> int:
        """Return the index of the last piece of `source`, the last field of the prompt, that precedes the answer."""
        if source is None:
            return -1
        anchor = max((at for at in self.fields if at < own and self.pieces[at].source == source), default=None)
        if anchor is None:
            what = f"the text before message {message} in its prompt is missing from the row"
            raise disputed(f"{what} ({'.'.join(map(str, source.path))} of message {source.message})")
        return anchor

    def _stop(self, message: int, start: int) -> tuple[int, bool]:
        last = self._last_field(message, start)
        begin = self.places[last + 1] if last is not None else start
        after = next((at for at in self.fields if self.places[at] >= begin), len(self.pieces))
        literals = self.full.text[begin : self.places[after]]
        own = self._owned(message, begin, literals)
        closing = self._closing(message, start, literals) if own is None else self._own_closing(message, own)
        matches = self.tokens.find(closing) or self.tokens.find(own or "")
        is_tag = bool(matches) and matches[-1][0].startswith("</") and matches[-1][0] not in (*self.ends, self.eos)
        if own is not None and (is_tag if matches else not own.strip()):
            # A closing tag does not end the answer, so search the text after the message loop or at the start of the
            # next message.
            further = self.tokens.find(self._closing(message, start, literals))[len(matches) :]
            if further and not literals[len(own) : further[0].start()].strip():
                matches = further[:1]
        if matches:
            # End the answer at the first token at which a server stops, otherwise at the first EOS, otherwise at the
            # last token.
            stops = [match for match in matches if match[0] in self.ends]
            end = (stops or [match for match in matches if match[0] == self.eos] or matches[-1:])[0]
            return begin + end.end(), True
        following = self.tokens.find(literals)
        between = literals[len(own or "") : following[0].start()] if following else ""
        if following and following[0][0] in self.ends and not between.strip():
            # Train on the token that opens the next turn: a server stops at it, so the model must generate it.
            return begin + following[0].end(), True
        return begin + len((own if own is not None else closing).rstrip()), False

    def _last_field(self, message: int, start: int) -> int | None:
        """Return the index of the piece that ends the body of an answer, or None if the answer contains no field."""
        run: list[int] = []
        for at in self.fields:
            if self.places[at] >= start:
                if self._message_of(at) != message:
                    break
                run.append(at)
        if not run:
            return None
        own = [at for at in run if self.pieces[at].owner == message]
        if own and message not in self.visited:
            return own[-1]
        inside = {self.pieces[at].source for at in run}
        last = next((piece.source for piece in reversed(self._alone(message).pieces) if piece.source in inside), None)
        ending = [at for at in run if self.pieces[at].source == last] or own
        if not ending:
            what = f"cannot determine where the answer of message {message} ends"
            raise disputed(f"{what}, after {shown_end(self.pieces[run[-1]].text)}")
        return ending[-1]

    def _alone(self, message: int) -> Rendering:
        """Return the rendering of the conversation up to and including `message`."""
        try:
            return self.render_traced(message + 1, False)
        except RecordError:
            return self.full

    def _owned(self, message: int, begin: int, literals: str) -> str | None:
        """Return the literals after `begin` that the loop iteration of this message outputs; None if `begin` is outside
        message loops.
        """
        first = next((at for at in range(len(self.pieces)) if self.places[at + 1] > begin), None)
        if first is None:
            return ""
        if self.pieces[first].owner == OUTSIDE and not (first > 0 and self.pieces[first - 1].owner == message):
            return None
        stop = begin
        for at in range(first, len(self.pieces)):
            if self.pieces[at].owner != message or self.places[at] >= begin + len(literals):
                break
            stop = self.places[at + 1]
        return literals[: max(0, stop - begin)]

    def _own_closing(self, message: int, own: str) -> str:
        """Return the prefix of `own` that the template also outputs if this message is the last one."""
        matches = self.tokens.find(own)
        if len(matches) < 2:
            return own
        first, known = matches[0].start(), self.known_closings
        if own[first:] not in known or self.prompt_ends is None:
            known[own[first:]] = self._common(own, _tail(self._alone(message), of=message)[1]) - first
        return own[: max(0, first + known[own[first:]])]

    def _closing(self, message: int, start: int, literals: str) -> str:
        """Return the literals that the template outputs after this message whether or not another message follows."""
        alone = self._alone(message)
        source, tail = _tail(alone, of=message)
        if source is None:
            # The rendering contains no field of this message, so take the text after the start of the answer.
            tail = alone.text[start:] if alone.text.startswith(self.full.text[:start]) else ""
        closing = literals[: self._common(literals, tail)]
        try:
            prompted = _tail(self.render_traced(message + 1, True), of=message)[1]
        except RecordError:
            return closing
        both = closing[: self._common(closing, prompted)]
        return both if self.tokens.find(both) else closing

    def _message_of(self, at: int) -> int | None:
        source = self.pieces[at].source if at < len(self.pieces) else None
        return None if source is None else source.message

    def _between(self, before: int, after: int) -> str:
        return self.full.text[self.places[before + 1] : self.places[after]]

    def _common(self, one: str, other: str) -> int:
        """Return the length of the common prefix of two texts, without splitting a control token."""
        common = common_length(one, other)
        for text in (one, other):
            for match in self.tokens.find(text):
                if match.start() < common < match.end():
                    common = match.start()
        return common


def _tail(rendering: Rendering, *, of: int | None = None) -> tuple[FieldPath | None, str]:
    """Return the last field in a rendering, or the last field of message `of` if it is given, and the text after it."""
    texts: list[str] = []
    for piece in reversed(rendering.pieces):
        if piece.source is not None and (of is None or piece.source.message == of):
            return piece.source, "".join(reversed(texts))
        texts.append(piece.text)
    return None, "".join(reversed(texts))
