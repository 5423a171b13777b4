"""`chatmill verify`: is this dataset, byte for byte, what was written?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from chatmill.cli.options import AsJson, DatasetOrCache, TokenDtype, echo_json, echo_line
from chatmill.store import is_cache, verify_cache, verify_dataset


def verify(
    dataset: DatasetOrCache,
    full: Annotated[
        bool, typer.Option("--full", help="Read every byte: hashes, ids, and that mask equals spans.")
    ] = False,
    token_dtype: TokenDtype = None,
    as_json: AsJson = False,
) -> None:
    """Check a dataset: its metadata, the size of every file, that episodes tile tokens and spans tile episodes.

    Every fault is one line, and the exit code then 1. Episodes of another program need not tile its tokens: how many
    tokens are in none of them, or in several, is printed.

    \b
    Examples:
      chatmill verify data/chat_sft
      chatmill verify data/cache/sft/primer
      chatmill verify data/chat_sft --full --json
    """
    if is_cache(dataset):
        result = verify_cache(dataset, full=full)
    else:
        result = verify_dataset(dataset, full=full, token_dtype=token_dtype)
    if as_json:
        # All tokens of chatmill's own datasets are in one episode.
        left_out = {"uncovered", "shared"} if result.sha256 else set()
        splits = {
            name: {key: value for key, value in asdict(counts).items() if key not in left_out}
            for name, counts in result.splits.items()
        }
        echo_json(
            {"ok": not result.faults, "full": full, "sha256": result.sha256, "splits": splits, "faults": result.faults}
            | ({"unread": result.unread} if result.unread else {})
        )
    elif result.faults:
        for fault in result.faults:
            echo_line(fault)
    else:
        unknown = " (of another program: no hashes to check, and no count of shards)"
        hashed = f" (sha256 {result.sha256})" if result.sha256 else unknown
        echo_line(f"OK: {dataset}{hashed}" + (", every byte read" if full else ""))
        for name, counts in result.splits.items():
            outside = "" if result.sha256 else f", {counts.uncovered:,} tokens in no episode"
            shared = f", {counts.shared:,} in more than one" if counts.shared else ""
            typer.echo(
                f"{name}: {counts.episodes:,} episodes, {counts.tokens:,} tokens, {counts.trained:,} trained, "
                f"{counts.shards:,} {'shard' if counts.shards == 1 else 'shards'}{outside}{shared}"
            )
        if result.unread:
            echo_line(f"not read: {', '.join(result.unread)}")
    if result.faults:
        raise typer.Exit(1)
