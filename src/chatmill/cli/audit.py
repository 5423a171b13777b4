"""`chatmill audit`: check the log of a run against its dataset, or show the rows of a step."""

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
    counting,
    dataset_place,
    echo_json,
    echo_line,
)
from chatmill.errors import one_line
from chatmill.show.order_view import replay_tokenizer, replayed_rows

app = command_group("Check the audit log of a run, or see a step of it again.")
Log = Annotated[Path, argument("LOG", "A log: logs/audit/audit_….log.")]
DatasetDir = Annotated[
    GivenPlace | None,
    typer.Option(
        "--dataset",
        metavar="DIR",
        help="What the run read: a folder or a URL.",
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
            help="A checkpoint, or the JSON of its state: its head vouches for the log.",
        ),
    ] = None,
    head: Annotated[list[str] | None, typer.Option(metavar="HASH", help="A head that was kept elsewhere.")] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute every line of a log from the dataset, and say OK or which line is the first that differs.

    Each order is drawn again, and all rows that were handed out are read again. Without a checkpoint's head nobody can
    tell a log from one whose end was cut off, or whose lines and hashes were all written anew. What a checkpoint says
    of the run (step, cursor, dataset, config) must be what the log says.

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
        echo_line(f"OK: {log}, {result.lines:,} lines, the rows of {result.steps:,} steps recomputed")
        if result.abandoned:
            typer.echo(f"{result.abandoned:,} abandoned, left behind by a resumed run")
        if result.torn:
            typer.echo(f"torn by a crash: line {', '.join(map(str, result.torn))}")
        if not heads and not states:
            typer.echo("no head of a checkpoint was given: its end may have been cut off, or all of it written anew")
        elif result.unanchored:
            typer.echo(f"{result.unanchored:,} unanchored, after the last head that a checkpoint keeps")
    if result.fault is not None:
        raise typer.Exit(1)


@app.command("replay")
def replay_command(
    log: Log,
    step: Annotated[int, typer.Option(min=0, metavar="N", help="Which step, counted from 0.")],
    dataset: DatasetDir = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="What turns ids into text.", show_default="bytes, if the dataset was made with it"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the rows of a step exactly as they were handed out: text, ids and what is trained.

    They are read again from the dataset, and are the rows only if they have the digest that was logged. Trained
    tokens are marked with a star. --json prints all ids and the mask of each.

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
    echo_line(f"step {step}, epoch {epoch}: {len(rows)} rows, with the digest of {log}:{line}")
    for number, row in enumerate(rows):
        places = ", ".join(f"{episode} ({place})" for episode, place in zip(row.episodes, row.origins, strict=True))
        typer.echo(f"row {number}: {len(row.ids)} tokens, {sum(row.mask)} trained, episode {places}")
        tokens = zip(row.segments, row.mask, row.ids, strict=True)
        for (_, trained), run in groupby(tokens, key=lambda token: token[:2]):
            ids = [id for *_, id in run]
            text = " ".join(map(str, ids)) if opened is None else opened.decode(ids)
            typer.echo(f"  {'*' if trained else ' '} {one_line(text, 200)}")
    if opened is None:
        typer.echo("ids are shown, because the tokenizer is not known; give --tokenizer for text")
