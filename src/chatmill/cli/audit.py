"""`chatmill audit`: verify the audit log of a run against its dataset, or replay a step."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from chatmill.audit import replay_step, saved_states, verify_log
from chatmill.cli.options import (
    AsJson,
    GivenPlace,
    argument,
    command_group,
    counted,
    counting,
    dataset_place,
    echo_json,
    echo_line,
)
from chatmill.errors import one_line
from chatmill.show.order_view import replay_tokenizer, replayed_rows

app = command_group("Verify the audit log of a run, or replay a step.")
Log = Annotated[Path, argument("LOG", "Audit log: logs/audit/audit_….log.")]
DatasetDir = Annotated[
    GivenPlace | None,
    typer.Option(
        "--dataset",
        metavar="DIR",
        help="Dataset of the run: a folder or a URL.",
        show_default="as logged",
        parser=dataset_place,
    ),
]


@app.command("verify")
def verify(
    log: Log,
    dataset: DatasetDir = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Checkpoint folder or JSON file with the hash of a line that the log must contain. May be repeated.",
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HASH",
            help="Hash of a line that the log must contain, as stored in a checkpoint. May be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify an audit log: recompute every line from the dataset and report the first line that differs.

    Recomputes the order of every epoch and rereads the rows of every step. Each line contains the hash of the previous
    line, and each checkpoint stores the head of the log: the hash of its latest line. Pass --checkpoint or --head to
    detect a truncated or completely rewritten log. The step, cursor, dataset and config of a checkpoint must also match
    the log. Exits with code 1 if the verification fails.

    \b
    Examples:
      chatmill audit verify logs/audit/audit_20260103T164419Z.log --dataset data/chat_sft
      chatmill audit verify logs/audit/audit_20260103T164419Z.log --checkpoint runs/sft1/latest --json
    """
    heads = {f"--head {one_line(each, 12)}": each for each in head or ()}
    states = {name: state for path in checkpoint or () for name, state in saved_states(path, log).items()}
    with counting("steps") as advance:
        result = verify_log(log, dataset, heads=heads, states=states, progress=advance)
    if as_json:
        unanchored = result.unanchored if result.fault is None else None
        echo_json({"ok": result.fault is None, "fault": result.fault, **asdict(result), "unanchored": unanchored})
    elif result.fault is not None:
        echo_line(result.fault)
    else:
        echo_line(f"OK: {log}, {counted(result.lines, 'line')}; recomputed the rows of {counted(result.steps, 'step')}")
        if result.abandoned:
            typer.echo(f"{counted(result.abandoned, 'line')} abandoned when the run was resumed from an earlier step")
        if result.torn:
            typer.echo(f"incomplete after a crash: line {', '.join(map(str, result.torn))}")
        if not heads and not states:
            typer.echo("no --checkpoint or --head was given, so a truncated or rewritten log would not be detected")
        elif result.unanchored:
            lines = counted(result.unanchored, "line")
            typer.echo(f"not covered by a checkpoint or --head: {lines} at the end of the log")
    if result.fault is not None:
        raise typer.Exit(1)


@app.command("replay")
def replay_command(
    log: Log,
    step: Annotated[int, typer.Option(min=0, metavar="N", help="Step to replay, counted from 0.")],
    dataset: DatasetDir = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Tokenizer to decode the ids with.",
            show_default="the `bytes` tokenizer, if the dataset was built with it",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the rows of a training step exactly as the model received them: text, token ids and loss mask.

    Rereads the rows from the dataset and checks them against the digest in the log. Trained tokens are marked with a
    star. --json prints all token ids and their mask.

    \b
    Examples:
      chatmill audit replay logs/audit/audit_20260103T164419Z.log --step 120
      chatmill audit replay logs/audit/audit_20260103T164419Z.log --step 120 --json
    """
    replayed = replay_step(log, step, dataset)
    opened = replay_tokenizer(replayed.plan, tokenizer)
    rows = list(replayed_rows(replayed, opened))
    epoch, line = replayed.step.at.epoch, replayed.line
    if as_json:
        echo_json({"step": step, "epoch": epoch, "line": line, "rows": [row._asdict() for row in rows]})
        return
    echo_line(f"step {step}, epoch {epoch}: {counted(len(rows), 'row')}, which match the digest in {log}:{line}")
    for number, row in enumerate(rows):
        places = ", ".join(f"{episode} ({place})" for episode, place in zip(row.episodes, row.origins, strict=True))
        typer.echo(f"row {number}: {len(row.ids)} tokens, {sum(row.mask)} trained, episode {places}")
        tokens = zip(row.segments, row.mask, row.ids, strict=True)
        for (_, trained), run in groupby(tokens, key=lambda token: token[:2]):
            ids = [id for *_, id in run]
            text = " ".join(map(str, ids)) if opened is None else opened.decode(ids)
            typer.echo(f"  {'*' if trained else ' '} {one_line(text, 200)}")
    if opened is None:
        typer.echo("the tokenizer is unknown, so token ids are shown; pass --tokenizer to show text")
