"""`chatmill render`: show conversations as token rows, or write them as JSON lines."""

from __future__ import annotations

import sys
from itertools import islice
from typing import Annotated, Any

import typer
from rich.text import Text

from chatmill.cli.options import AsJson, console_on_stdout, print_losses, progress, share
from chatmill.cli.record_options import Inputs, ReadOptions, RenderOptions, TemplateFlags, print_rejects
from chatmill.config import LONGEST
from chatmill.fit import FitRule, truncate
from chatmill.format import open_renderer
from chatmill.prepare.job import existing
from chatmill.prepare.primer import count_stored
from chatmill.prepare.unit import trained_tokens
from chatmill.records.shapes.decode import json_line
from chatmill.rows import Rows
from chatmill.show.row_view import row_json, row_title
from chatmill.show.terminal import span_lines

SHOWN = 3
SPAN_KEYS = ("start", "stop", "role", "part", "rule", "weight")


def render_command(
    inputs: Inputs,
    *,
    render: RenderOptions,
    template: TemplateFlags,
    read: ReadOptions,
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
    reads = existing(render.tokenizer, render.format, template.chat_template)
    renderer = open_renderer(render.format, render.tokenizer, add_tokens=render.add_tokens, template=template.options())
    console = console_on_stdout(soft_wrap=True)
    width = max(40, console.width - 42) if console.is_terminal else 100
    limit = limit or (None if as_json else SHOWN)
    with read.records(inputs, reads=reads) as records:
        ledger = records.ledger
        first = islice(renderer.renderable(progress(records, "records"), records.reject), limit)
        for rows in renderer.render_chunks(first, train_on=render.train_on, ledger=ledger):
            ledger.add("rendered", rows=len(rows), tokens=len(rows.ids), trained=trained_tokens(rows))
            # Rows without a trained token are shown too, and noted.
            rows = truncate(
                rows, max_tokens, fit, ledger=ledger, drop_untrained=False, require_terminators=require_terminators
            )
            count_stored(rows, ledger)
            for row in range(len(rows)):
                if as_json:
                    sys.stdout.write(json_line(rendered_json(rows[row : row + 1])).decode())
                    continue
                console.print(Text(row_title(rows, row), style="bold"))
                for line in span_lines(rows, row, renderer.tokenizer, width=width):
                    console.print(line)
    ledger.check()
    total = ledger.total("stored")
    trained = f"{total.trained:,} trained ({share(total.trained, total.tokens)})"
    typer.echo(f"{total.rows:,} rows, {total.tokens:,} tokens, {trained}", err=as_json)
    print_losses(ledger, err=as_json)
    print_rejects(records)


def rendered_json(row: Rows) -> dict[str, Any]:
    """One rendered conversation: its origin, ids, labels, weights and spans."""
    stored = row_json(row)
    [segment] = stored.pop("segments")
    spans = [{name: span[name] for name in SPAN_KEYS} for span in stored.pop("spans")]
    return {**{name: segment[name] for name in ("source", "file", "line")}, **stored, "spans": spans}
