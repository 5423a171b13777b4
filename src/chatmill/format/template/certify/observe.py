"""Render test conversations and the user's records with a chat template, and collect the results for `chatmill
certify`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from typing import NamedTuple, Protocol

from chatmill.errors import RecordError, one_line
from chatmill.format.template.certify.plain_check import CheckedAnswer, PlainCheck, TextOf
from chatmill.format.template.probes import PROBES, TURNS
from chatmill.format.template.renderer import TemplateRenderer
from chatmill.ledger import Ledger
from chatmill.records import Record
from chatmill.rows import Rows

CONTROL_TEXT = "control_text"
"""Ledger note on rows whose message texts contain control tokens, which transformers encodes differently."""
CHUNK = 64
"""Number of records that a process renders at a time."""


class Peer(Protocol):
    """A function that renders records with another library, such as transformers."""

    def __call__(self, record: Record, *, null_content: bool = False) -> Sequence[int]:
        """Return the token ids of a record, or an empty sequence if the library rejects the record.

        With `null_content`, the empty content of a message with tool calls is passed as null.
        """


class Rendered(NamedTuple):
    """A record, its rendered text and row, and its answers."""

    record: Record
    text: str
    rows: Rows
    answers: list[CheckedAnswer]
    notes: frozenset[str]
    """The ledger notes about the conversation."""

    @property
    def place(self) -> str:
        record = self.record
        return f"probe {record.id}" if record.file == "probe" else f"{one_line(record.file)}:{record.line}"


@dataclass
class OwnRecords:
    """Results for the user's records. Records are identified by `file:line`."""

    rendered: int = 0
    refused: list[RecordError] = field(default_factory=list)
    compared: int = 0
    different: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unended: list[str] = field(default_factory=list)
    answers: int = 0
    straddling: int = 0
    relations: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        return self.rendered + len(self.refused)

    def add(self, other: OwnRecords) -> None:
        """Add the results of another chunk of records."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)


InOrder = Callable[[Callable[[list[Record]], OwnRecords], Iterable[list[Record]]], Iterable[OwnRecords]]


class Observations:
    """The rendered probes (built-in test conversations), and the results for the user's records."""

    def __init__(self, renderer: TemplateRenderer, peer: Peer | None, peer_name: str) -> None:
        self.renderer, self.peer, self.peer_name = renderer, peer, peer_name
        self.control_ids = frozenset(renderer.encoder.ids.values())
        sources = [template.source for template in renderer.templates.values()]
        self.check = PlainCheck(
            renderer.encoder.tokenizer,
            sources,
            renderer.folder.stops,
            TURNS,
            self.text_of(TURNS),
            strip_prompt_space=renderer.strip_prompt_space,
        )
        self.good: dict[str | None, Rendered] = {}
        self.faults: dict[str | None, RecordError] = {}
        self.own = OwnRecords()
        for record in PROBES:
            try:
                self.good[record.id] = self.rendered(renderer.lay_out(record))
            except RecordError as fault:
                self.faults[record.id] = fault

    @property
    def probes(self) -> list[Rendered]:
        return list(self.good.values())

    @property
    def answers(self) -> list[tuple[Rendered, CheckedAnswer]]:
        """All answers in the test conversations, each with its conversation."""
        return [(probe, answer) for probe in self.good.values() for answer in probe.answers]

    def rendered(self, record: Record) -> Rendered:
        ledger = Ledger()
        text_of = self.text_of(record)
        rows = self.renderer.render([record], ledger=ledger)
        answers = self.check.answers(record, rows, text_of)
        notes = frozenset(reason for bucket, reason, _ in ledger if bucket == "noted")
        return Rendered(record, text_of(len(record.messages), False), rows, answers, notes)

    def differs(self, one: Rendered) -> bool:
        """Whether the other library and the renderer return different token ids.

        Rows whose message texts contain control tokens are not compared.
        """
        return (
            self.peer is not None
            and CONTROL_TEXT not in one.notes
            and one.rows.ids.tolist() != list(self.peer(one.record))
        )

    def is_ended(self, answer: CheckedAnswer) -> bool:
        return answer.ids[-1] in self.control_ids

    def read(self, records: Iterable[Record], in_order: InOrder = map) -> None:
        """Render the user's records and add the results to `own`.

        `in_order` is `map`, or an equivalent that uses several processes.
        """
        stream = iter(records)
        chunks = iter(lambda: list(islice(stream, CHUNK)), [])
        few = list(islice(chunks, 2))
        # Do not start other processes for a single chunk.
        for own in (map if len(few) < 2 else in_order)(self.observe, chain(few, chunks)):
            self.own.add(own)

    def observe(self, records: Iterable[Record]) -> OwnRecords:
        own = OwnRecords()
        for record in self.renderer.renderable(records, own.refused.append):
            one = self.rendered(record)
            own.rendered += 1
            own.compared += CONTROL_TEXT not in one.notes
            own.answers += len(one.answers)
            own.straddling += sum(answer.straddles for answer in one.answers)
            own.relations.update(answer.relation for answer in one.answers)
            own.notes.update(sorted(one.notes))
            if self.differs(one):
                own.different.append(one.place)
            for answer in one.answers:
                if answer.faults:
                    own.wrong.append(f"{one.place}: message {answer.message} {answer.faults[0]}")
                if not self.is_ended(answer):
                    own.unended.append(f"{one.place}: message {answer.message}")
        return own

    def text_of(self, record: Record) -> TextOf:
        """Return a function that renders the record as plain text and caches the results."""

        @cache
        def text_of(messages: int, prompt: bool) -> str:
            return self.renderer.text(record, messages, prompt=prompt)

        return text_of
