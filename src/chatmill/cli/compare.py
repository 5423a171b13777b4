"""`chatmill compare`: show where the loss masks of chatmill and TRL differ, and why."""

from __future__ import annotations

from enum import StrEnum
from itertools import islice
from typing import Annotated, Any

import typer
from rich.console import Console

from chatmill.cli.options import AsJson, argument, console_on_stdout, echo_json, echo_line, print_table, progress, share
from chatmill.cli.record_options import ReadOptions, TemplateFlags, print_rejects
from chatmill.config import LONGEST
from chatmill.errors import DataError, RecordError
from chatmill.format import TEMPLATE, TemplateRenderer, open_renderer
from chatmill.integrations.trl_peer import TRLPeer, require_trl
from chatmill.integrations.trl_process import TRLSetup
from chatmill.ledger import Ledger
from chatmill.prepare.job import existing
from chatmill.records import Record
from chatmill.records.files import label
from chatmill.show.compare import Clues, PeerRow
from chatmill.show.compare_report import Comparison, example_lines, outcome_lines
from chatmill.show.text import TokenText


class PeerName(StrEnum):
    TRL = "trl"


def compare(
    data: Annotated[str, argument("DATA", "Conversations: a file, glob, folder or URL; - is standard input.")],
    model: Annotated[
        str,
        argument(
            "MODEL", "Hugging Face model folder with a chat template, or any tokenizer.json with --chat-template."
        ),
    ],
    *,
    peer: Annotated[PeerName, typer.Option(help="Library to compare with.")] = PeerName.TRL,
    assistant_only_loss: Annotated[
        bool,
        typer.Option(help="TRL setting: compute the loss on answers only, or on every token (TRL's default)."),
    ] = True,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=0, help="TRL setting: truncate rows to this many tokens; 0 disables truncation. Default: as in TRL."
        ),
    ] = None,
    template: TemplateFlags,
    read: ReadOptions,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, max=LONGEST, help="Compare at most this many records.")
    ] = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with code 1 if a record differs.")] = False,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="Print without colors, as if NO_COLOR were set.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show where the loss masks of chatmill and TRL differ, and why, with an example of each reason.

    Renders the conversations with the chat template of MODEL twice: with chatmill, and with the SFTTrainer of the
    installed TRL. TRL receives messages, or prompts and completions if the file has them. TRL runs with
    assistant_only_loss=True, because chatmill also trains only on answers. TRL's default is assistant_only_loss=False;
    one line of the output shows how many tokens TRL trains on by default. If TRL cannot mask answers with this
    template, prints the reason and compares with TRL's default instead.

    chatmill does not truncate rows in this comparison. Neither library computes a loss for the first token of a row, so
    the first token is counted as not trained. Tokens in [brackets] are trained. The exit code is 0 even if records
    differ, unless --exit-code is given.

    \b
    Examples:
      chatmill compare --peer trl chat.jsonl Qwen3-4B
      chatmill compare chat.jsonl Qwen3-4B --max-length 4096 --limit 1000 --json
      chatmill compare chat.jsonl tokenizer.json --chat-template chatml.jinja --exit-code
    """
    assert peer is PeerName.TRL
    require_trl()
    renderer = open_renderer(TEMPLATE, model, template=template.options())
    assert isinstance(renderer, TemplateRenderer)
    with read.records([data], reads=existing(model, template.chat_template)) as records:
        completions = {label(part.path) for part in records.files() if part.shape == "prompt-completion"}
        comparison = Comparison(TokenText(renderer.tokenizer))
        with TRLPeer(renderer, assistant_only_loss=assistant_only_loss, max_length=max_length) as trl:
            setup = trl.setup
            for record in islice(progress(records, "records"), limit):
                _compare_record(record, renderer, trl, comparison, completions)
    if not comparison.records:
        raise DataError(f"{data}: no records; expected at least one")
    settings = {"assistant_only_loss": assistant_only_loss and not setup.no_mask, "max_length": setup.max_length}
    if as_json:
        peer_json = {"name": "trl", "version": setup.version, **settings}
        peer_json |= {"patched": setup.patched, "no_mask": setup.no_mask, "end_trained": setup.end_trained}
        echo_json({"equal": comparison.equal, "peer": peer_json, **comparison.to_json()})
    else:
        console = console_on_stdout(soft_wrap=True)
        console.no_color = console.no_color or no_color
        _print_comparison(console, comparison, setup, settings)
    print_rejects(records)
    if exit_code and not comparison.equal:
        raise typer.Exit(1)


def _compare_record(
    record: Record, renderer: TemplateRenderer, trl: TRLPeer, comparison: Comparison, completions: set[str]
) -> None:
    ledger = Ledger()
    fault: tuple[str, str] | None = None
    try:
        row = renderer.render([record], ledger=ledger)
    except RecordError as error:
        fault = error.kind, f"{error.what}; {error.right}"
    try:
        chosen, default = trl.rows(record, completion=_completion(record) if record.file in completions else None)
    except RecordError as error:
        chosen = default = f"{error.what}; {error.right}"
    if fault is not None or isinstance(chosen, str):
        its = (chosen, chosen) if isinstance(chosen, str) else None
        comparison.refuse(f"{record.file}:{record.line}", chatmill=fault, peer=its)
        return
    clues = Clues(
        record,
        comparison.text,
        frozenset(id for token, id in renderer.encoder.ids.items() if token not in renderer.text_tokens.ids),
        patched=trl.setup.patched,
        straddles=any(reason == "straddling_token" for _, reason, _ in ledger),
    )
    comparison.add(row, chosen, default if isinstance(default, PeerRow) else None, clues)


def _completion(record: Record) -> int:
    """Return the index of the first completion message: the first answer without an explicit weight."""
    answers = [
        number
        for number, message in enumerate(record.messages)
        if message.role == "assistant" and message.weight is None
    ]
    return answers[0] if answers else len(record.messages)


def _print_comparison(console: Console, comparison: Comparison, setup: TRLSetup, settings: dict[str, Any]) -> None:
    shown = ", ".join(f"{name}={value}" for name, value in settings.items())
    echo_line(f"chatmill and TRL {setup.version} with {shown}")
    if setup.no_mask:
        echo_line(f"with this template, TRL cannot train on answers only, so it trains on every token: {setup.no_mask}")
    if setup.patched:
        typer.echo("TRL replaces this model's chat template with its own training template")
    if not setup.end_trained:
        typer.echo("TRL warns: the end of an answer is not in the loss; the model may not learn to stop")
    for line in outcome_lines(comparison):
        echo_line(line)
    counts = comparison.counts
    print_table(
        ("tokens",),
        ("trained by both", "only by chatmill", "only by TRL", "by neither"),
        [(f"{counts.total:,}", counts.both, counts.only_chatmill, counts.only_peer, counts.neither)],
    )
    if comparison.weighted:
        typer.echo(
            f"{comparison.weighted:,} tokens trained by both have a weight other than 1 in chatmill, but 1 in TRL"
        )
    for why, reason in comparison.sorted_reasons():
        tokens = [
            f"{count:,} {text}"
            for count, text in (
                (reason.counts.only_chatmill, "trained only by chatmill"),
                (reason.counts.only_peer, "trained only by TRL"),
                (reason.counts.neither, "trained by neither"),
            )
            if count
        ]
        noun = "record" if reason.records == 1 else "records"
        console.print()
        console.print(f"{why.value}", style="bold", markup=False)
        console.print(f"  {', '.join(tokens)}, in {reason.records:,} {noun}", markup=False)
        if reason.example is not None:
            for text in example_lines(reason.example):
                console.print(text)
    default = comparison.default
    if default.total:
        whole = default.both + default.only_peer
        console.print()
        typer.echo(
            f"TRL's default, assistant_only_loss=False, trains on {whole:,} tokens; "
            f"chatmill does not train on {default.only_peer:,} of them ({share(default.only_peer, whole)})"
        )
