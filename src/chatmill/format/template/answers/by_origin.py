"""Answers by origin: where the characters came from says where an answer begins and ends.

Between the last text of the messages before it and the first of its own, a rendering holds only words of the
template; so does the prompt that a server would send after those messages. What the two have in common is given to
the model; the answer begins where the rendering goes on by itself.

    prompt      … Hi <|im_end|>\\n<|im_start|>assistant\\n
    rendering   … Hi <|im_end|>\\n<|im_start|>assistant\\n<think>\\n  Well …
                     common                              | trained

It ends with the last control token among the words that the template writes for this message after its last text.
Earlier messages may be written differently in the prompt and in the rendering: only the words in between count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from chatmill.errors import RecordError
from chatmill.format.template.answers.answer_spans import AnswerSpan, disputed, shown, shown_end
from chatmill.format.template.control_tokens import ControlTokenMatch, ControlTokens, common_length
from chatmill.format.template.tracing.provenance import FieldPath
from chatmill.format.template.tracing.traced_template import NOBODY, Rendering

Tracing = Callable[[int, bool], Rendering]
"""The traced rendering of the first so many messages, with or without the prompt."""
Ending = Callable[[int, str], bool]
"""Whether the prompt after so many messages ends with a text."""


@dataclass
class Learned:
    """What one answer of a conversation taught about others like it, so that not each is traced for itself."""

    starts: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By the words before an answer: those that end its prompt, and how much the two have in common."""
    closings: dict[str, int] = field(default_factory=dict)
    """By the words after an answer, from the first control token on: how many of their characters close it."""


def answers_by_origin(
    full: Rendering,
    assistants: Sequence[int],
    tracing: Tracing,
    markers: ControlTokens,
    ends: Collection[str],
    prompt_ends: Ending | None = None,
) -> list[AnswerSpan]:
    """The answer of each of these messages; `ends` are the tokens that a server stops at, where they are known.

    With `prompt_ends` an answer that is opened like an earlier one need not be traced, if its prompt ends alike.
    """
    places = [0]
    for piece in full.pieces:
        places.append(places[-1] + len(piece.text))
    fields = [at for at, piece in enumerate(full.pieces) if piece.source is not None]
    shared = _Shared(full, places, fields, _visited(full), tracing, markers, ends, prompt_ends, Learned())
    first = assistants[0] if assistants else 0
    return [_Search(shared, message, first).turn() for message in assistants]


def _visited(full: Rendering) -> set[int]:
    """Messages among whose own words a text of another one stands."""
    pairs = zip(full.pieces, full.owners, strict=True)
    return {owner for piece, owner in pairs if piece.source is not None and piece.source.message not in (owner, -1)}


@dataclass(frozen=True)
class _Shared:
    """What is the same for all answers of a conversation."""

    full: Rendering
    places: list[int]
    """The character at which each piece begins, and the end."""
    fields: list[int]
    """The pieces that are texts of messages."""
    visited: set[int]
    tracing: Tracing
    markers: ControlTokens
    ends: Collection[str]
    prompt_ends: Ending | None
    learned: Learned


class _Search:
    """The search for one answer."""

    def __init__(self, shared: _Shared, message: int, first: int) -> None:
        self.shared, self.message, self.first = shared, message, first
        self.full, self.places, self.fields = shared.full, shared.places, shared.fields
        self.markers = shared.markers

    def turn(self) -> AnswerSpan:
        start = self._start()
        stop, closed = self._stop(start)
        return AnswerSpan(self.message, start, stop, closed)

    # The beginning.

    def _start(self) -> int:
        own = next((at for at in self.fields if self._of(at) == self.message), len(self.full.pieces))
        before = max((at for at in self.fields if at < own), default=-1)
        words = self._words(before, own)
        known = self.shared.learned.starts.get(words)
        if known is not None and before >= 0 and own < len(self.full.pieces) and self.shared.prompt_ends is not None:
            asked, common = known
            if self.shared.prompt_ends(self.message, self.full.pieces[before].text + asked):
                return self.places[before + 1] + common
        return self._traced_start(own)

    def _traced_start(self, own: int) -> int:
        try:
            prompt = self.shared.tracing(self.message, True)
        except RecordError as error:
            what = f"message {self.message} is an answer that no prompt asks for: {error.what}"
            raise disputed(what, "begin with what it answers") from None
        anchor, asked = _tail(prompt)
        before = self._anchor(anchor, own)
        after = self._next_field(before)
        words = self._words(before, after)
        common = self._common(words, asked)
        if own < len(self.full.pieces) and after != own:
            what = f"text of message {self._of(after)} stands between message {self.message} and what it answers"
            raise disputed(f"{what}: {shown(self.full.pieces[after].text)}")
        adds = self._adds(self.message) if common < len(asked) else None
        if adds and common <= len(asked) - len(adds):
            what = f"message {self.message} begins with {shown(words[common:])}, its prompt ends with"
            raise disputed(f"{what} {shown_end(asked)}", "the template must open an answer as it prompts for it")
        if common == len(asked) < len(words) and self._adds(self.message) == "":
            header = self._adds(self.first)
            if header and words.startswith(header, common):
                # A header is given, also where this prompt lacks the one that others have.
                return self.places[before + 1] + common + len(header)
        self.shared.learned.starts.setdefault(words, (asked, common))
        return self.places[before + 1] + common

    def _adds(self, message: int) -> str | None:
        """The words that the prompt for a message adds to what is there without it."""
        try:
            asked = _tail(self.shared.tracing(message, True))[1]
            there = _tail(self.shared.tracing(message, False))[1]
        except RecordError:
            return None
        return asked[self._common(asked, there) :]

    def _anchor(self, source: FieldPath | None, own: int) -> int:
        """The last piece before the answer that the prompt ends with, too."""
        if source is None:
            return -1
        found = [at for at in self.fields if at < own and self.full.pieces[at].source == source]
        if not found:
            what = f"what stands before message {self.message} in its prompt is not in the rendering"
            raise disputed(f"{what} ({'.'.join(map(str, source.path))} of message {source.message})")
        return found[-1]

    # The end.

    def _stop(self, start: int) -> tuple[int, bool]:
        last = self._last_field(start)
        begin = self.places[last + 1] if last is not None else start
        after = next((at for at in self.fields if self.places[at] >= begin), len(self.full.pieces))
        words = self.full.text[begin : self.places[after]]
        own = self._owned(begin, words)
        closing = self._closing(words) if own is None else self._own_closing(own)
        found = self.markers.find(closing)
        if not found and own:
            closing, found = own, self.markers.find(own)
        if found:
            return begin + self._terminator(found).stop, True
        following = self.markers.find(words)
        between = words[len(own or "") : following[0].start] if following else ""
        if following and following[0].token in self.shared.ends and not between.strip():
            # The turn is closed by what opens the next one: a server stops there, so the model must write it.
            return begin + following[0].stop, True
        return begin + len((own if own is not None else closing).rstrip()), False

    def _last_field(self, start: int) -> int | None:
        """The last piece of this message in its answer: the one it ends with when nothing follows it."""
        run: list[int] = []
        for at in self.fields:
            if self.places[at] >= start:
                if self._of(at) != self.message:
                    break
                run.append(at)
        if not run:
            return None
        own = [at for at in run if self.full.owners[at] == self.message]
        if own and self.message not in self.shared.visited:
            return own[-1]
        inside = {self.full.pieces[at].source for at in run}
        last = next((piece.source for piece in reversed(self._alone().pieces) if piece.source in inside), None)
        ending = [at for at in run if self.full.pieces[at].source == last] or own
        if not ending:
            what = f"the end of message {self.message} cannot be told: nothing says where the template leaves it"
            raise disputed(f"{what}, after {shown_end(self.full.pieces[run[-1]].text)}")
        return ending[-1]

    def _alone(self) -> Rendering:
        """The rendering that ends with this message."""
        try:
            return self.shared.tracing(self.message + 1, False)
        except RecordError:
            return self.full

    def _owned(self, begin: int, words: str) -> str | None:
        """The words from `begin` that were written for this message; None if the template's loops do not tell."""
        first = next((at for at in range(len(self.full.pieces)) if self.places[at + 1] > begin), None)
        if first is None:
            return ""
        known = self.full.owners[first] != NOBODY or (first > 0 and self.full.owners[first - 1] == self.message)
        if not known:
            return None
        stop = begin
        for at in range(first, len(self.full.pieces)):
            if self.full.owners[at] != self.message or self.places[at] >= begin + len(words):
                break
            stop = self.places[at + 1]
        return words[: max(0, stop - begin)]

    def _own_closing(self, own: str) -> str:
        """Of the words written for this message, those that close it as well when it is the last."""
        found = self.markers.find(own)
        if len(found) < 2:
            return own
        first, learned = found[0].start, self.shared.learned.closings
        if own[first:] not in learned or self.shared.prompt_ends is None:
            learned[own[first:]] = self._common(own, _tail(self._alone(), of=self.message)[1]) - first
        return own[: max(0, first + learned[own[first:]])]

    def _closing(self, words: str) -> str:
        """Of words of which it is not known for whom they were written, those that close this message in any case."""
        closing = words[: self._common(words, _tail(self._alone(), of=self.message)[1])]
        try:
            prompted = _tail(self.shared.tracing(self.message + 1, True), of=self.message)[1]
        except RecordError:
            return closing
        both = closing[: self._common(closing, prompted)]
        return both if self.markers.find(both) else closing

    def _terminator(self, found: Sequence[ControlTokenMatch]) -> ControlTokenMatch:
        """The control token that ends the turn: the first a server stops at, or the last of all."""
        return next((marker for marker in found if marker.token in self.shared.ends), found[-1])

    # Pieces and words.

    def _of(self, at: int) -> int | None:
        source = self.full.pieces[at].source if at < len(self.full.pieces) else None
        return None if source is None else source.message

    def _next_field(self, at: int) -> int:
        return next((field for field in self.fields if field > at), len(self.full.pieces))

    def _words(self, before: int, after: int) -> str:
        return self.full.text[self.places[before + 1] : self.places[after]]

    def _common(self, one: str, other: str) -> int:
        """How far two texts agree, without cutting a control token in two."""
        common = common_length(one, other)
        for text in (one, other):
            for marker in self.markers.find(text):
                if marker.start < common < marker.stop:
                    common = marker.start
        return common


def _tail(rendering: Rendering, *, of: int | None = None) -> tuple[FieldPath | None, str]:
    """The field that a rendering ends with, and the words after it; `of` looks for the last of one message."""
    words: list[str] = []
    for piece in reversed(rendering.pieces):
        if piece.source is not None and (of is None or piece.source.message == of):
            return piece.source, "".join(reversed(words))
        words.append(piece.text)
    return None, "".join(reversed(words))
