"""`chatmill build-sft-primer` and its kin: one file of conversations to the cache of one source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from chatmill.cli.options import (
    AsJson,
    OnError,
    ReadOptions,
    RejectsFile,
    echo_json,
    print_losses,
    print_rejects,
    progress,
    reading,
)
from chatmill.cli.render_options import AddTokens, TokenizerName
from chatmill.cli.settings import SettingFlags, cache_config
from chatmill.ledger import Ledger
from chatmill.prepare.primer import SHAPES, CacheConfig, build_cache
from chatmill.records import DEFAULT_REJECTS
from chatmill.store.primer_cache import cache_folder

Flags = Annotated[dict[str, Any], SettingFlags()]
FROM_FILE = "What no flag gives is taken from chatmill.toml in the current folder, if there is one."


@dataclass(frozen=True)
class BuildOptions:
    """The options that all of these commands share besides; see `cli/expand.py`."""

    tokenizer: TokenizerName = "bytes"
    add_tokens: AddTokens = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the cache if it is there.")] = False
    as_json: AsJson = False


def build_sft_primer(
    *,
    primer_jsonl: Annotated[
        str | None, typer.Option(help="The file to read. [data.primer.path, else data/primer.jsonl]")
    ] = None,
    flags: Flags,
    options: BuildOptions,
) -> None:
    """Build the cache of primer.jsonl: shuffled, split, one example a row. The first faulty line stops it.

    What no flag gives is taken from chatmill.toml in the current folder, if there is one.

    \b
    Examples:
      chatmill build-sft-primer
      chatmill build-sft-primer --primer-jsonl data/primer.jsonl --out-dir data/cache/sft \\
          --seed 42 --val-frac 0.1 --t-max 1024
    """
    config = cache_config("primer", {"path": primer_jsonl, **flags}, input_flag="--primer-jsonl")
    _build("primer", config, options)


def _command(source: str, summary: str, example: str) -> Callable[..., None]:
    """The command of a source whose faulty records may be skipped."""

    def build(
        *,
        input: Annotated[str | None, typer.Option("--input", help="The file to read. [data.SOURCE.path]")] = None,
        flags: Flags,
        on_error: OnError = "stop",
        rejects: RejectsFile = DEFAULT_REJECTS,
        options: BuildOptions,
    ) -> None:
        config = cache_config(source, {"path": input, **flags}, input_flag="--input")
        _build(source, config, options, ReadOptions(None, on_error, rejects))

    build.__doc__ = f"{summary}\n\n{FROM_FILE}\n\n\b\nExample:\n  {example}"
    return build


build_sft_oasst1 = _command(
    "oasst1",
    "Build the cache of OpenAssistant trees: of each tree the conversation along its best replies.",
    "chatmill build-sft-oasst1 --input oasst1.jsonl --on-error skip",
)
build_sft_dolly15k = _command(
    "dolly15k",
    "Build the cache of Dolly's instructions, contexts and responses.",
    "chatmill build-sft-dolly15k --input databricks-dolly-15k.jsonl",
)


def _build(source: str, config: CacheConfig, options: BuildOptions, read: ReadOptions | None = None) -> None:
    """Build the cache and print the summary."""
    ledger = Ledger()
    records = reading([config.path], replace(read or ReadOptions(), shape=SHAPES[source]), ledger)
    meta = build_cache(
        source,
        config,
        records,
        ledger,
        tokenizer=options.tokenizer,
        add_tokens=options.add_tokens,
        overwrite=options.overwrite,
        progress=partial(progress, what="records"),
    )
    target = cache_folder(Path(config.out_dir), source)
    train, val = meta.splits["train"], meta.splits["val"]
    if options.as_json:
        counts = {
            name: {
                "path": str(target / name),
                "num_examples": split.num_examples,
                "num_tokens": split.num_tokens,
                "num_label_tokens": split.num_label_tokens,
                "num_shards": len(split.shards),
            }
            for name, split in meta.splits.items()
        }
        echo_json({"path": str(target), "sha256": meta.sha256, "splits": counts, "ledger": ledger.to_json()})
    else:
        typer.echo(f"examples: {train.num_examples:,} train, {val.num_examples:,} val")
        typer.echo(f"tokens:   {train.num_tokens:,} train, {val.num_tokens:,} val")
        typer.echo(f"labels:   {train.num_label_tokens:,} train, {val.num_label_tokens:,} val")
        typer.echo(f"written:  {target / 'train'}, {target / 'val'}")
        print_losses(ledger)
    print_rejects(ledger, records.rejects)
    if config.val_frac and not val.num_examples:
        count = ledger.total("rendered").rows
        typer.echo(f"no validation rows: {config.val_frac:g} of {count} examples, rounded down, is 0", err=True)
