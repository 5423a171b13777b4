"""The `Renderer` protocol: a chat format combined with a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import RecordError
from chatmill.ledger import Ledger
from chatmill.records import ChatColumns, Record
from chatmill.rows import ORIGIN, File, Index, Rows, Rule, Table, TrainOn
from chatmill.tokenizer import Tokenizer

Mask = Literal["derived", "tags"]
"""How to compute the loss mask for a chat template: from its output, or from its `{% generation %}` tags."""
TextTokens = Literal["as-transformers", "never"]
"""How to encode added tokens in message text, such as `<think>`, that are neither special nor turn markers."""
OnReject = Callable[[RecordError], None]


class Renderer(Protocol):
    """Renders conversations to `Rows`: token ids, and the role, part and weight of every span.

    `TurnRenderer` renders with a preset or a TOML format, and `TemplateRenderer` with the chat template of a Hugging
    Face folder. `open_renderer` opens a `TurnRenderer` or a `TemplateRenderer`.

    >>> from chatmill.format import open_renderer
    >>> from chatmill.records import Message, Record
    >>> renderer = open_renderer("chatml", "bytes")
    >>> rows = renderer.render([Record([Message("user", "Hi"), Message("assistant", "Yo")])])
    >>> renderer.tokenizer.decode(rows.ids[rows.mask()])
    'Yo<|im_end|>'
    """

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def eot(self) -> str:
        """The key in `tokenizer.special_token_ids()` of the token that ends an assistant turn."""

    @property
    def uses_date(self) -> bool:
        """Whether the rendered text depends on the current date."""

    def to_json(self) -> dict[str, Any]:
        """Return all settings that determine the rendered text, as JSON for dataset metadata."""

    def renderable(
        self, records: Iterable[Record], on_reject: OnReject | None = None, *, last_only: bool = False
    ) -> Iterator[Record]:
        """Yield the records that can be rendered.

        If a record cannot be rendered, pass the error to `on_reject`, or raise it if `on_reject` is None.

        With `last_only`, only the last assistant message is trained on, so only the token boundaries of this message
        must be exact.
        """

    def lay_out_columns(self, columns: ChatColumns) -> ChatColumns | list[Record]:
        """Return the columns unchanged if `render` accepts them, otherwise a list of `Record`s."""

    def warm_up(self, blocks: Iterable[ChatColumns], *, processes: int) -> None:
        """Fill the caches of this renderer from some of the conversations to render, using up to `processes` processes.

        A build calls this method before it forks workers, which inherit the caches. The rows do not depend on
        the caches.
        """

    def render(
        self,
        records: Sequence[Record],
        *,
        train_on: TrainOn = "assistant",
        ledger: Ledger | None = None,
        threads: int | None = None,
    ) -> Rows:
        """Render each record to one row, and count anomalies in `ledger`. All records must have been returned by
        `renderable`.

        A list of more than 1024 records is rendered on `threads` threads, by default one per usable core. The rows do
        not depend on the number of threads.
        """

    def render_chunks(
        self,
        records: Iterable[Record],
        *,
        train_on: TrainOn = "assistant",
        ledger: Ledger | None = None,
        chunk: int = 512,
    ) -> Iterator[Rows]:
        """Like `render`, but yield the rows in chunks that are small enough for the CPU cache."""
        stream = iter(records)
        while batch := list(islice(stream, chunk)):
            yield self.render(batch, train_on=train_on, ledger=ledger)

    def prompt_ids(self, record: Record) -> list[int]:
        """Return the prompt for a conversation's next answer as token ids; training and inference use the same ids."""


def apply_record_weights(records: Sequence[Record], spans: Table, first_span: Index) -> None:
    """Multiply the loss weights of each row by the weight of its record."""
    if isinstance(records, ChatColumns):
        return
    weights = list(map(attrgetter("weight"), records))
    if weights.count(1.0) == len(weights):
        return
    factor = np.repeat(np.array(weights, dtype=np.float32), np.diff(first_span))
    spans["weight"] *= factor
    # Exclude the tokens of a record with weight 0 from the loss, even if `train_on` is changed later.
    spans["rule"][(factor == 0) & (spans["rule"] == Rule.ROLE)] = Rule.FLAG


def origins_of(records: Sequence[Record]) -> tuple[NDArray[np.void], tuple[File, ...]]:
    """Return the origin (file and line) of each record, and the files that the origins refer to."""
    origins = np.zeros(len(records), dtype=ORIGIN)
    if isinstance(records, ChatColumns):
        origins["line"] = np.arange(records.line, records.line + len(records))
        return origins, (File(records.source, records.file),)
    sources = list(map(attrgetter("source", "file"), records))
    number = {key: at for at, key in enumerate(dict.fromkeys(sources))}
    # Skip the per-record file index in the usual case where all records come from one file.
    if len(number) > 1:
        origins["file"] = [number[key] for key in sources]
    origins["line"] = [record.line for record in records]
    return origins, tuple(File(*key) for key in number)
