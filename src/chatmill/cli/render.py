"""`chatmill render`: show conversations as token rows, or print them as JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

import typer
from rich.text import Text

from chatmill.answers import mask_answers, note_untrained
from chatmill.cli.format_choice import is_default, print_format
from chatmill.cli.options import AsJson, console_on_stdout, counted, print_losses, progress, share
from chatmill.cli.record_options import (
    Inputs,
    ReadOptions,
    RenderOptions,
    TemplateFlags,
    print_rejects,
    require_records,
)
from chatmill.config import LONGEST
from chatmill.errors import UsageError
from chatmill.fit import FitRule, truncate
from chatmill.format import Renderer, before_cutting, open_renderer, requires_user
from chatmill.prepare.job import UNROLL_ALL, existing
from chatmill.prepare.primer import count_stored
from chatmill.prepare.rejects import CountedRecords
from chatmill.prepare.unit import CHUNK, trained_tokens
from chatmill.prepare.unroll import render_unrolled, row_chunks, unrolled
from chatmill.records.shapes.decode import json_line
from chatmill.rows import Rows
from chatmill.show.row_view import last_message, row_json, row_title
from chatmill.show.terminal import span_lines

SHOWN = 3
SPAN_KEYS = ("start", "stop", "role", "part", "rule", "weight")


def render_command(
    context: typer.Context,
    inputs: Inputs,
    *,
    render: RenderOptions,
    template: TemplateFlags,
    read: ReadOptions,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum row length in tokens; see --fit. Default: no truncation.",
        ),
    ] = None,
    fit: Annotated[
        FitRule, typer.Option(help="How to shorten rows over --max-tokens; see docs/explanation/packing.md.")
    ] = "exchanges",
    require_terminators: Annotated[
        bool, typer.Option("--require-terminators", help="Drop rows that end in the middle of an answer.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", min=1, max=LONGEST, help=f"Maximum number of rows. Default: {SHOWN}, or all with --json."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize conversations and show the loss mask span by span, with the rule for each span.

    Does not write a dataset. --json prints one object per row, with token ids, labels (-100 for untrained tokens),
    weights and spans.

    \b
    Examples:
      chatmill render data/conversations.jsonl -n 1
      chatmill render data/conversations.jsonl -n 1 --max-tokens 150 --fit exchanges
      chatmill render chat.jsonl --tokenizer tokenizer.json --format primer --json > rows.jsonl
      chatmill render chat.jsonl --tokenizer Qwen3-4B --template-arg enable_thinking=false
      chatmill render chat.jsonl --tokenizer Qwen3-4B --unroll
    """
    if render.unroll and render.train_on == "all":
        raise UsageError(UNROLL_ALL)
    reads = existing(render.tokenizer, render.format, template.chat_template)
    options = template.options()
    renderer = before_cutting(
        open_renderer(render.format, render.tokenizer, add_tokens=render.add_tokens, template=options)
    )
    console = console_on_stdout(soft_wrap=True)
    width = max(40, console.width - 42) if console.is_terminal else 100
    limit = limit or (None if as_json else SHOWN)
    with read.records(inputs, reads=reads) as records:
        ledger = records.ledger
        for rows in _rendered(records, renderer, render, limit):
            # Rows without trained tokens are also shown, with a note.
            rows = truncate(
                rows, max_tokens, fit, ledger=ledger, drop_untrained=False, require_terminators=require_terminators
            )
            if requires_user(renderer):
                rows = mask_answers(rows)
            note_untrained(rows, ledger)
            count_stored(rows, ledger)
            for row in range(len(rows)):
                if as_json:
                    sys.stdout.write(json_line(rendered_json(rows[row : row + 1], unrolled=render.unroll)).decode())
                    continue
                console.print(Text(row_title(rows, row, unrolled=render.unroll), style="bold"))
                for line in span_lines(rows, row, renderer.tokenizer, width=width):
                    console.print(line)
    ledger.check()
    valid = ledger.total("rendered").rows + ledger.total("filtered").rows
    if not ledger.total("rejected").rows:
        require_records(inputs, records, valid=valid)
    print_format(
        render.format,
        render.tokenizer,
        template.chat_template,
        is_default_tokenizer=is_default(context, "tokenizer"),
    )
    total = ledger.total("stored")
    trained = f"{total.trained:,} trained ({share(total.trained, total.tokens)})"
    typer.echo(f"{counted(total.rows, 'row')}, {total.tokens:,} tokens, {trained}", err=as_json)
    print_losses(ledger, err=as_json)
    print_rejects(records)
    require_records(inputs, records, valid=valid)


def _rendered(records: CountedRecords, renderer: Renderer, render: RenderOptions, limit: int | None) -> Iterator[Rows]:
    """Render the records, and yield the first `limit` rows in chunks."""
    counted, ledger, train_on = progress(records, "records"), records.ledger, render.train_on
    if render.unroll:
        conversations = unrolled(counted, renderer, train_on=train_on, on_reject=records.reject, ledger=ledger)
        for batch in row_chunks(conversations, CHUNK, limit=limit):
            yield render_unrolled(renderer, batch, ledger)
        return
    first = islice(renderer.renderable(counted, records.reject), limit)
    for rows in renderer.render_chunks(first, train_on=train_on, ledger=ledger, chunk=CHUNK):
        ledger.add("rendered", rows=len(rows), tokens=len(rows.ids), trained=trained_tokens(rows))
        yield rows


def rendered_json(row: Rows, *, unrolled: bool = False) -> dict[str, Any]:
    """Return a row as a dict for JSON; if `unrolled` is set, include the index of the row's last message."""
    stored = row_json(row)
    [segment] = stored.pop("segments")
    spans = [{name: span[name] for name in SPAN_KEYS} for span in stored.pop("spans")]
    last = {"last_message": last_message(row)} if unrolled else {}
    return {**{name: segment[name] for name in ("source", "file", "line")}, **last, **stored, "spans": spans}
