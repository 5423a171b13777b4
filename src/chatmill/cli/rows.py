"""`chatmill rows`: list the conversations in a training step with their losses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chatmill.cli.options import (
    AsJson,
    GivenPlace,
    TokenDtype,
    argument,
    counted,
    dataset_place,
    echo_json,
    echo_line,
    print_table,
)
from chatmill.errors import UsageError
from chatmill.plain_file import local_path
from chatmill.remote.urls import place
from chatmill.show.order_view import step_previews

RUNS = Path("checkpoints")


def rows_command(
    run: Annotated[Path | None, argument("[RUN]", "Run folder. Default: the newest run in checkpoints/.")] = None,
    step: Annotated[int, typer.Option(min=1, help="Training step.", show_default=False)] = ...,  # type: ignore[assignment]
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Maximum number of conversations. Default: all.")
    ] = None,
    dataset: Annotated[
        GivenPlace | None,
        typer.Option(
            metavar="DIR",
            help="Dataset of the run, if it has moved.",
            show_default=False,
            parser=dataset_place,
        ),
    ] = None,
    token_dtype: TokenDtype = None,
    as_json: AsJson = False,
) -> None:
    """List the conversations in a training step by file and line, highest loss first.

    Use this command to find the data that causes a loss spike. Requires a run trained with --log_rows.

    \b
    Examples:
      chatmill rows --step 812
      chatmill rows checkpoints/my_sft_model --step 812 -n 5
      chatmill rows checkpoints/my_sft_model --step 812 --json
    """
    from chatmill.train.run_dir import read_rows, rows_data

    folder = local_path(run) if run else newest_run(RUNS)
    losses = sorted(read_rows(folder, step), key=lambda row: (-row.loss, row.episode, row.segment))
    data = rows_data(folder, step)
    weight = sum(row.weight for row in losses)
    mean = sum(row.loss * row.weight for row in losses) / weight if weight else 0.0
    places = [(row.episode, row.segment) for row in losses[:limit]]
    where = dataset or place(data.dataset_dir)
    previews = step_previews(where, places, sha256=data.dataset_sha256, mix_sft=data.mix_sft, token_dtype=token_dtype)
    listed = list(zip(losses, previews, strict=False))
    if as_json:
        rows = [{**row._asdict(), "place": place, "text": text} for row, (place, text) in listed]
        echo_json({"run": str(folder), "step": step, "loss": mean, "conversations": len(losses), "rows": rows})
        return
    echo_line(f"{folder}, step {step:,}: {counted(len(losses), 'conversation')}, loss {mean:.4f}")
    lines = [(f"{row.loss:.4f}", str(row.episode), place or "-", text) for row, (place, text) in listed]
    print_table(("loss", "episode", "from", ""), (), lines)


def newest_run(folder: Path) -> Path:
    """Return the run that most recently logged losses per conversation."""
    from chatmill.train.run_dir import ROWS

    written = {path.parent.parent: path.stat().st_mtime_ns for path in folder.glob(f"*/{ROWS}/rank_00000.jsonl")}
    if not written:
        raise UsageError(f"{folder}: no run with losses per conversation; pass a run, or train with --log_rows")
    return max(written, key=lambda run: (written[run], str(run)))
