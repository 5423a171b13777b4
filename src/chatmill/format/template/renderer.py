"""Render conversations with a Hugging Face chat template. Traces of the template are cached and replayed for other
conversations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from chatmill.errors import ChatmillError, DataError, RecordError, UsageError
from chatmill.format.renderer import Mask, OnReject, Renderer, apply_record_weights
from chatmill.format.slices import render_slices
from chatmill.format.template.answer_check import check_answers, without_prompt_space
from chatmill.format.template.answers.derived import DerivedAnswers, Note
from chatmill.format.template.control_tokens import ControlTokens
from chatmill.format.template.derive_ahead import derive_ahead, first_of_shapes
from chatmill.format.template.encode import LaidOut, LaidOutBatch, LaidOutRecord, encode_rows, laid_out_record
from chatmill.format.template.hf_folder import HFFolder
from chatmill.format.template.laid_out_columns import ColumnSearch, LaidOutColumns, RefusedRecord, lay_out_columns
from chatmill.format.template.layout import token_layout
from chatmill.format.template.layout_table import LayoutTables
from chatmill.format.template.probes import QUESTION
from chatmill.format.template.process.client import TemplateProcess
from chatmill.format.template.ranges import rendered_weights
from chatmill.format.template.row_check import RowCheck
from chatmill.format.template.template_headers import TemplateHeaders
from chatmill.format.template.template_input import LEFT_OUT, TemplateInput, only_turns, plain_input, shape_and_texts
from chatmill.format.template.text_tokens import learn_text_tokens, token_notes
from chatmill.format.template.trace_cache import LAST_ONLY, CachedTrace, ShapeKey, TraceCache, cached_trace
from chatmill.format.template.tracing.trace import fill_slots, replay
from chatmill.format.template.turn_marks import TurnMarks, learn_turn_marks
from chatmill.ledger import Ledger
from chatmill.records import ChatColumns, Message, Record
from chatmill.rows import Rows, TrainOn, concat
from chatmill.tokenizer import Tokenizer
from chatmill.tokenizer.control_encoder import ControlEncoder, unmarked_tokens, with_declared

MAX_KWARGS = 16
"""Maximum number of cached renderers for different `chat_template_kwargs`.

Each renderer has its own traces and process.
"""
ANSWER = "Yes."
"""Arbitrary text for the placeholder answer when a prompt is rendered."""
_KWARGS, _RANGES = attrgetter("template_kwargs"), attrgetter("train_ranges")


class TemplateRenderer:
    """Renders with a Hugging Face chat template and its tokenizer, for `--format template`."""

    name = "template"

    def __init__(
        self,
        folder: HFFolder,
        tokenizer: Tokenizer,
        *,
        arguments: Mapping[str, Any] | None = None,
        mask: Mask = "derived",
        now: datetime | None = None,
        text_tokens: Collection[str] | None = None,
        allow_no_end: bool = False,
        strip_prompt_space: bool = False,
        kwargs: str = "",
    ) -> None:
        """`text_tokens` contains the added tokens, such as `<think>`, that are recognized in message text. If
        `text_tokens` is None, these tokens are determined from the template.

        `kwargs` contains the `chat_template_kwargs` of the records to render, as JSON. `arguments` must include the
        values in `kwargs`.
        """
        self.folder, self.mask, self.now = folder, mask, now
        self.allow_no_end, self.strip_prompt_space = allow_no_end, strip_prompt_space
        self.arguments = dict(arguments or {})
        self._kwargs = kwargs
        self._variants: dict[str, TemplateRenderer] = {}
        raw = None if folder.tokenizer_json is None else folder.tokenizer_json.read_bytes()
        if raw is not None:
            raw = with_declared(raw, folder.declared, tokenizer.control_ids)
        self.control_tokens = ControlTokens(tokenizer.control_ids)
        names = {id: token for token, id in tokenizer.control_ids.items()}
        self.ends = frozenset(names[id] for id in folder.stops or () if id in names)
        """The tokens at which an inference server stops generating."""
        self.process = TemplateProcess(
            [source for source in (folder.template, folder.with_tools) if source is not None],
            variables={**folder.special, **self.arguments},
            now=now or datetime.now(),
            tokens=list(tokenizer.control_ids),
            ends=sorted(self.ends),
        )
        templates = self.process.templates
        self.templates = {False: templates[0], True: templates[-1]}
        """The template for conversations without tools (False) and with tools (True)."""
        for template in templates:
            if mask == "tags" and not template.has_tags:
                raise UsageError(f"{template.name}: has no generation tags; remove --mask tags")
        if text_tokens is None:
            added = unmarked_tokens(raw) if raw is not None else frozenset()
            text_tokens = learn_text_tokens(self._probe, self.control_tokens, added - folder.marked_special - self.ends)
        self.text_tokens = ControlTokens({token: tokenizer.control_ids[token] for token in sorted(text_tokens)})
        """The added tokens, such as `<think>`, that are recognized in message text."""
        self.encoder = ControlEncoder(tokenizer, raw, text_tokens=self.text_tokens.ids)
        self._tokenizer = tokenizer
        self._cache = TraceCache()
        self._tables = LayoutTables()
        self._search = ColumnSearch(self.control_tokens)
        self._turn_marks: dict[int, TurnMarks] = {}
        self._headers = TemplateHeaders(self.encoder, self.control_tokens, self.text_tokens, allow_no_end)

    eot = "eot"

    @cached_property
    def tokens(self) -> dict[str, str]:
        """Maps names to control tokens: `bos`, `eos` and other special tokens of the tokenizer, and `eot`, the token
        that ends an answer.
        """
        special = {
            name.removesuffix("_token"): token
            for name, token in self.folder.special.items()
            if self._tokenizer.token_id(token) is not None
        }
        end = self.terminator or special.get("eos") or special.get("pad")
        if end is None:
            what = f"{self.folder.template.name}: no control token of {self._tokenizer.name} ends an answer"
            raise UsageError(f"{what}; use the tokenizer that the template was written for")
        return {**special, "eot": end}

    @cached_property
    def terminator(self) -> str | None:
        """The control token that ends an answer, found by rendering a small conversation; None if no control token ends
        it.
        """
        try:
            derived = self.derive(QUESTION, mask="derived")
        except RecordError:
            return None
        answer = derived.answers[0]
        matches = self.control_tokens.find(derived.rendering.text[: answer.stop])
        return matches[-1][0] if answer.closed and matches and matches[-1].end() == answer.stop else None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer.opened_for(self.tokens)

    @property
    def uses_date(self) -> bool:
        return any("strftime_now" in template.source for template in self.templates.values())

    def to_json(self) -> dict[str, Any]:
        sources = {"template": self.folder.template.source}
        if self.folder.with_tools is not None:
            sources["tool_use"] = self.folder.with_tools.source
        return {
            "name": self.name,
            **sources,
            "sha256": hashlib.sha256(self.folder.template.source.encode()).hexdigest(),
            "tokens": dict(self.tokens),
            "special": dict(self.folder.special),
            "arguments": self.arguments,
            "mask": self.mask,
            "now": None if self.now is None or not self.uses_date else self.now.isoformat(),
            "ends": sorted(self.ends),
            **({"text_tokens": sorted(self.text_tokens.ids)} if self.text_tokens.ids else {}),
            **({"allow_no_end_token": True} if self.allow_no_end else {}),
            **({"strip_prompt_space": True} if self.strip_prompt_space else {}),
        }

    def renderable(
        self, records: Iterable[Record], on_reject: OnReject | None = None, *, last_only: bool = False
    ) -> Iterator[Record]:
        for record in records:
            try:
                yield self.lay_out(record, last_only=last_only)
            except RecordError as fault:
                if on_reject is None:
                    raise
                on_reject(fault)

    def lay_out_columns(self, columns: ChatColumns) -> ChatColumns | list[Record]:
        if self._kwargs or not self.encoder.by_sections or self.encoder.normalizes:
            return list(columns)
        holding, plain = self._search.rows(columns), self._cache.plain
        return lay_out_columns(columns, holding, plain=plain, confirm=self._confirm, lay_out=self._lay_out_texts)

    def warm_up(self, blocks: Iterable[ChatColumns], *, processes: int) -> None:
        if self._kwargs or not self.encoder.by_sections or self.encoder.normalizes:
            return

        def derive(record: Record, process: TemplateProcess, keep: bool) -> DerivedAnswers:
            return self.derive(record, cacheable=True, process=process, keep=keep)

        shapes = {shape.key: shape for block in blocks for shape in first_of_shapes(block, self._search.rows(block))}
        ahead = derive_ahead(
            shapes.values(), derive, self.process, processes=processes, before=lambda: self.turn_marks(False)
        )
        try:
            for shape, derived in ahead:
                self._derive_layout(shape.key, shape.texts, shape.record, False, derived)
        except ChatmillError:
            # A worker that renders the conversation reports the error, with the place of the record.
            pass

    def render(
        self,
        records: Sequence[Record],
        *,
        train_on: TrainOn = "assistant",
        ledger: Ledger | None = None,
        threads: int | None = None,
    ) -> Rows:
        options: dict[str, Any] = {"train_on": train_on, "tags": self.mask == "tags"}
        if isinstance(records, LaidOutColumns):
            return self._encode(records, records.laid_out, ledger=ledger or Ledger(), **options)
        batch = list(map(self.lay_out, records))
        # Use only one thread for records with `chat_template_kwargs`, because their renderers are created and evicted
        # during rendering.
        has_kwargs = any(map(_KWARGS, batch))

        def render(part: Sequence[LaidOutRecord], counts: Ledger | None) -> Rows:
            encode = self._encode_variants if has_kwargs else self._encode_batch
            rows = encode(part, ledger=counts or Ledger(), **options)
            apply_record_weights(part, rows.spans, rows.first_span)
            return rows

        return render_slices(render, batch, ledger=ledger, threads=1 if has_kwargs else threads)

    def _encode_batch(self, batch: Sequence[LaidOutRecord], **options: Any) -> Rows:
        return self._encode(batch, LaidOutBatch.of([record.laid_out for record in batch]), **options)

    def _encode_variants(self, batch: Sequence[LaidOutRecord], **options: Any) -> Rows:
        """Encode records with different `chat_template_kwargs`, and return the rows in the order of the records."""
        renderers = [self._for_record(record) for record in batch]
        order: list[int] = []
        parts: list[Rows] = []
        for renderer in dict.fromkeys(renderers):
            chosen = [at for at, each in enumerate(renderers) if each is renderer]
            for with_tools in {bool(batch[at].tools) for at in chosen}:
                # A renderer that was evicted and created again lacks the turn marks that the row check needs.
                renderer.turn_marks(with_tools)
            parts.append(renderer._encode_batch([batch[at] for at in chosen], **options))
            order += chosen
        return concat(parts).take(np.argsort(order))

    render_chunks = Renderer.render_chunks

    def _for_record(self, record: Record) -> TemplateRenderer:
        """Return the renderer for the `chat_template_kwargs` of a record, or `self` if it has the same kwargs."""
        if record.template_kwargs == self._kwargs:
            return self
        renderer = self._variants.pop(record.template_kwargs, None)
        if renderer is None:
            while len(self._variants) >= MAX_KWARGS:
                # Evict the least recently used renderer. Rows do not depend on which renderers are cached.
                del self._variants[next(iter(self._variants))]
            renderer = TemplateRenderer(
                self.folder,
                self._tokenizer,
                arguments={**self.arguments, **msgspec.json.decode(record.template_kwargs)},
                mask=self.mask,
                now=self.now,
                text_tokens=self.text_tokens.ids,
                allow_no_end=self.allow_no_end,
                strip_prompt_space=self.strip_prompt_space,
                kwargs=record.template_kwargs,
            )
        self._variants[record.template_kwargs] = renderer
        return renderer

    def prompt_ids(self, record: Record) -> list[int]:
        ids: list[int] = self.prompt_row(record).ids.tolist()
        return ids

    def prompt_row(self, record: Record) -> Rows:
        """Return a row with the prompt for an answer to the last message of the record."""
        if (renderer := self._for_record(record)) is not self:
            return renderer.prompt_row(record)
        answered = msgspec.structs.replace(record, messages=[*record.messages, Message("assistant", ANSWER)])
        try:
            derived = self.derive(answered, mask="derived")
            self.check(answered, derived)
        except RecordError as fault:
            raise fault.at(record.file, record.line, record.id) from None
        start = next(answer.start for answer in derived.answers if answer.message == len(record.messages))
        # Remove the placeholder answer before encoding, so that no token spans the end of the prompt.
        before = replace(derived, rendering=derived.rendering.before(start), answers=(), contexts=(), steps=None)
        return self.render([laid_out_record(answered, self.lay_out_derived(answered, before))])

    def template_input(self, record: Record) -> TemplateInput:
        """Return the template variables for a record."""
        return plain_input(record, self.templates[bool(record.tools)].style)

    def text(self, record: Record, messages: int | None = None, *, prompt: bool = False) -> str:
        """Render the first `messages` messages to a string, like `apply_chat_template` with `tokenize=False`."""
        return self.process.text(self.templates[bool(record.tools)].number, record, messages, prompt=prompt)

    def derive(
        self,
        record: Record,
        *,
        mask: Mask | None = None,
        cacheable: bool = False,
        last_only: bool = False,
        process: TemplateProcess | None = None,
        keep: bool = False,
    ) -> DerivedAnswers:
        """Render one record without using cached traces, and find its answers. `process` replaces the template process
        of this renderer. With `keep`, the process keeps the renderings for records with the first messages of this one.
        """
        template = self.templates[bool(record.tools)]
        texts = len(shape_and_texts(record, template.style)[1])
        derived = (process or self.process).derive(
            template.number,
            record,
            texts=texts,
            mask=mask or self.mask,
            cacheable=cacheable,
            last_only=last_only,
            text_tokens=self.text_tokens.ids,
            keep=keep,
        )
        return without_prompt_space(derived) if self.strip_prompt_space else derived

    def check(self, record: Record, derived: DerivedAnswers) -> tuple[Note, ...]:
        """Check the answers in a rendered record and return the names of ledger entries about them.

        Raise a `RecordError` if an answer is invalid.
        """
        turns = self.turn_marks(bool(record.tools))
        return check_answers(derived, self.control_tokens, turns, allow_no_end=self.allow_no_end)

    def turn_marks(self, with_tools: bool) -> TurnMarks:
        """Return the strings that start and end turns in the template for conversations with or without tools."""
        number = self.templates[with_tools].number
        if number not in self._turn_marks:

            def derive(record: Record) -> DerivedAnswers:
                size = len(shape_and_texts(record, self.templates[with_tools].style)[1])
                return self.process.derive(number, record, texts=size, mask="derived", cacheable=False)

            def text(record: Record, messages: int, prompt: bool) -> str:
                return self.process.text(number, record, messages, prompt=prompt)

            stops = None if self.folder.stops is None else self.ends
            eos = self.folder.special.get("eos_token")
            self._turn_marks[number] = learn_turn_marks(text, derive, self.control_tokens, stops=stops, eos=eos)
        return self._turn_marks[number]

    def lay_out(self, record: Record, *, last_only: bool = False) -> LaidOutRecord:
        """Render the record and return it with its layout of texts and control tokens. Raise a `RecordError` if the
        record cannot be rendered.
        """
        if isinstance(record, LaidOutRecord):
            return record
        if isinstance(record, RefusedRecord):
            raise record.fault
        try:
            if record.is_text:
                what = "the record is a single text without turns"
                raise RecordError(what, "use --format text", kind="text_record")
            if (renderer := self._for_record(record)) is not self:
                return renderer.lay_out(record, last_only=last_only)
            turns = only_turns(record)
            laid_out = self._lay_out(turns, last_only)
            if turns is not record:
                laid_out = laid_out._replace(notes=(*laid_out.notes, LEFT_OUT))
            if self.encoder.normalizes or laid_out.char_weights is not None:
                # Encode the record to check that its answers and ranges can be mapped to tokens.
                self._encode([turns], LaidOutBatch.of([laid_out]), train_on="assistant", tags=False, ledger=Ledger())
        except RecordError as fault:
            raise fault.at(record.file, record.line, record.id) from None
        return laid_out_record(turns, laid_out)

    def _lay_out(self, record: Record, last_only: bool) -> LaidOut:
        with_tools = bool(record.tools)
        shape, texts = shape_and_texts(record, self.templates[with_tools].style)
        key = (with_tools, shape + LAST_ONLY if last_only else shape)
        if any(map(_RANGES, record.messages)):
            # Do not use cached traces, because they do not record which characters of a text are in the output.
            derived = self._checked(record, self.derive(record, last_only=last_only))
            notes = token_notes((*texts, *record.tools), self.control_tokens, self.text_tokens)
            return self.lay_out_derived(record, derived, notes)
        return self._lay_out_texts(key, texts, lambda: record, last_only=last_only)

    def _lay_out_texts(
        self, key: ShapeKey, texts: list[str], record: Callable[[], Record], *, last_only: bool = False
    ) -> LaidOut:
        """Return the layout of a record. Replay a matching cached trace; without a match, run the template and cache
        the new trace if possible.
        """
        followed = self._cache.follow(key, texts)
        if followed is not None:
            trace, slots = followed
            if trace.use():
                self._confirm(trace, slots, record)
            laid_out = trace.laid_out._replace(slots=slots)
        else:
            laid_out = self._derive_layout(key, texts, record(), last_only)
        searched = (*texts, *(record().tools if key[0] else ()))
        notes = token_notes(searched, self.control_tokens, self.text_tokens)
        return laid_out._replace(notes=notes + laid_out.notes) if notes else laid_out

    def _derive_layout(
        self, key: ShapeKey, texts: list[str], record: Record, last_only: bool, derived: DerivedAnswers | None = None
    ) -> LaidOut:
        """Return the layout of a record with the answers `derived`; if `derived` is None, derive the answers first."""
        cacheable = self._cache.may_add(key, len(record.messages))
        derived = self._checked(record, derived or self.derive(record, cacheable=cacheable, last_only=last_only))
        if derived.steps is None:
            return self.lay_out_derived(record, derived)
        layout = token_layout(record, derived, self.control_tokens, text_tokens=self.text_tokens, encoder=self.encoder)
        laid_out = LaidOut(layout, None, derived.notes, self._headers.expected(derived))
        trace = cached_trace(derived.steps, laid_out, len(texts), self.text_tokens, self.encoder)
        slots = replay(trace.steps, texts.copy())
        if slots is None:
            # Do not cache a trace that does not reproduce its own conversation.
            return self.lay_out_derived(record, derived)
        self._cache.add(key, trace)
        return trace.laid_out._replace(slots=slots)

    def _checked(self, record: Record, derived: DerivedAnswers) -> DerivedAnswers:
        return replace(derived, notes=derived.notes + self.check(record, derived))

    def lay_out_derived(self, record: Record, derived: DerivedAnswers, notes: tuple[str, ...] = ()) -> LaidOut:
        """Return the layout of a rendered record."""
        layout = token_layout(record, derived, self.control_tokens, text_tokens=self.text_tokens)
        expected, weights = self._headers.expected(derived), rendered_weights(record, derived)
        return LaidOut(layout, [], notes + derived.notes, expected, weights)

    def _row_check(self) -> RowCheck | None:
        """Return a check of encoded rows against the headers of the template, or None if generation tags mark the
        answers.
        """
        return None if self.mask == "tags" else self._headers.row_check(self._turn_marks)

    def _encode(self, records: Sequence[Record], laid_out: LaidOutBatch, **options: Any) -> Rows:
        # Skip the row check for layouts without answers, such as prompts.
        check = self._row_check() if all(one.expected is not None for one in laid_out.distinct) else None
        options |= {"text_tokens": self.text_tokens, "check": check}
        return encode_rows(records, laid_out, self.encoder, self._tables, **options)

    def _probe(self, record: Record, messages: int, prompt: bool) -> str | None:
        """Render a small test conversation to a string; return None if the template rejects it."""
        try:
            return self.text(record, messages, prompt=prompt)
        except RecordError as fault:
            if fault.kind == "template_limit":
                raise DataError(f"{fault.what}, even for a small conversation; fix the template") from None
            return None

    def _confirm(self, trace: CachedTrace, slots: Sequence[str], record: Callable[[], Record]) -> None:
        """Raise a `RecordError` if replaying a cached trace gives a different text than running the template."""
        if fill_slots(chain.from_iterable(trace.laid_out.layout.texts), slots) != self.text(record()):
            what = "the cached trace differs from the template; this is a bug in chatmill, please report it"
            raise RecordError(what, "remove the record", kind="not_alike")
