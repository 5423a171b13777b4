"""The command `chatmill`: one file a command; this one joins them and turns errors into one line."""

from __future__ import annotations

from typing import Annotated

import typer

from chatmill import __version__
from chatmill.cli import (
    audit,
    build,
    certify,
    chat,
    check,
    diff,
    explain,
    export,
    formats,
    order,
    prepare,
    render,
    report,
    reweigh,
    rollout,
    rows,
    show,
    stats,
    tokenizer,
    train,
    verify,
    view,
)
from chatmill.cli import eval as evaluation
from chatmill.cli.guard import guarded

app = typer.Typer(
    name="chatmill",
    help="Conversations in, exact training batches out.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("check")(check.check)
app.command("render")(render.render_command)
app.command("formats")(formats.formats)
app.command("certify")(certify.certify_command)
app.command("prepare")(prepare.prepare_command)
app.command("verify")(verify.verify)
app.command("reweigh")(reweigh.reweigh)
app.command("diff")(diff.diff)
app.command("order")(order.order)
app.command("show")(show.show)
app.command("explain")(explain.explain)
app.command("stats")(stats.stats)
app.command("report")(report.report)
app.command("view")(view.view)
app.command("train", context_settings=train.CONTEXT)(train.train)
app.command("chat")(chat.chat)
app.command("eval")(evaluation.eval_command)
app.command("rows")(rows.rows)
app.command("build-sft-primer")(build.build_sft_primer)
app.command("build-sft-oasst1")(build.build_sft_oasst1)
app.command("build-sft-dolly15k")(build.build_sft_dolly15k)
app.add_typer(audit.app, name="audit")
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(export.app, name="export")
app.add_typer(rollout.app, name="rollout")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        typer.echo(f"chatmill {__version__}")
        raise typer.Exit


def main() -> None:
    """Run a command; what the user can mend is one line, never a traceback."""
    guarded(app)
