"""`chatmill prepare`: turn conversations into a dataset for training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer

from chatmill.cli.build_progress import BuildProgressDisplay
from chatmill.cli.expand import key_options
from chatmill.cli.format_choice import is_default, print_format
from chatmill.cli.guard import guarded
from chatmill.cli.options import (
    AsJson,
    DatasetFolder,
    Workers,
    counted,
    echo_json,
    echo_line,
    print_ledger,
    share,
    unread_key,
)
from chatmill.cli.record_options import (
    AllowCode,
    Columns,
    Inputs,
    InstructionTemplate,
    RejectsFile,
    ResponseTemplate,
    Shape,
)
from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.ledger import UNREAD_KEY, Ledger
from chatmill.prepare.engine import Engine, LocalEngine
from chatmill.prepare.job import SHARD_TOKENS, InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.prepare.progress import BuildProgress
from chatmill.prepare.recipe import SUFFIXES, load_recipe
from chatmill.prepare.rejects import Rejects, rejects_path
from chatmill.records import ShapeOptions
from chatmill.records.files import local_files
from chatmill.records.shapes import NO_OPTIONS
from chatmill.remote.urls import Place, place
from chatmill.store.metadata import Metadata

NOTES = {
    "answer_cut": "{rows} {have} only part of an answer; raise --max-tokens",
    "header_of_cut_message": "{rows} lost the tools or system text that the chat template writes into the first user "
    "message; raise --max-tokens, or use --fit exchanges, which drops these rows",
    "answer_unfinished": "{answer_tokens} {are} not trained, because a block ends inside the answer; use larger blocks",
    "no_trained_tokens": "{rows} had no trained token and {were} dropped",
    "answers_cut_off": "{rows} lost all answers to truncation and {were} dropped{lost}; raise --max-tokens",
    "last_exchange_over_max_tokens": "{rows} {were} dropped because the last exchange does not fit{lost}; raise "
    "--max-tokens, or use --fit turns or --fit windows",
    "no_terminator": "{rows} ended inside an answer and {were} dropped{lost}",
    "duplicate": "duplicates dropped: {rows}",
    "near_duplicate": "near-duplicates dropped: {rows}",
    "excluded": "{rows} {were} excluded by --exclude",
    "exclude_without_record": "{lines} of the --exclude file {match} no rendered record",
    "too_long": "{rows} {were} too long and {were} dropped{lost}",
    "reasoning_left_out": "{rows} lost reasoning that the chat template omits; see --unroll",
    "messages_after_last_answer": "{conversations} {have} messages after the last trained answer; these messages are "
    "left out",
    "answer_without_row": "{answers} {have} no row, because the weight is 0 or the answer is incomplete",
    "range_splits_token": "{tokens} {are} only partly inside a range of train_ranges",
    "control_text": "{rows} {have} text that looks like a special token; it is encoded as plain text",
    "tools_left_out": "{rows} {have} tools that the chat template does not render",
    "record_weight": "{records} {have} a weight, which multiplies the weights of the trained tokens",
    "template_kwargs_unused": "{records} {have} chat_template_kwargs, which only --format template uses",
}
"""Maps a reason in the ledger to the note that is printed after a build."""
NOUNS = ("row", "record", "line", "conversation", "answer", "token", "answer token")
VERBS = {"are": "is", "were": "was", "have": "has", "match": "matches"}
"""Plural and singular forms of the verbs in `NOTES`."""


class StoppedError(ChatmillError):
    """Raised when Ctrl-C interrupts the build."""

    exit_code = 130


def prepare_command(
    context: typer.Context,
    inputs: Inputs,
    output: DatasetFolder,
    keys: Annotated[dict[str, Any], key_options(Job)],
    shape: Shape = None,
    columns: Columns = None,
    response_template: ResponseTemplate = None,
    instruction_template: InstructionTemplate = None,
    val_file: Annotated[list[str] | None, typer.Option(help="Files used only for validation.")] = None,
    workers: Workers = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Local processes, or a Ray cluster (pip install 'chatmill[ray]').")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster. Default: start a cluster on this machine.")
    ] = None,
    rejects: RejectsFile = None,
    allow_code: AllowCode = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing dataset and an existing rejects file.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted build.")] = False,
    as_json: AsJson = False,
) -> None:
    """Turn conversations into a tokenized dataset with a loss mask, for `chatmill train`.

    Writes token shards, a loss mask and metadata to OUTPUT, which appears only when it is complete. The same input and
    flags give the same bytes with any number of processes. INPUT can also be a recipe: a .yaml or .toml file that lists
    several sources.

    \b
    Examples:
      chatmill prepare data/conversations.jsonl -o data/v1 --val-split 0.1
      chatmill prepare 'chat/*.jsonl' -o data/v2 --tokenizer tokenizer.json --max-tokens 2048 --pack 4096
      chatmill prepare chat.jsonl -o data/v3 --tokenizer Qwen3-4B
      chatmill prepare chat.jsonl -o data/v3 --tokenizer Qwen3-4B --unroll
      chatmill prepare recipe.yaml -o data/v4
    """
    if len(inputs) == 1 and (recipe := place(inputs[0])).name.lower().endswith(SUFFIXES):
        of_source = {"shape", "columns", "response_template", "instruction_template", "val_file"}
        of_recipe = [each for each in context.command.params if each.name in {*keys, *of_source}]
        if flags := [each.opts[0] for each in of_recipe if not is_default(context, str(each.name))]:
            them = "it" if len(flags) == 1 else "them"
            raise UsageError(f"{', '.join(flags)} cannot be used with a recipe; set {them} in {recipe} instead")
        job, default_tokenizer = load_recipe(inputs[0]), False
    else:
        default_tokenizer = is_default(context, "tokenizer")
        options = ShapeOptions(columns, response_template, instruction_template)
        job = Job(_sources(inputs, val_file, shape, options), **keys)
    if engine == "ray" and "-" in [name for source in job.sources for name in source.inputs]:
        raise UsageError("-: Ray workers cannot read standard input; with --engine ray, pass files or URLs")
    chosen = _engine(engine, workers, address)
    flags_of_run = {"overwrite": overwrite, "resume": resume, "as_json": as_json}
    run(
        job,
        output,
        engine=chosen,
        rejects=rejects,
        allow_code=allow_code or (),
        is_default_tokenizer=default_tokenizer,
        **flags_of_run,
    )


def _sources(
    inputs: Sequence[str], val_files: Sequence[str] | None, shape: str | None, options: ShapeOptions = NO_OPTIONS
) -> tuple[InputSource, ...]:
    named: dict[str, Any] = asdict(options)
    only_val = [InputSource(tuple(val_files), shape, only_val=True, **named)] if val_files else []
    return (InputSource(tuple(inputs), shape, **named), *only_val)


def run(
    job: Job,
    output: Place,
    *,
    engine: Engine,
    rejects: Place | None,
    overwrite: bool,
    resume: bool,
    as_json: bool,
    allow_code: Sequence[str] = (),
    is_default_tokenizer: bool = False,
) -> None:
    rejected = None
    if job.on_error == "skip":
        reads = [*local_files([name for source in job.sources for name in source.inputs]), *job.named_files()]
        path = rejects or rejects_path(output)
        rejected = Rejects(path, reads=reads, output=output, overwrite=overwrite)
    with rejected or nullcontext(), BuildProgressDisplay() as display:

        def advance(now: BuildProgress) -> None:
            if display.is_empty:
                print_format(job.format, job.tokenizer, job.chat_template, is_default_tokenizer=is_default_tokenizer)
            display.show(now)

        try:
            metadata = prepare_dataset(
                job,
                output,
                engine=engine,
                overwrite=overwrite,
                resume=resume,
                allow_code=allow_code,
                on_fault=rejected or (lambda fault: None),
                on_progress=advance,
            )
        except KeyboardInterrupt:
            raise StoppedError("stopped; continue with --resume") from None
    if as_json:
        echo_json(_summary(output, metadata))
        return
    _print_summary(output, metadata, limit=_length_options(job))
    if rejected is not None and (count := sum(rejected.counts.values())):
        what = "record was" if count == 1 else "records were"
        echo_line(f"{count:,} {what} rejected; see {rejected.path}")


def _engine(name: str, workers: int | None, address: str | None) -> Engine:
    if name == "local":
        if address is not None:
            raise UsageError("--address requires --engine ray")
        return LocalEngine(workers)
    from chatmill.prepare.ray_engine import RayEngine

    return RayEngine(workers, address)


def _summary(output: Place, metadata: Metadata) -> dict[str, Any]:
    return {
        "path": str(output),
        "sha256": metadata.sha256,
        "format": metadata.format.get("name"),
        "splits": {
            name: {
                "episodes": split.num_episodes,
                "tokens": split.num_tokens,
                "trained_tokens": split.num_trained_tokens,
                "shards": len(split.shards),
                "longest": max((shard.longest for shard in split.shards), default=0),
            }
            for name, split in metadata.splits.items()
        },
        "ledger": metadata.ledger.to_json(),
    }


def _length_options(job: Job) -> str:
    """Return the command-line options to increase if rows should be longer; --max-tokens cannot exceed --pack."""
    if job.pack is None or (job.max_tokens is not None and job.max_tokens < job.pack):
        return "--max-tokens"
    return "--pack" if job.max_tokens is None else "--pack and --max-tokens"


def _print_summary(output: Place, metadata: Metadata, *, limit: str) -> None:
    for name, split in _summary(output, metadata)["splits"].items():
        echo_line(
            f"{output}/{name}: {counted(split['episodes'], 'episode')}, {split['tokens']:,} tokens, "
            f"{share(split['trained_tokens'], split['tokens'])} trained, "
            f"longest {split['longest']:,}, shards {split['shards']}"
        )
    print_ledger(metadata.ledger)
    train, val = (metadata.splits[name].num_episodes if name in metadata.splits else 0 for name in ("train", "val"))
    if val > train:
        echo_line(f"note: val has more episodes than train ({val:,} and {train:,}); check that they are not swapped")
    for line in warnings_of(metadata.ledger):
        echo_line(f"note: {line.replace('raise --max-tokens', f'raise {limit}')}")


def warnings_of(ledger: Ledger) -> Iterator[str]:
    """Yield warnings and hints to read before training on the dataset."""
    rendered = ledger.total("rendered").trained
    for bucket, reason, entry in ledger:
        if bucket == "truncated" and reason in ("exchanges", "turns", "tail") and entry.trained:
            lost = f"{entry.trained:,} of {rendered:,} trained tokens were cut off"
            yield f"{lost}; raise --max-tokens, or use --fit windows"
        if bucket in ("noted", "dropped") and reason in NOTES and reason != "excluded":
            yield _note(NOTES[reason], entry.rows or entry.tokens, lost=_lost(entry.trained, rendered))
        if reason.startswith(UNREAD_KEY):
            yield unread_key(reason, entry.rows)
    # The ledger counts records excluded by id as filtered, and records excluded by line as dropped.
    if excluded := sum(entry.rows for _, reason, entry in ledger if reason == "excluded"):
        yield _note(NOTES["excluded"], excluded)


def _lost(trained: int, rendered: int) -> str:
    return f", a loss of {trained:,} of {rendered:,} trained tokens ({share(trained, rendered)})" if trained else ""


def _note(template: str, number: int, *, lost: str = "") -> str:
    nouns = {f"{noun.replace(' ', '_')}s": counted(number, noun) for noun in NOUNS}
    forms = {plural: singular if number == 1 else plural for plural, singular in VERBS.items()}
    return template.format(lost=lost, **nouns, **forms)


def script(shape: str, doc: str) -> None:
    """Run `scripts/prepare_chat_sft.py` or `scripts/prepare_tool_sft.py`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, nargs="+", help="files, globs, folders or URLs of conversations")
    parser.add_argument("--output_dir", required=True, type=place, help="the folder or URL of the dataset")
    parser.add_argument("--val_split", type=float, default=0.0, help="fraction of conversations for validation")
    parser.add_argument("--val_file", nargs="+", help="files used only for validation")
    parser.add_argument("--tokenization", default="bytes", help="see --tokenizer of `chatmill prepare`")
    parser.add_argument("--format", default=None, help="see --format of `chatmill prepare`")
    parser.add_argument("--tokens_per_shard", type=int, default=SHARD_TOKENS, help="tokens per shard")
    parser.add_argument("--seed", type=int, default=None, help="split by shuffling with this seed instead of by hash")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted build")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    parser.add_argument("--verbose", action="store_true", help="also print the whole ledger as JSON")
    args = parser.parse_args()
    job = Job(
        _sources(args.input, args.val_file, shape),
        tokenizer=args.tokenization,
        format=args.format,
        val_split=args.val_split,
        split="hash" if args.seed is None else "shuffle",
        seed=42 if args.seed is None else args.seed,
        shard_tokens=args.tokens_per_shard,
    )

    options = {"overwrite": args.overwrite, "resume": args.resume, "as_json": args.verbose}

    def build() -> None:
        try:
            run(job, args.output_dir, engine=LocalEngine(), rejects=None, **options)
        except DataError as error:
            # Replace flags of `chatmill prepare` in the message with flags of the script.
            raise DataError(str(error).replace("--val-split", "--val_split").replace("--split shuffle ", "")) from None

    guarded(build)
    sys.exit(0)
