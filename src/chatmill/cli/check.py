"""`chatmill check`: read all records and count what they hold; nothing is written but rejects."""

from __future__ import annotations

from collections import Counter

import typer

from chatmill.cli.options import AsJson, echo_json, progress
from chatmill.cli.record_options import Inputs, ReadOptions, print_rejects
from chatmill.errors import DataError


def check(inputs: Inputs, read: ReadOptions, as_json: AsJson = False) -> None:
    """Read conversations and say what they hold. The first fault stops with its file and line.

    \b
    Examples:
      chatmill check data/conversations.jsonl
      chatmill check 'data/*.jsonl' --on-error skip --rejects faults.jsonl
    """
    roles, sources, trainable = Counter[str](), Counter[str](), 0
    with read.records(inputs) as records:
        for record in progress(records, "records"):
            sources[record.source] += 1
            roles.update(message.role for message in record.messages)
            trainable += any(message.role == "assistant" for message in record.messages)
    good = sum(sources.values())
    if not good and not records.ledger.total("rejected").rows:
        raise DataError(f"{', '.join(inputs)}: holds no record; expected at least one")
    if as_json:
        reasons = {reason: entry.rows for bucket, reason, entry in records.ledger if bucket == "rejected"}
        counts = {"messages": dict(sorted(roles.items())), "sources": dict(sources), "rejected": reasons}
        echo_json({"records": good, "with_assistant": trainable, **counts})
        return
    typer.echo(f"{good:,} records, {trainable:,} of them with an assistant turn")
    typer.echo("messages: " + ", ".join(f"{count:,} {role}" for role, count in sorted(roles.items())))
    typer.echo("sources:  " + ", ".join(f"{count:,} {source}" for source, count in sources.items()))
    print_rejects(records)
