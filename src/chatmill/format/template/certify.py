"""The certificate of a template: what it keeps of what a trainer relies on, and what it breaks, in one line each.

Every line is a promise held against small conversations made for it and, if there are any, against a user's own.
Some lines find out what a template does with reasoning or space; they fail only where the mask is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from chatmill.errors import RecordError, one_line
from chatmill.format.template.answers.answer_spans import shown, shown_end
from chatmill.format.template.answers.derive import Derived
from chatmill.format.template.probes import (
    PROBES,
    QUESTION,
    REASONING,
    SPACES,
    SYSTEM,
    TOOL,
    TOOL_REASONING,
    TURNS,
    forging,
)
from chatmill.format.template.renderer import TemplateRenderer
from chatmill.ledger import Ledger
from chatmill.records import Record
from chatmill.rows import Part, Role, Rows, Rule

Peer = Callable[[Record], Sequence[int]]
"""The ids that another program gives for a record."""


class Finding(NamedTuple):
    name: str
    passed: bool
    text: str


@dataclass
class Seen:
    """What was seen of one probe: its answers, or why it is refused."""

    record: Record
    derived: Derived | None = None
    rows: Rows | None = None
    fault: RecordError | None = None
    straddling: int = 0


@dataclass
class _Own:
    """What was seen of a user's own records."""

    count: int = 0
    refused: list[RecordError] = field(default_factory=list)
    different: list[Record] = field(default_factory=list)
    unclosed: int = 0
    control_text: int = 0


def certify(
    format: TemplateRenderer, records: Iterable[Record] = (), *, peer: Peer | None = None, peer_name: str = ""
) -> list[Finding]:
    """The lines of a certificate, in their order."""
    return list(_Certificate(format, peer, peer_name).findings(records))


class _Certificate:
    def __init__(self, format: TemplateRenderer, peer: Peer | None, peer_name: str) -> None:
        self.format, self.peer, self.peer_name = format, peer, peer_name
        self.seen = {probe.id: self._look(probe) for probe in PROBES}
        self.good = [seen for seen in self.seen.values() if seen.derived is not None]

    def findings(self, records: Iterable[Record]) -> Iterator[Finding]:
        own = self._read(records)
        yield self._ids(own)
        yield self._answers()
        yield self._terminator()
        yield self._bos()
        yield self._prompt()
        yield self._straddling()
        yield self._spaces()
        yield self._history()
        yield self._support("system", (SYSTEM,))
        yield self._support("tools", (TOOL, TOOL_REASONING))
        yield self._reasoning()
        yield self._control()
        if own.count:
            yield self._own(own)

    # Looking.

    def _look(self, record: Record) -> Seen:
        ledger = Ledger()
        try:
            derived = self.format.derive(record)
            laid = self.format.lay_derived(record, derived)
            rows = self.format.render([laid], ledger=ledger)
        except RecordError as fault:
            return Seen(record, fault=fault)
        straddling = sum(entry.tokens for _, reason, entry in ledger if reason == "straddling_token")
        return Seen(record, derived, rows, straddling=straddling)

    def _read(self, records: Iterable[Record]) -> _Own:
        own = _Own()

        def refuse(fault: RecordError) -> None:
            own.count += 1
            own.refused.append(fault)

        for record in self.format.renderable(records, refuse):
            own.count += 1
            ledger = Ledger()
            rows = self.format.render([record], ledger=ledger)
            holds_control = any(reason == "control_text" for _, reason, _ in ledger)
            own.control_text += holds_control
            own.unclosed += any(not closed for _, _, closed in _ends(rows, record))
            if self.peer is not None and not holds_control and rows.ids.tolist() != list(self.peer(record)):
                own.different.append(record)
        return own

    def _quote(self, seen: Seen, place: int) -> str:
        """The line of the template that wrote what stands at a place."""
        assert seen.derived is not None
        at, rendering = 0, seen.derived.rendering
        for piece, line in zip(rendering.pieces, rendering.lines, strict=True):
            at += len(piece.text)
            if at > place:
                return self.format.writers[bool(seen.record.tools)].quote(line)
        raise AssertionError

    # The lines.

    def _ids(self, own: _Own) -> Finding:
        if self.peer is None:
            return Finding("ids", True, "nothing to compare with: no transformers, or no tokenizer that it can open")
        different = [seen.record.id for seen in self.good if self._differs(seen)]
        if different or own.different:
            places = [f"probe {name}" for name in different]
            places += [f"{one_line(record.file)}:{record.line}" for record in own.different]
            more = f" and {len(places) - 3} more" if len(places) > 3 else ""
            return Finding("ids", False, f"not those of {self.peer_name}: {', '.join(places[:3])}{more}")
        count = len(self.good) + own.count - len(own.refused) - own.control_text
        return Finding("ids", True, f"{count} conversations have the ids of {self.peer_name}")

    def _differs(self, seen: Seen) -> bool:
        assert self.peer is not None and seen.rows is not None
        return bool(seen.rows.ids.tolist() != list(self.peer(seen.record)))

    def _answers(self) -> Finding:
        basic = [self.seen[probe.id] for probe in (QUESTION, TURNS, SPACES)]
        refused = [seen for seen in basic if seen.fault is not None]
        if refused:
            return Finding("answers", False, f"probe {refused[0].record.id}: {refused[0].fault}")
        turns = [turn for seen in self.good if seen.derived for turn in seen.derived.turns]
        both = [prefix for seen in self.good if seen.derived for prefix in seen.derived.prefixes]
        starts = sum(prefix.start is not None for prefix in both)
        stops = sum(prefix.stop is not None for prefix in both)
        by = f"by origin all, by prefix {starts} beginnings and {stops} ends, which agree" if both else "by tags"
        return Finding("answers", True, f"{len(turns)} answers of {len(self.good)} probes are trained: {by}")

    def _terminator(self) -> Finding:
        names = {id: token for token, id in self.format.marked.ids.items()}
        stops = self.format.folder.stops
        tokens: dict[str, None] = {}
        earlier: dict[str, None] = {}
        for seen in self.good:
            assert seen.derived is not None and seen.rows is not None
            for turn, (message, id, closed) in zip(seen.derived.turns, _ends(seen.rows, seen.record), strict=False):
                following = seen.record.messages[message + 1 : message + 2]
                decides = not following or following[0].role == "tool"
                if not closed and decides and self.format.mask == "derived":
                    what = f"no control token ends message {message} of probe {seen.record.id}"
                    text = shown_end(seen.derived.rendering.text[: turn.stop])
                    return Finding("terminator", False, f"{what}, after {text}; {self._quote(seen, turn.stop - 1)}")
                token = names.get(id, "")
                if decides and stops is not None and id not in stops:
                    ends = ", ".join(names.get(stop, str(stop)) for stop in stops)
                    what = f"{token or id} ends message {message} of probe {seen.record.id}, the model stops at {ends}"
                    return Finding("terminator", False, f"{what}; {self._quote(seen, turn.stop - 1)}")
                (tokens if decides else earlier)[token] = None
        parity = "the model stops there" if stops is not None else "no generation_config.json to hold it against"
        others = [token or "nothing" for token in earlier if token not in tokens]
        also = f"; earlier answers end with {', '.join(others)}" if others else ""
        return Finding("terminator", True, f"{' '.join(tokens)} is trained, {parity}{also}")

    def _bos(self) -> Finding:
        token = self.format.folder.special.get("bos_token")
        id = self.format.marked.ids.get(token) if token is not None else None
        if id is None:
            return Finding("bos", True, "the tokenizer has none")
        counts = {int(np.sum(seen.rows.ids == id)) for seen in self.good if seen.rows is not None}
        if counts and max(counts) > 1:
            return Finding("bos", False, f"{token} is written {max(counts)} times; a row begins with one")
        return Finding("bos", True, f"{token} is written {'once' if counts == {1} else 'nowhere, as in serving'}")

    def _prompt(self) -> Finding:
        broken = [(seen, turn) for seen in self.good for turn in self._breaks(seen)]
        if not broken:
            return Finding("prompt", True, "always the beginning of the row")
        seen, message = broken[0]
        text, prompt = self.format.text(seen.record), self.format.text(seen.record, message, prompt=True)
        at = next((n for n, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(text))
        many = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
        parts = f"the prompt goes on {shown(prompt[at:])}, the row {shown(text[at:])}"
        return Finding("prompt", True, f"message {message} of probe {seen.record.id} breaks it{many}: {parts}")

    def _breaks(self, seen: Seen) -> Iterator[int]:
        assert seen.derived is not None
        text = seen.derived.rendering.text
        for number, message in enumerate(seen.record.messages):
            if message.role == "assistant" and not text.startswith(self.format.text(seen.record, number, prompt=True)):
                yield number

    def _straddling(self) -> Finding:
        found = [seen for seen in self.good if seen.straddling]
        if not found:
            return Finding("borders", True, "no token lies across the border of an answer")
        seen = found[0]
        assert seen.rows is not None and seen.derived is not None
        name = f"{seen.straddling} in probe {seen.record.id}"
        before = shown_end(seen.derived.rendering.text[: seen.derived.turns[0].start])
        return Finding("borders", True, f"tokens across a border count as where they begin: {name}, as after {before}")

    def _spaces(self) -> Finding:
        seen = self.seen[SPACES.id]
        if seen.derived is None:
            return Finding("space", True, "not told: the probe is refused")
        text = seen.derived.rendering.text
        roles = ("user", "assistant")
        stripped = [r for r in roles if any(m.role == r and m.content not in text for m in seen.record.messages)]
        if not stripped:
            return Finding("space", True, "around messages is kept")
        return Finding("space", True, f"around {' and '.join(stripped)} messages is stripped, and so not trained")

    def _history(self) -> Finding:
        where = []
        for seen in (self.seen[probe.id] for probe in (TURNS, REASONING, TOOL, TOOL_REASONING)):
            turns = seen.derived.turns if seen.derived is not None else ()
            if found := [str(turn.message) for turn in turns if self._is_rewritten(seen, turn.message)]:
                where.append(f"message {' and '.join(found)} of probe {seen.record.id}")
        if not where:
            return Finding("history", True, "answers stay as they were when they were the last")
        return Finding("history", True, f"is rewritten when more follows: {', '.join(where)}")

    def _is_rewritten(self, seen: Seen, message: int) -> bool:
        """Whether an answer is another text when it is the last."""
        if message + 1 == len(seen.record.messages):
            return False
        alone = Record(seen.record.messages[: message + 1], seen.record.id, seen.record.tools)
        try:
            last = self.format.derive(alone)
        except RecordError:
            return True
        assert seen.derived is not None
        now = next(turn for turn in seen.derived.turns if turn.message == message)
        then = last.turns[-1]
        return seen.derived.rendering.text[now.start : now.stop] != last.rendering.text[then.start : then.stop]

    def _support(self, name: str, probes: Sequence[Record]) -> Finding:
        faults = [seen.fault for probe in probes if (seen := self.seen[probe.id]).fault is not None]
        if not faults:
            derived = [self.seen[probe.id].derived for probe in probes]
            left_out = any("tools_left_out" in found.notes for found in derived if found is not None)
            return Finding(name, True, "calls are written, definitions are left out" if left_out else "supported")
        fault = faults[0]
        assert fault is not None
        if fault.kind == "mask_disputed":
            return Finding(name, False, str(fault))
        return Finding(name, True, f"not supported: {fault.what}")

    def _reasoning(self) -> Finding:
        seen = self.seen[REASONING.id]
        if seen.derived is None:
            assert seen.fault is not None
            return Finding("reasoning", seen.fault.kind != "mask_disputed", f"refused: {seen.fault.what}")
        written = [
            number
            for number, message in enumerate(seen.record.messages)
            if message.reasoning and message.reasoning in seen.derived.rendering.text
        ]
        count = sum(bool(message.reasoning) for message in seen.record.messages)
        if not written:
            return Finding("reasoning", True, "not supported: it is left out")
        return Finding("reasoning", True, f"trained{'' if len(written) == count else ', in the last answer only'}")

    def _control(self) -> Finding:
        tokens = list(self.format.marked.ids)
        seen = self._look(forging(tokens))
        if seen.derived is None or seen.rows is None:
            return Finding("control", True, f"text that holds control tokens is refused: {seen.fault}")
        control = np.array(list(self.format.marked.ids.values()), dtype=np.uint32)
        found = int(np.isin(seen.rows.ids, control).sum())
        own = "".join("\0" if piece.source is not None else piece.text for piece in seen.derived.rendering.pieces)
        if found != (written := len(self.format.markers.find(own))):
            what = f"{found} control tokens come out of a conversation for which the template writes {written}"
            return Finding("control", False, what)
        return Finding("control", True, f"all {len(tokens)} control tokens are plain text inside messages")

    def _own(self, own: _Own) -> Finding:
        text = f"{own.count:,} records"
        if own.control_text:
            text += f", {own.control_text:,} of them with control text"
        if own.refused:
            kinds: dict[str, int] = {}
            for fault in own.refused:
                kinds[fault.kind] = kinds.get(fault.kind, 0) + 1
            reasons = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
            return Finding("records", False, f"{text}; refused: {reasons}; the first: {own.refused[0]}")
        if own.unclosed:
            return Finding("records", False, f"{text}, {own.unclosed:,} with an answer that no control token ends")
        return Finding("records", True, f"{text}, every answer trained")


def _ends(rows: Rows, record: Record) -> Iterator[tuple[int, int, bool]]:
    """Of each answer of a row: its message, the last of its ids, and whether that closes it."""
    one = rows.spans
    for number, message in enumerate(record.messages):
        if message.role != "assistant":
            continue
        decided = (one["rule"] == Rule.ROLE) | (one["rule"] == Rule.FLAG)
        of = np.flatnonzero((one["message"] == number) & (one["role"] == Role.ASSISTANT) & decided)
        if len(of):
            last = int(of[-1])
            yield number, int(rows.ids[rows.span_start[last + 1] - 1]), bool(one["part"][last] == Part.CLOSE)
