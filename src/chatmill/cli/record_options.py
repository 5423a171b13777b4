"""Command-line options for commands that read and render records, and the summary of rejected records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from chatmill.cli.expand import option
from chatmill.cli.options import GivenPlace, argument
from chatmill.errors import DataError, one_line
from chatmill.format import Mask, TemplateOptions, TextTokens
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.rejects import CountedRecords
from chatmill.records import SHAPES, ShapeOptions
from chatmill.records.files import shown
from chatmill.remote.urls import place
from chatmill.rows import TrainOn

Inputs = Annotated[
    list[str],
    argument(
        "INPUT...",
        "Files, globs, folders or URLs of .jsonl, .json, .txt, .parquet or .arrow data, optionally compressed (.gz "
        ".zst .xz .bz2); - is standard input.",
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(help=f"Shape of the records: {', '.join(SHAPES)}. Default: detected from the first records."),
]
Columns = Annotated[str | None, option(InputSource, "columns")]
ResponseTemplate = Annotated[str | None, option(InputSource, "response_template")]
InstructionTemplate = Annotated[str | None, option(InputSource, "instruction_template")]
OnError = Annotated[
    Literal["stop", "skip"],
    typer.Option(
        help="How to handle an invalid record: stop and print its line, or skip it and write it to the rejects file."
    ),
]
RejectsFile = Annotated[
    GivenPlace | None,
    typer.Option(
        "--rejects",
        metavar="FILE",
        parser=place,
        help="With --on-error skip: file for the skipped records, with the reasons.",
        show_default="OUTPUT.rejects.jsonl, or rejects.jsonl without an output",
    ),
]
AllowCode = Annotated[
    list[str] | None,
    typer.Option(metavar="MODULE:FUNCTION", help="Allow the recipe to run this Python predicate; may be repeated."),
]
OverwriteFiles = Annotated[bool, typer.Option("--overwrite", help="Replace existing output and rejects files.")]
TokenizerName = Annotated[str, option(Job, "tokenizer")]
FormatName = Annotated[str | None, option(Job, "format")]
AddTokens = Annotated[bool, option(Job, "add_tokens")]


@dataclass(frozen=True)
class ReadOptions:
    """Command-line options of commands that read records; see `cli/expand.py`."""

    shape: Shape = None
    columns: Columns = None
    response_template: ResponseTemplate = None
    instruction_template: InstructionTemplate = None
    on_error: OnError = "stop"
    rejects: RejectsFile = None
    overwrite: OverwriteFiles = False

    def records(self, inputs: list[str], *, reads: Sequence[Path] = (), output: Path | None = None) -> CountedRecords:
        """Open the input files. `reads` lists the other files that the command reads, and `output` is the file that it
        writes.
        """
        return CountedRecords(
            inputs,
            shape=self.shape,
            options=ShapeOptions(self.columns, self.response_template, self.instruction_template),
            on_error=self.on_error,
            rejects=self.rejects,
            reads=reads,
            output=output,
            overwrite=self.overwrite,
        )


def print_rejects(records: CountedRecords) -> None:
    """Print on standard error how many records were rejected, why, and where they were written."""
    if records.rejects is not None and (count := records.ledger.total("rejected").rows):
        reasons = [f"{entry.rows} {reason}" for bucket, reason, entry in records.ledger if bucket == "rejected"]
        see = one_line(str(records.rejects.path), None)
        typer.echo(f"rejected {count:,}: {', '.join(reasons)}; see {see}", err=True)


def require_records(inputs: Sequence[str], records: CountedRecords, *, valid: int) -> None:
    """Raise `DataError` if the inputs have no records, or if all records were rejected."""
    if not valid:
        names, rejected = ", ".join(shown(place(name)) for name in inputs), records.ledger.total("rejected").rows
        if rejected:
            raise DataError(f"{names}: every record was rejected ({rejected:,}); expected at least one valid record")
        raise DataError(f"{names}: no records; expected at least one")


@dataclass(frozen=True)
class RenderOptions:
    """Command-line options of commands that render conversations; see `cli/expand.py`."""

    tokenizer: TokenizerName = "bytes"
    format: FormatName = None
    train_on: Annotated[TrainOn, option(Job, "train_on")] = "assistant"
    unroll: Annotated[bool, option(Job, "unroll")] = False
    add_tokens: AddTokens = False


@dataclass(frozen=True)
class TemplateFlags:
    """Command-line options for chat templates; see `cli/expand.py`."""

    chat_template: Annotated[str | None, option(Job, "chat_template")] = None
    template_args: Annotated[list[str] | None, option(Job, "template_args")] = None
    template_date: Annotated[str | None, option(Job, "template_date")] = None
    mask: Annotated[Mask, option(Job, "mask")] = "derived"
    text_tokens: Annotated[TextTokens, option(Job, "text_tokens")] = "as-transformers"
    allow_no_end_token: Annotated[bool, option(Job, "allow_no_end_token")] = False
    strip_prompt_space: Annotated[bool, option(Job, "strip_prompt_space")] = False

    def options(self) -> TemplateOptions:
        return TemplateOptions(
            chat_template=self.chat_template,
            arguments=self.template_args or (),
            mask=self.mask,
            date=self.template_date,
            text_tokens=self.text_tokens,
            allow_no_end_token=self.allow_no_end_token,
            strip_prompt_space=self.strip_prompt_space,
        )
