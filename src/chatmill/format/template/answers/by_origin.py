"""Derive answers by origin: the source of each character shows where an answer starts and ends.

Between the last field of the previous messages and the first field of the answer, a rendering contains only literals of
the template. The same holds for the prompt that a server would send for those messages. The common prefix of both
stretches of literals is part of the prompt; the answer starts where they diverge.

    prompt      … Hi <|im_end|>\\n<|im_start|>assistant\\n
    rendering   … Hi <|im_end|>\\n<|im_start|>assistant\\n<think>\\n  Well …
                     common                              | trained

The answer ends with the last control token among the literals that the template writes for this message after its last
field. Earlier messages may differ between the prompt and the rendering, because only these literals are compared.
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
    """Whether it ends with a control token."""


def disputed(what: str, right: str = "rewrite the conversation, or remove it") -> RecordError:
    return RecordError(what, right, kind="mask_disputed")


def shown(text: str) -> str:
    """Return the start of a text, in quotes."""
    return f'"{one_line(text, SHOWN)}"'


def shown_end(text: str) -> str:
    """Return the end of a text, in quotes."""
    return f'"{"…" if len(text) > SHOWN else ""}{one_line(text[-SHOWN:], SHOWN)}"'


RenderTraced = Callable[[int, bool], Rendering]
"""Renders the first n messages with tracing, with or without the generation prompt."""
PromptEnds = Callable[[int, str], bool]
"""Whether the prompt after n messages ends with a text."""


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
    """Return the answer of each message in `assistants`; `ends` are the tokens at which a server stops, if known.

    `prompts` lists the numbers of messages after which a prompt may show the usual header.

    With `prompt_ends`, a prompt is not traced if an earlier prompt ended the same way and its answer started the same
    way.
    """
    search = _OriginSearch(full, prompts, render_traced, tokens, ends, eos, prompt_ends)
    return [search.answer(message) for message in assistants]


class _OriginSearch:
    """Finds the answers of one conversation."""

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
        """Offset of each piece; one more entry for the length of the text."""
        self.fields = [at for at, piece in enumerate(full.pieces) if piece.source is not None]
        self.visited = {
            piece.owner
            for piece in full.pieces
            if piece.source is not None and piece.source.message not in (piece.owner, OUTSIDE)
        }
        """Messages in whose loop iteration the template outputs a field of another message."""
        self.known_starts: dict[str, tuple[str, int]] = {}
        """Maps the literals before an answer to those at the end of its prompt, and their common prefix length."""
        self.known_closings: dict[str, int] = {}
        """Maps the literals from the first control token after an answer to the number of characters that close it."""

    def answer(self, message: int) -> AnswerSpan:
        start = self._start(message)
        stop, closed = self._stop(message, start)
        return AnswerSpan(message, start, stop, closed)

    # The start.

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
            what = f"text of message {self._message_of(after)} separates message {message} from the message it answers"
            raise disputed(f"{what}: {shown(self.pieces[after].text)}")
        begin = self.places[before + 1]
        common = self._common(literals, prompt_end)
        if common < len(prompt_end):
            header = self._visible_header(message, prompt_end)
            place = len(prompt_end) - len(header)
            if common == place and self._opening(self._usual_header()) not in header:
                # The turn continues, as after a tool result: the text that the prompt adds is not a header.
                return begin + common
            if common <= place:
                header_at = self._header_place(literals, prompt_end, header)
                if header_at is None:
                    what = f"message {message} starts with {shown(literals[common:])}, but its prompt ends with"
                    right = "use a template whose rows open answers like its prompts"
                    raise disputed(f"{what} {shown_end(prompt_end)}", right)
                place = header_at
            return begin + place + self._common(literals[place:], header)
        header = self._usual_header() if common < len(literals) and not self._header(message) else ""
        header_at = self._header_place(literals[common:], header, header) if header else None
        if header_at is not None:
            # A header is context, even if this prompt lacks the header that other prompts have.
            return begin + common + header_at + self._common(literals[common + header_at :], header)
        self.known_starts.setdefault(literals, (prompt_end, common))
        return begin + common

    def _usual_header(self) -> str:
        """Return the header of the first prompt of this conversation that has one."""
        headers = map(self._header, self.prompts)
        return next((header for header in headers if header), "").lstrip()

    def _start_without_prompt(self, message: int, own: int, error: RecordError) -> int:
        """Find the start after the usual header if the template rejects the prompt, for example for a first message."""
        before = max((at for at in self.fields if at < own), default=-1)
        literals = self._between(before, own)
        header = self._usual_header()
        opening = self._opening(header)
        places = [match.start() for match in re.finditer(re.escape(opening), literals)] if header else []
        # There may be several openings, for example after a default system message; take the one closest to the header.
        common, place = max(((self._common(literals[at:], header), at) for at in places), default=(0, -1))
        if not common:
            what = f"the template rejects the prompt for message {message}: {error.what}"
            raise disputed(what, "start the conversation with the message that it answers")
        return self.places[before + 1] + place + common

    def _visible_header(self, message: int, prompt_end: str) -> str:
        """Return the header at the end of a prompt, or the last control token if the generation prompt adds nothing."""
        if header := (self._header(message) or "").lstrip():
            return header
        # The template may ignore add_generation_prompt and always output the header; then the row also ends with the
        # header.
        last = _tail(self.full)[1]
        always = next((at for at in range(len(prompt_end)) if last.endswith(prompt_end[at:])), len(prompt_end))
        matches = [match.start() for match in self.tokens.find(prompt_end)]
        at = next((match for match in matches if match >= always), matches[-1] if matches else None)
        return prompt_end.lstrip() if at is None else prompt_end[at:]

    def _opening(self, header: str) -> str:
        """Return a header up to and including its first control token, or the whole header if it has none."""
        matches = self.tokens.find(header)
        return header[: matches[0].end()] if matches else header.rstrip()

    def _header_place(self, literals: str, prompt_end: str, header: str) -> int | None:
        """Find the header in the literals before an answer; whitespace before it may differ."""
        prompted = "".join(prompt_end[: len(prompt_end) - len(header)].split())
        opening = self._opening(header)
        places = [match.start() for match in re.finditer(re.escape(opening), literals)]
        alike = [place for place in places if "".join(literals[:place].split()) == prompted]
        return alike[0] if alike else places[0] if len(places) == 1 else None

    def _header(self, message: int) -> str | None:
        """Return the literals that the generation prompt adds before a message."""
        try:
            prompt_end = _tail(self.render_traced(message, True))[1]
            without = _tail(self.render_traced(message, False))[1]
        except RecordError:
            return None
        return prompt_end[self._common(prompt_end, without) :]

    def _anchor(self, message: int, source: FieldPath | None, own: int) -> int:
        """Return the last piece before the answer that the prompt's last field produced."""
        if source is None:
            return -1
        anchor = max((at for at in self.fields if at < own and self.pieces[at].source == source), default=None)
        if anchor is None:
            what = f"the text before message {message} in its prompt is missing from the row"
            raise disputed(f"{what} ({'.'.join(map(str, source.path))} of message {source.message})")
        return anchor

    # The stop.

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
            # Text after the loop, or of the next message, may close the answer, but a closing tag does not.
            further = self.tokens.find(self._closing(message, start, literals))[len(matches) :]
            if further and not literals[len(own) : further[0].start()].strip():
                matches = further[:1]
        if matches:
            # Take the first token at which a server stops, else the first EOS, else the last token.
            stops = [match for match in matches if match[0] in self.ends]
            end = (stops or [match for match in matches if match[0] == self.eos] or matches[-1:])[0]
            return begin + end.end(), True
        following = self.tokens.find(literals)
        between = literals[len(own or "") : following[0].start()] if following else ""
        if following and following[0][0] in self.ends and not between.strip():
            # The token that opens the next turn closes this one: a server stops there, so the model must generate it.
            return begin + following[0].end(), True
        return begin + len((own if own is not None else closing).rstrip()), False

    def _last_field(self, message: int, start: int) -> int | None:
        """Return the last piece of this message in its answer, which ends the answer if no message follows."""
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
        """Render the conversation up to and including this message."""
        try:
            return self.render_traced(message + 1, False)
        except RecordError:
            return self.full

    def _owned(self, message: int, begin: int, literals: str) -> str | None:
        """Return the literals after `begin` that belong to this message; None if no message loop identifies them."""
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
        """Return the literals of this message that also close it when it is the last message."""
        matches = self.tokens.find(own)
        if len(matches) < 2:
            return own
        first, known = matches[0].start(), self.known_closings
        if own[first:] not in known or self.prompt_ends is None:
            known[own[first:]] = self._common(own, _tail(self._alone(message), of=message)[1]) - first
        return own[: max(0, first + known[own[first:]])]

    def _closing(self, message: int, start: int, literals: str) -> str:
        """Return the literals outside loop iterations that close this message regardless of what follows."""
        alone = self._alone(message)
        source, tail = _tail(alone, of=message)
        if source is None:
            # The output contains no field of this message, so take the text after its start.
            tail = alone.text[start:] if alone.text.startswith(self.full.text[:start]) else ""
        closing = literals[: self._common(literals, tail)]
        try:
            prompted = _tail(self.render_traced(message + 1, True), of=message)[1]
        except RecordError:
            return closing
        both = closing[: self._common(closing, prompted)]
        return both if self.tokens.find(both) else closing

    # Pieces and literals.

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
    """Return the last field of a rendering (or of message `of`) and the text after it."""
    texts: list[str] = []
    for piece in reversed(rendering.pieces):
        if piece.source is not None and (of is None or piece.source.message == of):
            return piece.source, "".join(reversed(texts))
        texts.append(piece.text)
    return None, "".join(reversed(texts))
