"""`chatmill build-sft-primer` and its kin: one file of conversations to the cache of one source.

Read all, shuffle by the seed, split, keep the last tokens of each row, write: one example a row. The shuffle needs
all rows at once, so a source must fit into memory: as columns of ids and spans, with nothing of Python a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from chatmill.cli.options import (
    DEFAULT_REJECTS,
    AddTokens,
    AsJson,
    OnError,
    RejectsFile,
    TokenizerName,
    echo_json,
    progress,
    reading,
    tell_losses,
    tell_rejects,
)
from chatmill.cli.render import note_untrained, trained_tokens
from chatmill.cli.settings import BuildSettings, build_settings
from chatmill.errors import DataError, RecordError, UsageError
from chatmill.fit.truncate import truncate
from chatmill.format import TurnRenderer, load_format
from chatmill.ledger import Ledger
from chatmill.records import Record, Rejects, shuffle_split
from chatmill.rows import Rows, concat
from chatmill.store.cache_writer import write_cache
from chatmill.store.files import real
from chatmill.store.primer_cache import CacheMeta, cache_folder, check_place
from chatmill.tokenizer import open_tokenizer

FORMAT = "primer"
SHAPES = {"primer": "primer", "oasst1": "oasst1", "dolly15k": "dolly"}
LEAST_TOKENS = 2
CHUNK = 4096
FROM_FILE = "What no flag gives is taken from chatmill.toml in the current folder, if there is one."

OutDir = Annotated[
    str | None,
    typer.Option(help="Where caches lie, a folder a source. [data.caches.sft_token_cache, else data/cache/sft]"),
]
Seed = Annotated[
    int | None, typer.Option(help="The seed of the shuffle that splits and orders. [training.seed, else 42]")
]
ValFrac = Annotated[
    float | None,
    typer.Option(help="The share of examples for validation, 0 for none. [data.SOURCE.val_frac, else 0.1]"),
]
TMax = Annotated[
    int | None, typer.Option(help="Tokens a row at most: of a longer one the last stay. [model.T, else 1024]")
]
Input = Annotated[str | None, typer.Option("--input", help="The file to read. [data.SOURCE.path]")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the cache if it is there.")]


def build_sft_primer(
    primer_jsonl: Annotated[
        str | None, typer.Option(help="The file to read. [data.primer.path, else data/primer.jsonl]")
    ] = None,
    out_dir: OutDir = None,
    seed: Seed = None,
    val_frac: ValFrac = None,
    t_max: TMax = None,
    tokenizer: TokenizerName = "bytes",
    add_tokens: AddTokens = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Build the cache of primer.jsonl: shuffled, split, one example a row. The first faulty line stops it.

    What no flag gives is taken from chatmill.toml in the current folder, if there is one.

    \b
    Examples:
      chatmill build-sft-primer
      chatmill build-sft-primer --primer-jsonl data/primer.jsonl --out-dir data/cache/sft \\
          --seed 42 --val-frac 0.1 --t-max 1024
    """
    settings = build_settings("primer", _flags("--primer-jsonl", primer_jsonl, out_dir, seed, val_frac, t_max))
    _build("primer", settings, tokenizer=tokenizer, add_tokens=add_tokens, overwrite=overwrite, as_json=as_json)


def _command(source: str, what: str, example: str) -> Callable[..., None]:
    """The command of a source whose faulty records may be skipped."""

    def build(
        input: Input = None,
        out_dir: OutDir = None,
        seed: Seed = None,
        val_frac: ValFrac = None,
        t_max: TMax = None,
        tokenizer: TokenizerName = "bytes",
        add_tokens: AddTokens = False,
        on_error: OnError = "stop",
        rejects: RejectsFile = DEFAULT_REJECTS,
        overwrite: Overwrite = False,
        as_json: AsJson = False,
    ) -> None:
        settings = build_settings(source, _flags("--input", input, out_dir, seed, val_frac, t_max))
        _build(
            source,
            settings,
            tokenizer=tokenizer,
            add_tokens=add_tokens,
            on_error=on_error,
            rejects=rejects,
            overwrite=overwrite,
            as_json=as_json,
        )

    build.__doc__ = f"{what}\n\n{FROM_FILE}\n\n\b\nExample:\n  {example}"
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


def build_cache(
    source: str,
    settings: BuildSettings,
    *,
    ledger: Ledger,
    tokenizer: str | Path = "bytes",
    add_tokens: bool = False,
    on_error: Literal["stop", "skip"] = "stop",
    rejects: Path = DEFAULT_REJECTS,
    overwrite: bool = False,
) -> tuple[CacheMeta, Rejects | None]:
    """Read, render, split, cut and write one source; what came of every row is in the ledger."""
    target = check_place(settings.out_dir, source, overwrite=overwrite)
    if real(Path(settings.path)).is_relative_to(real(target)):
        raise UsageError(f"{settings.path}: lies in {target}, which would be replaced; keep the input elsewhere")
    format = load_format(FORMAT)
    opened = open_tokenizer(tokenizer, control=format.tokens, add_tokens=add_tokens)
    with reading([settings.path], shape=SHAPES[source], on_error=on_error, rejects=rejects, ledger=ledger) as (
        records,
        rejected,
    ):
        answered = _answered(progress(records, "records"), rejected, ledger)
        rows = concat(list(TurnRenderer(format, opened).render_chunks(answered)))
    if not len(rows):
        why = f"all records were rejected, see {rejected.path}" if rejected and rejected.counts else "holds no record"
        raise DataError(f"{settings.path}: {why}; expected at least one")
    ledger.add("rendered", rows=len(rows), tokens=len(rows.ids), trained=trained_tokens(rows))
    split = shuffle_split(len(rows), settings.val_frac, seed=settings.seed)
    meta = write_cache(
        settings.out_dir,
        source,
        {name: _fitted(rows, numbers, settings.t_max, ledger) for name, numbers in split._asdict().items()},
        format=format.name,
        tokenizer_sha256=opened.sha256,
        vocab_size=opened.vocab_size,
        special_token_ids=opened.special_token_ids(),
        val_frac=settings.val_frac,
        seed=settings.seed,
        t_max=settings.t_max,
        ledger=ledger,
        overwrite=overwrite,
    )
    return meta, rejected


def _answered(records: Iterable[Record], rejected: Rejects | None, ledger: Ledger) -> Iterator[Record]:
    """The records that an assistant speaks in; others stop everything, or are rejected where faults are skipped."""
    for record in records:
        if any(message.role == "assistant" for message in record.messages):
            yield record
            continue
        right = "expected at least one: there would be nothing to train"
        fault = RecordError("no message has role assistant", right, kind="no_assistant")
        fault.at(record.file, record.line, record.id)
        if rejected is None:
            raise fault
        rejected(fault)
        ledger.add("rejected", fault.kind, rows=1)


def _fitted(rows: Rows, numbers: list[int], t_max: int, ledger: Ledger) -> Iterator[Rows]:
    """These rows in this order, some at a time, of each the last `t_max` tokens."""
    for at in range(0, len(numbers), CHUNK):
        chosen = rows.take(numbers[at : at + CHUNK])
        chosen = truncate(chosen, t_max, "tail", ledger=ledger, drop_untrained=False, min_tokens=LEAST_TOKENS)
        note_untrained(chosen, ledger)
        ledger.add("stored", rows=len(chosen), tokens=len(chosen.ids), trained=trained_tokens(chosen))
        yield chosen


def _flags(
    input_flag: str, path: str | None, out_dir: str | None, seed: int | None, val_frac: float | None, t_max: int | None
) -> dict[str, tuple[str, Any]]:
    return {
        "path": (input_flag, path),
        "out_dir": ("--out-dir", out_dir),
        "seed": ("--seed", seed),
        "val_frac": ("--val-frac", val_frac),
        "t_max": ("--t-max", t_max),
    }


def _build(
    source: str,
    settings: BuildSettings,
    *,
    tokenizer: str,
    add_tokens: bool,
    on_error: Literal["stop", "skip"] = "stop",
    rejects: Path = DEFAULT_REJECTS,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Build the cache and print the summary."""
    ledger = Ledger()
    meta, rejected = build_cache(
        source,
        settings,
        ledger=ledger,
        tokenizer=tokenizer,
        add_tokens=add_tokens,
        on_error=on_error,
        rejects=rejects,
        overwrite=overwrite,
    )
    target = cache_folder(settings.out_dir, source)
    train, val = meta.splits["train"], meta.splits["val"]
    if as_json:
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
        tell_losses(ledger)
    tell_rejects(ledger, rejected)
    if settings.val_frac and not val.num_examples:
        count = ledger.total("rendered").rows
        typer.echo(f"no validation rows: {settings.val_frac:g} of {count} examples, rounded down, is 0", err=True)
