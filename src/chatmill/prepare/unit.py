"""Units: one piece of the input at a time, from its bytes to fitted rows in a staged file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from chatmill.errors import RecordError
from chatmill.fit.truncate import truncate_from
from chatmill.format import ChatFormat, load_format, render_chunks, renderable
from chatmill.ledger import Ledger
from chatmill.prepare.job import Job
from chatmill.prepare.staging import save
from chatmill.records import Part, Record, read_part, record_key
from chatmill.rows import File, Index, Rows, TrainOn, concat
from chatmill.store.layout import token_dtype
from chatmill.tokenizer import Tokenizer, open_tokenizer

CHUNK = 512
"""Records that are rendered at a time; small, because several processes do so at once."""


@dataclass(frozen=True)
class Unit:
    number: int
    part: Part
    name: str
    """The file as the dataset remembers it: never an absolute path."""
    train_on: TrainOn
    only_val: bool

    @property
    def size(self) -> int:
        """Bytes of input, for progress."""
        stop = self.part.stop if self.part.stop is not None else self.part.path.stat().st_size
        return stop - self.part.start

    def path(self, folder: Path) -> Path:
        return folder / f"unit_{self.number:06d}.rows"


@dataclass(frozen=True)
class Tools:
    """What every unit needs and is made once a process."""

    format: ChatFormat
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Done:
    """What a unit leaves besides its file; small, so that it can be sent home."""

    number: int
    ledger: Ledger
    faults: tuple[RecordError, ...]
    input_bytes: int


def make_tools(job: Job) -> Tools:
    format = load_format(job.format)
    return Tools(format, open_tokenizer(job.tokenizer, control=format.tokens, add_tokens=job.add_tokens))


def run_unit(unit: Unit, job: Job, tools: Tools, folder: Path) -> Done:
    """Read, render and fit one unit. With `on_error` "stop" its first fault is raised."""
    ledger, faults = Ledger(), list[RecordError]()
    keys = bytearray()

    def on_fault(fault: RecordError) -> None:
        if job.on_error == "stop":
            raise fault
        faults.append(fault)
        ledger.add("rejected", fault.kind, rows=1)

    def keyed(records: Iterable[Record]) -> Iterator[Record]:
        for record in records:
            keys.extend(record_key(record))
            yield record

    records = keyed(renderable(read_part(unit.part, on_fault=on_fault), tools.format, on_fault))
    made: list[Rows] = []
    made_from: list[Index] = []
    count = 0
    for rows in render_chunks(records, tools.format, tools.tokenizer, train_on=unit.train_on, chunk=CHUNK):
        # Records are read ahead of the rows that are made of them.
        chunk, count = slice(16 * count, 16 * (count + len(rows))), count + len(rows)
        rows.origins["key"] = np.frombuffer(keys[chunk], dtype="<u8").reshape(-1, 2)
        ledger.add("rendered", rows=len(rows), tokens=len(rows.ids), trained=trained_tokens(rows))
        source = np.arange(len(rows), dtype=np.int64)
        first = count - len(rows)
        if job.fit != "blocks":
            rows, source = truncate_from(
                rows,
                job.capacity,
                job.fit,
                ledger=ledger,
                drop_untrained=True,
                require_terminators=job.require_terminators,
            )
        made.append(rows)
        made_from.append(source + first)
    ledger.add("read", rows=count + len(faults))
    source = np.concatenate(made_from) if made_from else np.empty(0, dtype=np.int64)
    dtype = token_dtype(tools.tokenizer.vocab_size)
    rows = concat(made)
    rows = replace(rows, files=tuple(File(file.source, unit.name) for file in rows.files))
    save(unit.path(folder), rows, source, tokens=dtype, extra={"records": count, "ledger": ledger.to_json()})
    return Done(unit.number, ledger, tuple(faults), unit.size)


def trained_tokens(rows: Rows) -> int:
    return int(rows.spans["length"][rows.spans["weight"] > 0].sum())
