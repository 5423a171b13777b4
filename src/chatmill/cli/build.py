"""`chatmill build-sft-primer` and the other build-sft commands: build the SFT cache of one source from one file.

Settings without a flag are read from `chatmill.toml`, which training also reads; see `chatmill.settings`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from chatmill.cli.expand import OptionGroup, option_parameter
from chatmill.cli.options import AsJson, echo_json, echo_line, print_losses, progress
from chatmill.cli.record_options import OnError, ReadOptions, RejectsFile, print_rejects
from chatmill.config import keys_of
from chatmill.errors import UsageError, one_line
from chatmill.load.mix import MIX_SFT
from chatmill.prepare.job import existing
from chatmill.prepare.primer import SHAPES, CacheConfig, build_cache
from chatmill.settings import ADD_TOKENS, CACHE_ROOT, CONTEXT, FILE, MIXED, SEED, TOKENIZER, read_settings
from chatmill.store.primer_cache import cache_folder

NAMES = {
    "path": "data.{source}.path",
    "val_frac": "data.{source}.val_frac",
    "out_dir": CACHE_ROOT,
    "seed": SEED,
    "t_max": CONTEXT,
    "tokenizer": TOKENIZER,
    "add_tokens": ADD_TOKENS,
}
"""Names of the `CacheConfig` keys in `chatmill.toml`."""
DEFAULT_PATHS = {"primer": "data/primer.jsonl"}
FROM_FILE = (
    "Writes a train and a val folder below OUT_DIR, which `chatmill train` reads. Settings without a flag are read "
    "from chatmill.toml in the current folder, if it exists."
)


# Settings.


def setting_flags() -> OptionGroup:
    """Return the options that override settings in `chatmill.toml`."""
    options = []
    for name, each in keys_of(CacheConfig).items():
        if name != "path":
            default = each.default if isinstance(each.default, str) else json.dumps(each.default)
            otherwise = f"[default: {NAMES[name].format(source='SOURCE')} in {FILE}, or {default}]"
            kind: Any = each.type | None
            options.append(option_parameter(name, Annotated[kind, typer.Option(help=f"{each.help} {otherwise}")], None))
    return OptionGroup(options)


def cache_config(source: str, flags: Mapping[str, Any], *, input_flag: str) -> CacheConfig:
    """Merge the settings of a source: flags override `chatmill.toml`, which overrides the defaults.

    `flags` maps `CacheConfig` keys to values, or to None if the flag is not given.
    """
    keys = keys_of(CacheConfig)
    settings, faults = read_settings()
    for name, value in flags.items():
        if value is not None and not keys[name].check.accepts(value):
            flag = input_flag if name == "path" else f"--{name.replace('_', '-')}"
            faults.append(f"{flag} is {one_line(str(value))}; expected {keys[name].check.expected}")
    of_file = {name: settings.get(dotted.format(source=source)) for name, dotted in NAMES.items()}
    values: dict[str, Any] = {"path": DEFAULT_PATHS.get(source)}
    values |= {name: value for layer in (of_file, flags) for name, value in layer.items() if value is not None}
    if values["path"] is None:
        faults.append(f"no input; pass {input_flag}, or set data.{source}.path in {FILE}")
    if faults:
        raise UsageError("; ".join(faults))
    if source not in (mix := settings.get(MIXED, MIX_SFT)):
        typer.echo(f"{FILE}: {MIXED} names {', '.join(map(one_line, mix))}; training will not use {source}", err=True)
    return CacheConfig(**values)


# Commands.


@dataclass(frozen=True)
class BuildOptions:
    """Options that all build-sft commands share; see `cli/expand.py`."""

    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing cache and an existing rejects file.")
    ] = False
    as_json: AsJson = False


def build_sft_primer(
    *,
    primer_jsonl: Annotated[
        str | None,
        typer.Option(help="File to read. [default: data.primer.path in chatmill.toml, or data/primer.jsonl]"),
    ] = None,
    flags: Annotated[dict[str, Any], setting_flags()],
    options: BuildOptions,
) -> None:
    """Build the SFT cache for primer.jsonl: shuffle, split, and tokenize one example per row.

    Writes OUT_DIR/primer with a train and a val folder, which `chatmill train` reads. Stops at the first invalid line.

    Settings without a flag are read from chatmill.toml in the current folder, if it exists.

    \b
    Examples:
      chatmill build-sft-primer
      chatmill build-sft-primer --primer-jsonl data/primer.jsonl --out-dir data/cache/sft \\
          --seed 42 --val-frac 0.1 --t-max 1024
    """
    config = cache_config("primer", {"path": primer_jsonl, **flags}, input_flag="--primer-jsonl")
    _build("primer", config, options)


def _command(source: str, summary: str, example: str) -> Callable[..., None]:
    """Create the build command for a source whose invalid records can be skipped."""

    def build(
        *,
        input: Annotated[
            str | None, typer.Option("--input", help="File to read. [default: data.SOURCE.path in chatmill.toml]")
        ] = None,
        flags: Annotated[dict[str, Any], setting_flags()],
        on_error: OnError = "stop",
        rejects: RejectsFile = None,
        options: BuildOptions,
    ) -> None:
        config = cache_config(source, {"path": input, **flags}, input_flag="--input")
        _build(source, config, options, ReadOptions(on_error=on_error, rejects=rejects))

    build.__doc__ = f"{summary}\n\n{FROM_FILE}\n\n\b\nExample:\n  {example}"
    return build


build_sft_oasst1 = _command(
    "oasst1",
    "Build the SFT cache for OpenAssistant trees: one conversation per tree, with the best-ranked replies.",
    "chatmill build-sft-oasst1 --input oasst1.jsonl --on-error skip",
)
build_sft_dolly15k = _command(
    "dolly15k",
    "Build the SFT cache for Dolly records: instruction, context and response.",
    "chatmill build-sft-dolly15k --input databricks-dolly-15k.jsonl",
)


def _build(source: str, config: CacheConfig, options: BuildOptions, read: ReadOptions | None = None) -> None:
    target = cache_folder(Path(config.out_dir), source)
    options_of_source = replace(read or ReadOptions(), shape=SHAPES[source], overwrite=options.overwrite)
    records = options_of_source.records([config.path], reads=existing(config.tokenizer), output=target)
    meta = build_cache(
        source,
        config,
        records,
        overwrite=options.overwrite,
        progress=partial(progress, what="records"),
    )
    train, val = meta.splits["train"], meta.splits["val"]
    if options.as_json:
        counts = {
            name: {
                "path": str(target / name),
                **{each: getattr(split, each) for each in ("num_examples", "num_tokens", "num_label_tokens")},
                "num_shards": len(split.shards),
            }
            for name, split in meta.splits.items()
        }
        echo_json({"path": str(target), "sha256": meta.sha256, "splits": counts, "ledger": meta.ledger.to_json()})
    else:
        typer.echo(f"examples: {train.num_examples:,} train, {val.num_examples:,} val")
        typer.echo(f"tokens:   {train.num_tokens:,} train, {val.num_tokens:,} val")
        typer.echo(f"labels:   {train.num_label_tokens:,} train, {val.num_label_tokens:,} val")
        echo_line(f"written:  {target / 'train'}, {target / 'val'}")
        print_losses(meta.ledger)
    print_rejects(records)
    if config.val_frac and not val.num_examples:
        count = meta.ledger.total("rendered").rows
        typer.echo(f"no validation rows: {config.val_frac:g} of {count} examples, rounded down, is 0", err=True)
