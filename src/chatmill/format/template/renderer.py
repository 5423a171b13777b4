"""A chat template as a format: conversations to Rows, each way of writing them derived once and then replayed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import msgspec

from chatmill.errors import RecordError, UsageError, one_line
from chatmill.format.compiled import ROLE_CODES
from chatmill.format.renderer import Mask, OnReject, render_chunks
from chatmill.format.template.answers.derive import Derived, derive
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.encoding.encode import LaidOutRecord, encode_rows, laid
from chatmill.format.template.encoding.layout import TokenLayout, lay_out
from chatmill.format.template.hf_folder import HFFolder, TemplateSource, read_folder
from chatmill.format.template.messages import TemplateInput, is_plain, plain_conversation, shape_and_texts
from chatmill.format.template.probes import QUESTION, style_of
from chatmill.format.template.template import ChatTemplate
from chatmill.format.template.tracing.trace import TraceStep, replay, shortened
from chatmill.ledger import Ledger
from chatmill.records import ChatColumns, Message, Record
from chatmill.rows import Rows, Rule, TrainOn
from chatmill.tokenizer import Tokenizer, open_tokenizer
from chatmill.tokenizer.control_encoder import ControlEncoder

LONGEST = 64
"""Messages of a conversation whose way of writing is kept: to make sure of one takes the square of their number."""
WAYS = 16
"""Ways of writing one shape that are kept; more are derived each time."""
CELLS = 2**20
"""Cells of all that are kept together: memory, not correctness."""
SHAPES = 2**17
"""Shapes that are remembered to have been met."""

ANSWER = "Yes."
"""Placeholder for an answer that is not there yet; any text would do."""


@dataclass
class CachedTrace:
    """One way in which conversations of a shape are written, and how often it was met."""

    steps: tuple[TraceStep, ...]
    layout: TokenLayout
    notes: tuple[str, ...]
    uses: int = 0


class TemplateRenderer:
    """A Hugging Face chat template with its tokenizer: what `--format template` is."""

    name = "template"

    def __init__(
        self,
        folder: HFFolder,
        tokenizer: Tokenizer,
        *,
        arguments: Mapping[str, Any] | None = None,
        mask: Mask = "derived",
        now: datetime | None = None,
    ) -> None:
        self.folder, self.mask, self.now = folder, mask, now
        self.arguments = dict(arguments or {})
        self.marked = ControlEncoder(
            tokenizer, None if folder.tokenizer_json is None else folder.tokenizer_json.read_bytes()
        )
        self.markers = ControlTokens(tokenizer.control_ids)
        names = {id: token for token, id in tokenizer.control_ids.items()}
        self.ends = frozenset(names[id] for id in folder.stops or () if id in names)
        """The tokens a server stops at."""
        writer = self._writer(folder.template)
        self.writers = {False: writer, True: self._writer(folder.with_tools) if folder.with_tools else writer}
        """By whether the conversation has tools."""
        self._tokenizer = tokenizer
        self._ways: dict[tuple[bool, bytes], list[CachedTrace]] = {}
        self._seen: set[int] = set()
        self._kept = 0

    # What it is.

    @property
    def eot(self) -> str:
        return "eot"

    @cached_property
    def tokens(self) -> dict[str, str]:
        """The control tokens by name: as the tokenizer calls them, and `eot` for the one that ends an answer."""
        known = {
            name.removesuffix("_token"): token
            for name, token in self.folder.special.items()
            if self._tokenizer.token_id(token) is not None
        }
        end = self.terminator or known.get("eos") or known.get("pad")
        if end is None:
            what = f"{self.folder.template.name}: no control token of {self._tokenizer.name} ends an answer"
            raise UsageError(f"{what}; give the tokenizer that the template was made for")
        return {**known, "eot": end}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer.opened_for(self.tokens)

    def to_json(self) -> dict[str, Any]:
        """Everything that decides how a conversation is written."""
        templates = {"template": self.folder.template.source}
        if self.folder.with_tools is not None:
            templates["tool_use"] = self.folder.with_tools.source
        return {
            "name": self.name,
            **templates,
            "sha256": hashlib.sha256(self.folder.template.source.encode()).hexdigest(),
            "tokens": dict(self.tokens),
            "special": dict(self.folder.special),
            "arguments": self.arguments,
            "mask": self.mask,
            "now": None if self.now is None or not self.uses_date else self.now.isoformat(),
            "ends": sorted(self.ends),
        }

    @property
    def uses_date(self) -> bool:
        """Whether its template asks for the date."""
        return any("strftime_now" in writer.source for writer in self.writers.values())

    # What it does.

    def renderable(self, records: Iterable[Record], on_reject: OnReject | None = None) -> Iterator[Record]:
        """The records whose answers are known for certain."""
        for record in records:
            try:
                yield self.lay(record)
            except RecordError as fault:
                if on_reject is None:
                    raise
                on_reject(fault)

    def renders_columns(self, columns: ChatColumns) -> bool:
        # A template is rendered for each conversation by itself.
        return False

    def render(
        self, records: Sequence[Record], *, train_on: TrainOn = "assistant", ledger: Ledger | None = None
    ) -> Rows:
        """One row for each record."""
        batch = [record if isinstance(record, LaidOutRecord) else self.lay(record) for record in records]
        tags = self.mask == "tags"
        return encode_rows(batch, self.marked, train_on=train_on, tags=tags, ledger=ledger or Ledger())

    render_chunks = render_chunks

    def prompt_ids(self, record: Record) -> list[int]:
        answered = msgspec.structs.replace(record, messages=[*record.messages, Message("assistant", ANSWER)])
        row = self.render([answered])
        trained = (row.spans["message"] == len(record.messages)) & (row.spans["rule"] == Rule.ROLE)
        ids: list[int] = row.ids[: row.span_start[trained.argmax()]].tolist()
        return ids

    def lay(self, record: Record) -> LaidOutRecord:
        """The record laid out for encoding; a `RecordError` with its place if it is refused."""
        try:
            one = self._lay(record)
            if self.marked.rewrites:
                # Whether its borders can be told is seen when it is encoded, and must be known before it is accepted.
                encode_rows([one], self.marked, train_on="assistant", tags=False, ledger=Ledger())
        except RecordError as fault:
            raise fault.at(record.file, record.line, record.id) from None
        return one

    def derive(self, record: Record, *, lasting: bool = False) -> Derived:
        """The rendering of one record and its answers, afresh."""
        writer = self.writers[bool(record.tools)]
        texts = shape_and_texts(record, writer.style)[1]
        return derive(record, writer, self.markers, texts=texts, ends=self.ends, mask=self.mask, lasting=lasting)

    def conversation(self, record: Record) -> TemplateInput:
        """What the template is given of a record."""
        return plain_conversation(record, self.writers[bool(record.tools)].style)

    def text(self, record: Record, messages: int | None = None, *, prompt: bool = False) -> str:
        """The rendering as plain text, as a server would make it."""
        return self.writers[bool(record.tools)].write(self.conversation(record), messages, prompt=prompt)

    def _lay(self, record: Record) -> LaidOutRecord:
        with_tools = bool(record.tools)
        shape, texts = shape_and_texts(record, self.writers[with_tools].style)
        holds_control = self.markers.any_in(texts) or (with_tools and self.markers.any_in(record.tools))
        control = ("control_text",) if holds_control else ()
        ways = self._ways.get((with_tools, shape), ())
        for way in ways:
            slots = replay(way.steps, texts.copy())
            if slots is not None:
                self._confirm(record, way, slots)
                return laid(record, way.layout, slots, control + way.notes)
        lasting = len(record.messages) <= LONGEST and self._recurs(with_tools, shape)
        lasting = lasting and len(ways) < WAYS and self._kept < CELLS
        derived = self.derive(record, lasting=lasting)
        if not (lasting and derived.trace.whole):
            return self.lay_derived(record, derived, control)
        layout = lay_out(derived.rendering, derived.turns, _roles(record), self.markers, cast=self.marked)
        steps = shortened(derived.trace.steps, len(texts))
        self._kept += layout.cells + len(steps)
        self._ways.setdefault((with_tools, shape), []).append(CachedTrace(steps, layout, derived.notes))
        slots = replay(steps, texts.copy())
        assert slots is not None
        return laid(record, layout, slots, control + derived.notes)

    def lay_derived(self, record: Record, derived: Derived, notes: tuple[str, ...] = ()) -> LaidOutRecord:
        """A record laid out by a derivation of its own."""
        layout = lay_out(derived.rendering, derived.turns, _roles(record), self.markers)
        return laid(record, layout, [], notes + derived.notes)

    def _recurs(self, with_tools: bool, shape: bytes) -> bool:
        """Whether others of this shape are likely: plain ones are, the others when they have been met before."""
        key = hash((with_tools, shape))
        met = key in self._seen
        if len(self._seen) < SHAPES:
            self._seen.add(key)
        return met or is_plain(shape)

    def _confirm(self, record: Record, way: CachedTrace, slots: Sequence[str]) -> None:
        """Hold a way against the template itself, ever more seldom."""
        way.uses += 1
        if way.uses & (way.uses - 1) == 0 and way.layout.text(slots) != self.text(record):
            what = "it is not written as others of its kind; this is a fault of chatmill, please report it"
            raise RecordError(what, "leave it out", kind="not_alike")

    # How it is opened.

    def _writer(self, template: TemplateSource) -> ChatTemplate:
        variables = {**self.folder.special, **self.arguments}
        writer = ChatTemplate(template.source, template.name, variables=variables, now=self.now)
        if self.mask == "tags" and not writer.has_tags:
            raise UsageError(f"{template.name}: has no generation tags; leave out --mask tags")
        writer.style = style_of(writer)
        return writer

    @cached_property
    def terminator(self) -> str | None:
        """The control token that ends an answer, as far as a small conversation shows it."""
        writer = self.writers[False]
        texts = shape_and_texts(QUESTION, writer.style)[1]
        try:
            derived = derive(QUESTION, writer, self.markers, texts=texts, ends=self.ends)
        except RecordError:
            return None
        turn = derived.turns[0]
        found = self.markers.find(derived.rendering.text[: turn.stop])
        return found[-1].token if turn.closed and found and found[-1].stop == turn.stop else None


def open_template_renderer(
    tokenizer: str,
    *,
    chat_template: str | None = None,
    arguments: Sequence[str] = (),
    mask: Mask = "derived",
    now: datetime | None = None,
) -> TemplateRenderer:
    """The template of a tokenizer folder, or that of a file, with its tokenizer.

    `arguments` are what the template is given besides, as `name=value`; values that are JSON are read as such.
    """
    folder = read_folder(tokenizer, chat_template)
    return TemplateRenderer(folder, open_tokenizer(tokenizer), arguments=parse_arguments(arguments), mask=mask, now=now)


def parse_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """`enable_thinking=false` and the like."""
    out: dict[str, Any] = {}
    for argument in arguments:
        name, is_there, value = argument.partition("=")
        if not is_there or not name.isidentifier() or name in ("messages", "tools", "add_generation_prompt"):
            raise UsageError(
                f'--template-arg "{one_line(argument)}" is no NAME=VALUE; give one like enable_thinking=false'
            )
        try:
            out[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            out[name] = value
    return out


def _roles(record: Record) -> list[int]:
    return [ROLE_CODES[message.role] for message in record.messages]
