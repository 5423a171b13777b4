"""Certificates of chat templates: what training relies on, checked, one line each.

Every line is checked on small conversations made for it and, if given, on a user's self. Lines about reasoning, space
and history report what the template does; they fail only where the mask cannot be determined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from chatmill.errors import RecordError, one_line
from chatmill.format.template.answers.by_origin import AnswerSpan, shown, shown_end
from chatmill.format.template.answers.derived import DerivedAnswers
from chatmill.format.template.probes import QUESTION, TOOLS, WEATHER, WEATHER_CALL, probe_record
from chatmill.format.template.renderer import TemplateRenderer
from chatmill.format.template.tracing.trace import common_length
from chatmill.ledger import Ledger
from chatmill.records import Message, Record, ToolCall
from chatmill.rows import Part, Role, Rows, Rule

Peer = Callable[[Record], Sequence[int]]
"""The ids that another program gives for a record."""


def _dialog(*texts: str) -> list[Message]:
    """A question, its answer, the next question, and so on."""
    return [Message("assistant" if number % 2 else "user", text) for number, text in enumerate(texts)]


def _thought(text: str, reasoning: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, reasoning, calls)


TURNS = probe_record("turns", *_dialog("One?", "First answer.", "Two?", "Second answer.", "Three?", "Third."))
SYSTEM = probe_record(
    "system", Message("system", "Answer in one line."), *_dialog("Where are you?", "In a small room.")
)
SPACES = probe_record("spaces", *_dialog("\n  How far? ", "  A mile. \n", " And then?\n", "\n\nHome.  "))
REASONING = probe_record(
    "reasoning",
    *(*_dialog("Two and two?"), _thought("Four.", "I add two and two.")),
    *(*_dialog("And one?"), _thought("Five.", "Four and one.")),
)
TOOL = probe_record(
    "tool",
    *(*_dialog("Rain in Lisbon?"), _thought("", "", WEATHER_CALL), WEATHER),
    *(Message("assistant", "No rain."), *_dialog("Thanks.", "Bye.")),
    tools=TOOLS,
)
TOOL_REASONING = probe_record(
    "tool and reasoning",
    *(*_dialog("Rain in Lisbon?"), _thought("", "I must look.", WEATHER_CALL)),
    *(WEATHER, _thought("No rain.", "The sky is clear.")),
    tools=TOOLS,
)
PROBES = (QUESTION, TURNS, SYSTEM, SPACES, REASONING, TOOL, TOOL_REASONING)


class Finding(NamedTuple):
    name: str
    passed: bool
    text: str


class _Success(NamedTuple):
    """A probe that was rendered."""

    record: Record
    derived: DerivedAnswers
    rows: Rows
    straddling: int

    @property
    def text(self) -> str:
        return self.derived.rendering.text


def certify(
    renderer: TemplateRenderer, records: Iterable[Record] = (), *, peer: Peer | None = None, peer_name: str = ""
) -> list[Finding]:
    """The lines of the certificate, in their order."""
    return list(_Certificate(renderer, peer, peer_name).findings(records))


class _Certificate:
    def __init__(self, renderer: TemplateRenderer, peer: Peer | None, peer_name: str) -> None:
        self.renderer, self.peer, self.peer_name = renderer, peer, peer_name
        self.faults: dict[str | None, RecordError] = {}
        self.good: dict[str | None, _Success] = {}
        """By the id of the probe."""
        for record in PROBES:
            result = self._try(record)
            if isinstance(result, _Success):
                self.good[record.id] = result
            else:
                self.faults[record.id] = result
        # What was observed on a user's own records.
        self.refused: list[RecordError] = []
        self.different: list[Record] = []
        self.count = self.unclosed = self.control_text = 0

    def findings(self, records: Iterable[Record]) -> Iterator[Finding]:
        self._read(records)
        yield self._ids()
        for check in (self._answers, self._terminator, self._bos, self._prompt, self._borders, self._space):
            yield check()
        yield self._history()
        yield self._support("system", (SYSTEM,))
        yield self._support("tools", (TOOL, TOOL_REASONING))
        yield self._reasoning()
        yield self._control()
        yield self._sandbox()
        if self.count:
            yield self._records()

    def _try(self, record: Record) -> _Success | RecordError:
        ledger = Ledger()
        try:
            derived = self.renderer.derive(record)
            rows = self.renderer.render([self.renderer.lay_out_derived(record, derived)], ledger=ledger)
        except RecordError as fault:
            return fault
        straddling = sum(entry.tokens for _, reason, entry in ledger if reason == "straddling_token")
        return _Success(record, derived, rows, straddling)

    def _read(self, records: Iterable[Record]) -> None:
        for record in self.renderer.renderable(records, self.refused.append):
            self.count += 1
            ledger = Ledger()
            rows = self.renderer.render([record], ledger=ledger)
            holds_control = any(reason == "control_text" for _, reason, _ in ledger)
            self.control_text += holds_control
            self.unclosed += any(not closed for _, _, closed in _ends(rows, record))
            if self.peer is not None and not holds_control and rows.ids.tolist() != list(self.peer(record)):
                self.different.append(record)
        self.count += len(self.refused)

    def _quote_end(self, probe: _Success, answer: AnswerSpan) -> str:
        """The line of the template that wrote the end of an answer."""
        at = 0
        for piece in probe.derived.rendering.pieces:
            at += len(piece.text)
            if at >= answer.stop:
                return self.renderer.templates[bool(probe.record.tools)].quote(piece.line)
        raise AssertionError

    def _ids(self) -> Finding:
        if self.peer is None:
            return Finding("ids", True, "nothing to compare with: no transformers, or no tokenizer that it can open")
        places = [
            f"probe {id}" for id, probe in self.good.items() if probe.rows.ids.tolist() != list(self.peer(probe.record))
        ]
        places += [f"{one_line(record.file)}:{record.line}" for record in self.different]
        if places:
            more = f" and {len(places) - 3} more" if len(places) > 3 else ""
            return Finding("ids", False, f"not those of {self.peer_name}: {', '.join(places[:3])}{more}")
        count = len(self.good) + self.count - len(self.refused) - self.control_text
        return Finding("ids", True, f"{count} conversations have the ids of {self.peer_name}")

    def _answers(self) -> Finding:
        for record in (QUESTION, TURNS, SPACES):
            if record.id in self.faults:
                return Finding("answers", False, f"probe {record.id}: {self.faults[record.id]}")
        count = sum(len(probe.derived.answers) for probe in self.good.values())
        prefixes = [prefix for probe in self.good.values() for prefix in probe.derived.prefixes]
        starts = sum(prefix.start is not None for prefix in prefixes)
        stops = sum(prefix.stop is not None for prefix in prefixes)
        by = f"by origin all, by prefix {starts} beginnings and {stops} ends, which agree" if prefixes else "by tags"
        return Finding("answers", True, f"{count} answers of {len(self.good)} probes are trained: {by}")

    def _terminator(self) -> Finding:
        names = {id: token for token, id in self.renderer.encoder.ids.items()}
        stops = self.renderer.folder.stops
        tokens: dict[str, None] = {}
        earlier: dict[str, None] = {}
        for probe in self.good.values():
            pairs = zip(probe.derived.answers, _ends(probe.rows, probe.record), strict=False)
            for answer, (message, id, closed) in pairs:
                following = probe.record.messages[message + 1 : message + 2]
                decides = not following or following[0].role == "tool"
                if not closed and decides and self.renderer.mask == "derived":
                    what = f"no control token ends message {message} of probe {probe.record.id}"
                    text = shown_end(probe.text[: answer.stop])
                    return Finding("terminator", False, f"{what}, after {text}; {self._quote_end(probe, answer)}")
                token = names.get(id, "")
                if decides and stops is not None and id not in stops:
                    ends = ", ".join(names.get(stop, str(stop)) for stop in stops)
                    what = f"{token or id} ends message {message} of probe {probe.record.id}, the model stops at {ends}"
                    return Finding("terminator", False, f"{what}; {self._quote_end(probe, answer)}")
                (tokens if decides else earlier)[token] = None
        parity = "the model stops there" if stops is not None else "no generation_config.json to hold it against"
        others = [token or "nothing" for token in earlier if token not in tokens]
        also = f"; earlier answers end with {', '.join(others)}" if others else ""
        return Finding("terminator", True, f"{' '.join(tokens)} is trained, {parity}{also}")

    def _bos(self) -> Finding:
        token = self.renderer.folder.special.get("bos_token")
        id = self.renderer.encoder.ids.get(token) if token is not None else None
        if id is None:
            return Finding("bos", True, "the tokenizer has none")
        counts = {int(np.sum(probe.rows.ids == id)) for probe in self.good.values()}
        if counts and max(counts) > 1:
            return Finding("bos", False, f"{token} is written {max(counts)} times; a row begins with one")
        return Finding("bos", True, f"{token} is written {'once' if counts == {1} else 'nowhere, as in serving'}")

    def _prompt(self) -> Finding:
        broken = [
            (probe, number, prompt)
            for probe in self.good.values()
            for number, message in enumerate(probe.record.messages)
            if message.role == "assistant"
            and not probe.text.startswith(prompt := self.renderer.text(probe.record, number, prompt=True))
        ]
        if not broken:
            return Finding("prompt", True, "always the beginning of the row")
        probe, message, prompt = broken[0]
        at = common_length(prompt, probe.text)
        many = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
        parts = f"the prompt goes on {shown(prompt[at:])}, the row {shown(probe.text[at:])}"
        return Finding("prompt", True, f"message {message} of probe {probe.record.id} breaks it{many}: {parts}")

    def _borders(self) -> Finding:
        probe = next((probe for probe in self.good.values() if probe.straddling), None)
        if probe is None:
            return Finding("borders", True, "no token lies across the border of an answer")
        name = f"{probe.straddling} in probe {probe.record.id}"
        before = shown_end(probe.text[: probe.derived.answers[0].start])
        return Finding("borders", True, f"tokens across a border count as where they begin: {name}, as after {before}")

    def _space(self) -> Finding:
        probe = self.good.get(SPACES.id)
        if probe is None:
            return Finding("space", True, "not told: the probe is refused")
        changed = {message.role for message in probe.record.messages if message.content not in probe.text}
        stripped = [role for role in ("user", "assistant") if role in changed]
        if not stripped:
            return Finding("space", True, "around messages is kept")
        return Finding("space", True, f"around {' and '.join(stripped)} messages is stripped, and so not trained")

    def _history(self) -> Finding:
        where = []
        for record in (TURNS, REASONING, TOOL, TOOL_REASONING):
            if (probe := self.good.get(record.id)) is not None:
                answers = [answer for answer in probe.derived.answers if self._is_rewritten(probe, answer)]
                if answers:
                    numbers = " and ".join(str(answer.message) for answer in answers)
                    where.append(f"message {numbers} of probe {record.id}")
        if not where:
            return Finding("history", True, "answers stay as they were when they were the last")
        return Finding("history", True, f"is rewritten when more follows: {', '.join(where)}")

    def _is_rewritten(self, probe: _Success, answer: AnswerSpan) -> bool:
        """Whether an answer has another text when it is the last message."""
        if answer.message + 1 == len(probe.record.messages):
            return False
        alone = Record(probe.record.messages[: answer.message + 1], probe.record.id, probe.record.tools)
        try:
            derived = self.renderer.derive(alone)
        except RecordError:
            return True
        last = derived.answers[-1]
        now = next(one for one in probe.derived.answers if one.message == answer.message)
        return probe.text[now.start : now.stop] != derived.rendering.text[last.start : last.stop]

    def _support(self, name: str, probes: Sequence[Record]) -> Finding:
        fault = next((self.faults[record.id] for record in probes if record.id in self.faults), None)
        if fault is None:
            left_out = any("tools_left_out" in self.good[record.id].derived.notes for record in probes)
            return Finding(name, True, "calls are written, definitions are left out" if left_out else "supported")
        if fault.kind == "mask_disputed":
            return Finding(name, False, str(fault))
        return Finding(name, True, f"not supported: {fault.what}")

    def _reasoning(self) -> Finding:
        if (fault := self.faults.get(REASONING.id)) is not None:
            return Finding("reasoning", fault.kind != "mask_disputed", f"refused: {fault.what}")
        probe = self.good[REASONING.id]
        is_written = [message.reasoning in probe.text for message in probe.record.messages if message.reasoning]
        if not any(is_written):
            return Finding("reasoning", True, "not supported: it is left out")
        return Finding("reasoning", True, f"trained{'' if all(is_written) else ', in the last answer only'}")

    def _control(self) -> Finding:
        from_text = self.renderer.text_tokens.ids
        ids = {token: id for token, id in self.renderer.encoder.ids.items() if token not in from_text}
        text = " ".join(ids)
        result = self._try(probe_record("control text", *_dialog(f"Say {text} twice.", f"{text} and {text}.")))
        if isinstance(result, RecordError):
            return Finding("control", True, f"text that holds control tokens is refused: {result}")
        count = int(np.isin(result.rows.ids, np.array(list(ids.values()), dtype=np.uint32)).sum())
        pieces = result.derived.rendering.pieces
        literals = "".join("\0" if piece.source is not None else piece.text for piece in pieces)
        matches = self.renderer.control_tokens.find(literals)
        if count != (written := sum(match[0] in ids for match in matches)):
            what = f"{count} control tokens come out of a conversation for which the template writes {written}"
            return Finding("control", False, what)
        plain = f"all {len(ids)} control tokens are plain text inside messages"
        also = f", tokens there as in transformers: {one_line(' '.join(from_text), 200)}" if from_text else ""
        return Finding("control", True, plain + also)

    def _sandbox(self) -> Finding:
        text = "the template runs in a process without environment, files, network or other processes"
        if "seccomp" not in self.renderer.process.protections:
            text = "the template runs in a process with limits and no environment; the system filters no system calls"
        return Finding("sandbox", True, text)

    def _records(self) -> Finding:
        text = f"{self.count:,} records"
        if self.control_text:
            text += f", {self.control_text:,} of them with control text"
        if self.refused:
            kinds = Counter(fault.kind for fault in self.refused)
            reasons = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
            return Finding("records", False, f"{text}; refused: {reasons}; the first: {self.refused[0]}")
        if self.unclosed:
            return Finding("records", False, f"{text}, {self.unclosed:,} with an answer that no control token ends")
        return Finding("records", True, f"{text}, every answer trained")


def _ends(rows: Rows, record: Record) -> Iterator[tuple[int, int, bool]]:
    """For each answer of a row: its message, its last id, and whether that closes it."""
    spans = rows.spans
    decided = (spans["rule"] == Rule.ROLE) | (spans["rule"] == Rule.FLAG)
    for number, message in enumerate(record.messages):
        if message.role != "assistant":
            continue
        of_answer = np.flatnonzero((spans["message"] == number) & (spans["role"] == Role.ASSISTANT) & decided)
        if len(of_answer):
            last = int(of_answer[-1])
            yield number, int(rows.ids[rows.span_start[last + 1] - 1]), bool(spans["part"][last] == Part.CLOSE)
