"""`chatmill check`: read all records and print a summary, without writing a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import typer

from chatmill.cli.options import AsJson, Workers, counting_after_fork, echo_json, echo_line, print_losses
from chatmill.cli.record_options import Inputs, ReadOptions, print_rejects, require_records
from chatmill.errors import one_line
from chatmill.prepare.survey import survey
from chatmill.records import FilePart, Message, Record
from chatmill.records.files import label

SHOWN_FILES = 5
SHOWN_MESSAGES = 12


def check(inputs: Inputs, read: ReadOptions, workers: Workers = None, as_json: AsJson = False) -> None:
    """Read all conversations and print how they were interpreted: record shape, roles and the first record.

    Does not write a dataset. Stops at the first invalid record and prints its file and line, unless --on-error skip is
    given.

    \b
    Examples:
      chatmill check data/conversations.jsonl
      chatmill check 'data/*.jsonl' --on-error skip --rejects faults.jsonl
      chatmill check chat.json --columns messages=dialog,role=speaker,content=text,user=Q,assistant=A
    """
    with read.records(inputs) as records, counting_after_fork("records") as count:
        summary, files = survey(**records.read_options(), workers=workers, on_records=count)
        records.ledger.merge(summary.ledger)
    if not records.ledger.total("rejected").rows:
        require_records(inputs, records, valid=summary.records)
    if as_json:
        reasons = {reason: entry.rows for bucket, reason, entry in records.ledger if bucket == "rejected"}
        counts = {
            "messages": dict(sorted(summary.roles.items())),
            "sources": dict(summary.sources),
            "rejected": reasons,
        }
        shapes = [{"file": label(part.path), "shape": part.shape, "why": part.why} for part in files]
        understood = None if summary.first is None else msgspec.to_builtins(summary.first)
        noted = records.ledger.to_json().get("noted", {})
        echo_json(
            {"records": summary.records, "with_assistant": summary.with_assistant, **counts}
            | {"files": shapes, "first": understood, "noted": noted}
        )
        require_records(inputs, records, valid=summary.records)
        return
    noun = "record" if summary.records == 1 else "records"
    typer.echo(f"{summary.records:,} {noun}, {summary.with_assistant:,} of them with an assistant turn")
    typer.echo("messages: " + ", ".join(f"{count:,} {role}" for role, count in sorted(summary.roles.items())))
    typer.echo("sources:  " + ", ".join(f"{count:,} {source}" for source, count in summary.sources.items()))
    for line in shape_lines(files):
        echo_line(line)
    if (first := summary.first) is not None:
        echo_line(f"first:    {first.file}:{first.line}" + (f" (id={first.id})" if first.id is not None else ""))
        for line in message_lines(first):
            echo_line(f"  {line}")
    print_losses(records.ledger)
    print_rejects(records)
    require_records(inputs, records, valid=summary.records)


def shape_lines(files: list[FilePart]) -> Iterator[str]:
    """Yield one line per detected shape: the reason for choosing it, and its files."""
    groups: dict[tuple[str, str], list[str]] = {}
    for part in files:
        groups.setdefault((part.shape, part.why), []).append(label(part.path))
    for (shape, why), names in groups.items():
        others = f" and {len(names) - SHOWN_FILES} others" if len(names) > SHOWN_FILES else ""
        of_files = f" ({', '.join(names[:SHOWN_FILES])}{others})" if len(groups) > 1 else ""
        yield f"shape:    {shape}: {why}{of_files}"


def message_lines(record: Record, trained: Sequence[bool] = ()) -> Iterator[str]:
    """Yield one line per message of the record; the line is marked as trained if the message's entry in `trained` is
    true.
    """
    facts: dict[str, Any] = {
        "tools": len(record.tools) or None,
        "weight": record.weight if record.weight != 1 else None,
        "chat_template_kwargs": record.template_kwargs or None,
    }
    if any(facts.values()) or record.weight != 1:
        yield ", ".join(f"{name}: {value}" for name, value in facts.items() if value is not None)
    for number, message in enumerate(record.messages[:SHOWN_MESSAGES]):
        note = " (trained)" if number < len(trained) and trained[number] else ""
        yield f"{'text' if record.is_text else message.role:<9} {_message(message)}{note}"
    if len(record.messages) > SHOWN_MESSAGES:
        yield f"… and {len(record.messages) - SHOWN_MESSAGES} more messages"


def _message(message: Message) -> str:
    pieces = [f'reasoning "{one_line(message.reasoning)}"'] if message.reasoning else []
    if message.content or not (message.tool_calls or pieces):
        pieces.append(f'"{one_line(message.content)}"')
    pieces += [f"calls {one_line(call.name)}({one_line(call.arguments)})" for call in message.tool_calls]
    if message.weight is not None:
        pieces.append(f"[weight {message.weight:g}]")
    if message.train_ranges:
        ranges = ", ".join(f"{start}-{stop}: {weight:g}" for start, stop, weight in message.train_ranges[:4])
        pieces.append(f"[characters {ranges}{', …' if len(message.train_ranges) > 4 else ''}]")
    return " ".join(pieces)
