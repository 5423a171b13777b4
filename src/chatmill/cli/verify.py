"""`chatmill verify`: is this dataset, byte for byte, what was written?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from chatmill.cli.options import AsJson, DatasetOrCache, echo_json, echo_line
from chatmill.store import is_cache, verify_cache, verify_dataset


def verify(
    dataset: DatasetOrCache,
    full: Annotated[
        bool, typer.Option("--full", help="Read every byte: hashes, ids, and that mask equals spans.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a dataset: its metadata, the size of every file, that episodes tile tokens and spans tile episodes.

    Every fault is one line, and the exit code then 1.

    \b
    Examples:
      chatmill verify data/chat_sft
      chatmill verify data/cache/sft/primer
      chatmill verify data/chat_sft --full --json
    """
    result = verify_cache(dataset, full=full) if is_cache(dataset) else verify_dataset(dataset, full=full)
    if as_json:
        splits = {name: asdict(counts) for name, counts in result.splits.items()}
        echo_json(
            {"ok": not result.faults, "full": full, "sha256": result.sha256, "splits": splits, "faults": result.faults}
        )
    elif result.faults:
        for fault in result.faults:
            echo_line(fault)
    else:
        unknown = " (of another program: no hashes to check, and no count of shards)"
        hashed = f" (sha256 {result.sha256})" if result.sha256 else unknown
        echo_line(f"OK: {dataset}{hashed}" + (", every byte read" if full else ""))
        for name, counts in result.splits.items():
            typer.echo(
                f"{name}: {counts.episodes:,} episodes, {counts.tokens:,} tokens, {counts.trained:,} trained, "
                f"{counts.shards:,} {'shard' if counts.shards == 1 else 'shards'}"
            )
    if result.faults:
        raise typer.Exit(1)
