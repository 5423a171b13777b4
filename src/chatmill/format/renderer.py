"""Formats ready for use: a way to write conversations together with the tokenizer that encodes them.

There are two kinds, and whoever makes rows need not know which: a `ChatFormat` of turns, and a chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from chatmill.errors import RecordError, UsageError, one_line
from chatmill.format.chat_format import ChatFormat, load_format
from chatmill.format.compiled import CompiledFormat
from chatmill.format.render import render, render_chunks, renderable
from chatmill.format.template.hf_folder import has_template
from chatmill.format.template.renderer import TemplateRenderer, open_template_renderer
from chatmill.ledger import Ledger
from chatmill.records import ROLES, ChatColumns, Record
from chatmill.rows import Rows, TrainOn
from chatmill.tokenizer import MissingTokensError, Tokenizer, open_tokenizer

TEMPLATE = "template"
"""The name under which a tokenizer's chat template is a format."""
Mask = Literal["derived", "tags"]


class Renderer(Protocol):
    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def eot(self) -> str:
        """The key of the token that ends an assistant turn."""

    @property
    def tells_time(self) -> bool:
        """Whether what it writes depends on the date."""

    def to_json(self) -> dict[str, Any]:
        """All that decides how conversations are written."""

    def accepted(
        self, records: Iterable[Record], on_reject: Callable[[RecordError], None] | None = None
    ) -> Iterator[Record]:
        """The records that it can write; the others go to `on_reject`, or raise if there is none."""

    def takes(self, records: ChatColumns) -> bool:
        """Whether it can write all of these from their columns."""

    def render(self, records: Sequence[Record], *, train_on: TrainOn = "assistant", ledger: Ledger) -> Rows:
        """A row for each accepted record; what deserves a look is noted in the ledger."""

    def chunks(
        self, records: Iterable[Record], *, train_on: TrainOn = "assistant", chunk: int = 512, ledger: Ledger
    ) -> Iterator[Rows]:
        """The same, `chunk` at a time."""


@dataclass(frozen=True)
class TurnRenderer:
    """A format of turns with its tokenizer."""

    format: ChatFormat
    tokenizer: Tokenizer
    tells_time = False

    @property
    def eot(self) -> str:
        return self.format.eot

    def to_json(self) -> dict[str, Any]:
        return self.format.to_json()

    def accepted(
        self, records: Iterable[Record], on_reject: Callable[[RecordError], None] | None = None
    ) -> Iterator[Record]:
        return renderable(records, self.format, on_reject)

    def takes(self, records: ChatColumns) -> bool:
        written = np.array([role in self.format.turns for role in ROLES])
        return self.format.default_system is None and bool(written[records.roles].all())

    def render(self, records: Sequence[Record], *, train_on: TrainOn = "assistant", ledger: Ledger) -> Rows:
        return render(records, self.format, self.tokenizer, train_on=train_on, plates=self._plates)

    @cached_property
    def _plates(self) -> CompiledFormat:
        return CompiledFormat(self.format, self.tokenizer)

    def chunks(
        self, records: Iterable[Record], *, train_on: TrainOn = "assistant", chunk: int = 512, ledger: Ledger
    ) -> Iterator[Rows]:
        return render_chunks(records, self.format, self.tokenizer, train_on=train_on, chunk=chunk)


@dataclass(frozen=True)
class TemplateOptions:
    """What is said about a chat template besides its tokenizer."""

    chat_template: str | None = None
    """A Jinja file that goes before the template of the tokenizer's folder."""
    arguments: Sequence[str] = ()
    """What the template is given besides the conversation, as `name=value`."""
    mask: Mask = "derived"
    date: str | None = None
    """The day that a template which asks for it is told, as YYYY-MM-DD; today if left out."""

    def given(self) -> list[str]:
        """The flags that were used."""
        flags = {
            "--chat-template": self.chat_template is not None,
            "--template-arg": bool(self.arguments),
            "--mask": self.mask != "derived",
            "--template-date": self.date is not None,
        }
        return [flag for flag, used in flags.items() if used]


def open_renderer(
    name: str, tokenizer: str, *, add_tokens: bool = False, template: TemplateOptions | None = None
) -> TurnRenderer | TemplateRenderer:
    """A preset, a .toml file, or `template`, with a tokenizer that has its control tokens."""
    template = template or TemplateOptions()
    if name != TEMPLATE:
        if used := template.given():
            raise UsageError(f"{', '.join(used)} is for chat templates; add --format template")
        format = load_format(name)
        try:
            return TurnRenderer(format, open_tokenizer(tokenizer, control=format.tokens, add_tokens=add_tokens))
        except MissingTokensError as error:
            if has_template(tokenizer):
                raise UsageError(f"{error}, or write with the folder's own template: --format template") from None
            raise
    if add_tokens:
        raise UsageError("--add-tokens with --format template; a template writes the tokens that its tokenizer has")
    return open_template_renderer(
        tokenizer,
        chat_template=template.chat_template,
        arguments=template.arguments,
        mask=template.mask,
        now=_day(template.date),
    )


def _day(date: str | None) -> datetime:
    if date is None:
        return datetime.combine(datetime.now().date(), datetime.min.time())
    try:
        return datetime.strptime(date, "%Y-%m-%d")
    except ValueError:
        raise UsageError(f'--template-date "{one_line(date)}" is no day; give one as 2025-01-31') from None
