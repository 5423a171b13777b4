from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from record_mutations import RAW, RECORDS, broken

from chatmill.errors import RecordError
from chatmill.records import Record, read_records
from fault_injection.processes import outcome
from fault_injection.trial import Tally, Trial

LINE = re.compile(r"a\.(?:jsonl|txt):(\d+)(?: \(id=.*\))?: .+; .+")
ROLES = {"system", "user", "assistant", "tool"}
SHAPES: dict[str, Any] = {**RECORDS, "transcript-lines": RAW, "transcript-stream": RAW}
AT_ONCE = 500


def strings(value: Any) -> Iterator[str]:
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from value
            values += value.values()
        elif isinstance(value, list):
            values += value


def doubt(shape: str, data: bytes, record: Record) -> str:
    """Return why `record` cannot be the result of parsing `data`, or an empty string if it can."""
    # A transcript line that is neither a JSON string nor an object is raw text.
    is_raw = shape.startswith("transcript-") or (shape == "transcript" and data.lstrip()[:1] not in (b'"', b"{"))
    for message in record.messages:
        # Transcript text outside of its spans has no role.
        if message.role not in ROLES and not (message.role == "none" and shape.startswith("transcript")):
            return f"a role {message.role!r}"
        try:
            said = message.content.encode()
        except UnicodeEncodeError:
            return "half a character"
        if is_raw and said not in data:
            return f"text that is not in the input: {message.content!r}"
    if is_raw:
        return ""
    try:
        value = json.loads(data.decode(), parse_constant=_no_constant)
    except RecursionError:
        return ""
    except ValueError as error:
        return f"a record from bytes that are not text or not JSON ({error})"
    if shape in ("messages", "primer"):
        told = [message.content for message in record.messages]
        pairs = zip(told, (message.get("content") for message in value["messages"]), strict=True)
        if any(one != two for one, two in pairs if isinstance(two, str)):
            return f"text that differs from the input: {told}"
    elif shape != "tool" and shape != "oasst1":
        there = {text.strip() for text in strings(value)}
        for message in record.messages:
            # An instruction and its input may be joined into one message. A transcript has all messages in one text.
            parts = [part.strip() for part in message.content.split("\n\n")]
            if not message.tool_calls and not all(any(part in text for text in there) for part in parts):
                return f"text that is not in the input: {message.content!r}"
    return ""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def attempt(shape: str, pieces: list[bytes], tally: Tally) -> None:
    path = Path("a.txt" if shape.startswith("transcript-") else "a.jsonl")
    between = b"<|EOS|>\n" if shape == "transcript-stream" else b"\n"
    path.write_bytes(between.join(pieces))
    faults: list[RecordError] = []
    records: dict[int, str] = {}

    def read_all() -> bool:
        for record in read_records([path.name], shape=shape, on_error="skip", on_reject=faults.append):
            # In a stream, damaged text may become part of the neighboring record.
            data = path.read_bytes() if shape == "transcript-stream" else pieces[record.line - 1]
            records[record.line] = records.get(record.line) or doubt(shape, data, record)
        return True

    ended = outcome(read_all)
    if ended.value is None:
        tally.loses(f"{shape}: {ended.refused or ended.broke}")
        return
    refused = {fault.line: str(fault) for fault in faults}
    for number, piece in enumerate(pieces, 1):
        line = refused.get(number)
        if line is not None and (not line.isprintable() or not LINE.fullmatch(line)):
            tally.loses(f"{shape}: the error has more than one line: {line!r}")
        elif records.get(number):
            tally.is_wrong(f"{shape}: {records[number]}: {piece[:200]!r}")
        elif line is not None or number in records:
            tally.judge(survived=line is None, found=True)
        elif not piece.replace(b"<|EOS|>", b"").strip() or shape == "transcript-stream":
            # A line with only <|EOS|> is not a conversation, and damaged bytes may change the line breaks of a stream.
            tally.survives()
        else:
            tally.loses(f"{shape}: neither a record nor an error: {piece[:200]}")


def work(size: int, seed: int, folder: Path, tally: Tally) -> None:
    here = Path.cwd()
    os.chdir(folder)
    tally.expected = size * len(SHAPES)
    try:
        for shape, good in SHAPES.items():
            pieces = broken(good, f"{shape} {seed}", size)
            for first in range(0, size, AT_ONCE):
                attempt(shape, pieces[first : first + AT_ONCE], tally)
    finally:
        os.chdir(here)


TRIAL = Trial(
    "mutated input",
    f"Reads broken records in each of {len(SHAPES)} record layouts. Each input must give a record with only "
    "text from the input, or a one-line error with the location and the problem",
    work,
    full=10_000,
    short=400,
    in_memory=True,
)
