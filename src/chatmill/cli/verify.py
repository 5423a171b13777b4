"""`chatmill verify`: check that a dataset is intact."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from chatmill.cli.options import AsJson, DatasetOrCache, TokenDtype, counted, echo_json, echo_line
from chatmill.store import is_cache, verify_cache, verify_dataset


def verify(
    dataset: DatasetOrCache,
    full: Annotated[
        bool,
        typer.Option("--full", help="Read every byte; check hashes and token ids, and compare the mask with spans."),
    ] = False,
    token_dtype: TokenDtype = None,
    as_json: AsJson = False,
) -> None:
    """Check the metadata and file sizes of a dataset, and that episodes and spans cover every token exactly once.

    Prints OK and the number of episodes, tokens and shards in each split. If the dataset has faults, prints one line
    per fault and exits with code 1. Add --full to read every byte and compare hashes. In datasets written by another
    program, a token may be in no episode or in several; the output counts such tokens.

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
        # In chatmill's own datasets every token is in exactly one episode.
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
        unknown = " (written by another program, which recorded neither hashes nor the number of shards)"
        hashed = f" (sha256 {result.sha256})" if result.sha256 else unknown
        echo_line(f"OK: {dataset}{hashed}" + (", every byte read" if full else ""))
        for name, counts in result.splits.items():
            outside = "" if result.sha256 else f", {counts.uncovered:,} tokens in no episode"
            shared = f", {counts.shared:,} in more than one" if counts.shared else ""
            typer.echo(
                f"{name}: {counted(counts.episodes, 'episode')}, {counts.tokens:,} tokens, {counts.trained:,} trained, "
                f"{counted(counts.shards, 'shard')}{outside}{shared}"
            )
        if result.unread:
            echo_line(f"files not read: {', '.join(result.unread)}")
    if result.faults:
        raise typer.Exit(1)
