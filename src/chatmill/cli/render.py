"""`chatmill render`: conversations to token rows, to look at or to hand on as JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from chatmill.cli.options import (
    DEFAULT_REJECTS,
    AddTokens,
    AsJson,
    ChatTemplate,
    FormatName,
    Inputs,
    MaskName,
    OnError,
    RejectsFile,
    Shape,
    TemplateArgs,
    TemplateDate,
    TokenizerName,
    progress,
    reading,
    tell_losses,
    tell_rejects,
)
from chatmill.config import LONGEST
from chatmill.errors import RecordError
from chatmill.fit.truncate import FitRule, truncate
from chatmill.format import TemplateOptions, open_renderer
from chatmill.ledger import Ledger
from chatmill.load.batch import IGNORE_INDEX
from chatmill.records.shapes.decode import json_line
from chatmill.rows import Part, Role, Rows, Rule, TrainOn
from chatmill.show.terminal import row_title, span_lines

SHOWN = 3


def render_command(
    inputs: Inputs,
    tokenizer: TokenizerName = "bytes",
    format: FormatName = "chatml",
    train_on: Annotated[
        TrainOn,
        typer.Option(help="Whose turns are trained: every assistant's, the last one's, or all but tool results."),
    ] = "assistant",
    add_tokens: AddTokens = False,
    chat_template: ChatTemplate = None,
    template_arg: TemplateArgs = None,
    template_date: TemplateDate = None,
    mask: MaskName = "derived",
    shape: Shape = None,
    on_error: OnError = "stop",
    rejects: RejectsFile = DEFAULT_REJECTS,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Cut rows that are longer, as --fit says. Left out, nothing is cut.")
    ] = None,
    fit: Annotated[FitRule, typer.Option(help="How long rows are cut: see docs/packing.md.")] = "turns",
    require_terminators: Annotated[
        bool, typer.Option("--require-terminators", help="Drop rows that end inside an answer.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, max=LONGEST, help=f"Rows at most. To look at: {SHOWN}.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn conversations into token rows and show for every span whether it is trained, and why.

    With --json: one object a row, with ids, labels (-100 where nothing is trained), weights and spans.

    \b
    Examples:
      chatmill render data/conversations.jsonl -n 1
      chatmill render data/conversations.jsonl -n 1 --max-tokens 150 --fit turns
      chatmill render chat.jsonl --tokenizer tokenizer.json --format primer --json > rows.jsonl
      chatmill render chat.jsonl --tokenizer Qwen3-4B --format template --template-arg enable_thinking=false
    """
    template = TemplateOptions(chat_template, template_arg or (), mask, template_date)
    chosen = open_renderer(format, tokenizer, add_tokens=add_tokens, template=template)
    ledger, console = Ledger(), Console(highlight=False, soft_wrap=True)
    limit = limit or (None if as_json else SHOWN)
    with reading(inputs, shape=shape, on_error=on_error, rejects=rejects, ledger=ledger) as (records, rejected):

        def reject(fault: RecordError) -> None:
            if rejected is None:
                raise fault
            rejected(fault)
            ledger.add("rejected", fault.kind, rows=1)

        counted = islice(chosen.renderable(progress(records, "records"), reject), limit)
        for rows in chosen.render_chunks(counted, train_on=train_on, ledger=ledger):
            ledger.add("rendered", rows=len(rows), tokens=len(rows.ids), trained=trained_tokens(rows))
            # To look at, rows that teach nothing stay; they are noted.
            rows = truncate(
                rows, max_tokens, fit, ledger=ledger, drop_untrained=False, require_terminators=require_terminators
            )
            ledger.add("stored", rows=len(rows), tokens=len(rows.ids), trained=trained_tokens(rows))
            note_untrained(rows, ledger)
            for row in range(len(rows)):
                if as_json:
                    sys.stdout.write(json_line(row_json(rows, row)).decode())
                    continue
                console.print(Text(row_title(rows, row), style="bold"))
                for line in span_lines(
                    rows, row, chosen.tokenizer, width=max(40, console.width - 42) if console.is_terminal else 100
                ):
                    console.print(line)
    ledger.check()
    total = ledger.total("stored")
    share = total.trained / total.tokens if total.tokens else 0
    typer.echo(f"{total.rows:,} rows, {total.tokens:,} tokens, {total.trained:,} trained ({share:.1%})", err=as_json)
    tell_losses(ledger, err=as_json)
    tell_rejects(ledger, rejected)


def note_untrained(rows: Rows, ledger: Ledger) -> None:
    segment = np.repeat(np.arange(len(rows)), np.diff(rows.first_span[rows.first_segment]))
    untrained = np.bincount(segment[rows.spans["weight"] > 0], minlength=len(rows)) == 0
    if untrained.any():
        ledger.add("noted", "no_trained_tokens", rows=int(untrained.sum()), tokens=int(rows.lengths[untrained].sum()))


def trained_tokens(rows: Rows) -> int:
    return int(rows.spans["length"][rows.spans["weight"] > 0].sum())


def row_json(rows: Rows, row: int) -> dict[str, Any]:
    """One row as plain data."""
    one = rows[row : row + 1]
    origin = one.origins[0]
    file = one.files[origin["file"]]
    return {
        "source": file.source,
        "file": file.path,
        "line": int(origin["line"]),
        "ids": one.ids.tolist(),
        "labels": np.where(one.mask(), one.targets(), IGNORE_INDEX).tolist(),
        "weights": one.weights().tolist(),
        "spans": list(_spans_json(one)),
    }


def _spans_json(one: Rows) -> Iterator[dict[str, Any]]:
    for span, start, stop in zip(one.spans, one.span_start[:-1], one.span_start[1:], strict=True):
        yield {
            "start": int(start),
            "stop": int(stop),
            "role": Role(span["role"]).name.lower(),
            "part": Part(span["part"]).name.lower(),
            "rule": Rule(span["rule"]).name.lower(),
            "weight": float(span["weight"]),
        }
