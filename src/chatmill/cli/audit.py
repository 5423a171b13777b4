"""`chatmill audit`: hold the log of a run against its dataset, or look at a step of it again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from chatmill.audit import ReplayedStep, replay_step, verify_log
from chatmill.cli.options import AsJson, counting, echo_json
from chatmill.errors import DataError, UsageError, one_line
from chatmill.format import load_format
from chatmill.load.batch import segments_from_end
from chatmill.load.plan import LoadPlan
from chatmill.load.source import conversation
from chatmill.store.primer_cache import PrimerCache
from chatmill.tokenizer import Tokenizer, open_tokenizer

app = typer.Typer(
    help="Check the audit log of a run, or see a step of it again.", no_args_is_help=True, rich_markup_mode=None
)
Log = Annotated[Path, typer.Argument(metavar="LOG", help="A log: logs/audit/audit_….log.", show_default=False)]
DatasetDir = Annotated[
    Path | None, typer.Option("--dataset", metavar="DIR", help="What the run read.", show_default="as logged")
]


@app.command("verify")
def verify(
    log: Log,
    dataset: DatasetDir = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="A checkpoint, or the JSON of its state: its head vouches for the log."),
    ] = None,
    head: Annotated[list[str] | None, typer.Option(metavar="HASH", help="A head that was kept elsewhere.")] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute every line of a log from the dataset, and say OK or which line is the first that differs.

    Each order is drawn again, and all rows that were handed out are read again. Without a checkpoint's head nobody can
    tell a log from one whose end was cut off, or whose lines and hashes were all written anew.

    \b
    Examples:
      chatmill audit verify logs/audit/audit_20260103T164419Z.log --dataset data/chat_sft
      chatmill audit verify logs/audit/audit_20260103T164419Z.log --checkpoint runs/sft1/latest --json
    """
    heads = {f"--head {one_line(each, 12)}": each for each in head or ()}
    for path in checkpoint or ():
        heads |= _heads(path, log)
    with counting("steps") as advance:
        found = verify_log(log, dataset, heads=heads, progress=advance)
    if as_json:
        echo_json(
            {
                "ok": found.fault is None,
                "fault": found.fault,
                "lines": found.lines,
                "steps": found.steps,
                "abandoned": found.abandoned,
                "torn": found.torn,
                "unanchored": found.unanchored if found.fault is None else None,
            }
        )
    elif found.fault is not None:
        typer.echo(found.fault)
    else:
        typer.echo(f"OK: {log}, {found.lines:,} lines, the rows of {found.steps:,} steps recomputed")
        if found.abandoned:
            typer.echo(f"{found.abandoned:,} abandoned, left behind by a resumed run")
        if found.torn:
            typer.echo(f"torn by a crash: line {', '.join(map(str, found.torn))}")
        if not heads:
            typer.echo("no head of a checkpoint was given: its end may have been cut off, or all of it written anew")
        elif found.unanchored:
            typer.echo(f"{found.unanchored:,} unanchored, after the last head that a checkpoint keeps")
    if found.fault is not None:
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
    found = replay_step(log, step, dataset)
    opened = _tokenizer(found.plan, tokenizer)
    rows = list(_rows(found, opened))
    at = found.step.at
    if as_json:
        echo_json({"step": step, "epoch": at.epoch, "line": found.line, "rows": [row._asdict() for row in rows]})
        return
    typer.echo(f"step {step}, epoch {at.epoch}: {len(rows)} rows, with the digest of {log}:{found.line}")
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


class Row(NamedTuple):
    """A row without its padding; `mask` says which of its tokens are predicted."""

    episodes: list[int]
    origins: list[str]
    ids: list[int]
    mask: list[int]
    segments: list[int]
    text: str | None


def _rows(found: ReplayedStep, tokenizer: Tokenizer | None) -> Iterator[Row]:
    batch = found.batch
    from_end = segments_from_end(batch.episode_ids)
    for number in range(found.step.num_rows):
        episodes = [episode for episode in batch.episode_ids[number].tolist() if episode >= 0]
        real = batch.segments[number] < len(episodes)
        ids, segments = batch.x[number][real].tolist(), batch.segments[number][real].tolist()
        mask = [0, *batch.loss_mask[number][real].astype(int).tolist()]
        # A row that is full has one token more than x, which is known if it is predicted.
        if real.all() and mask[-1]:
            ids.append(int(batch.y[number][-1]))
            segments.append(segments[-1])
        text = None if tokenizer is None else tokenizer.decode(ids)
        origins = [_origin(found.plan, *each) for each in zip(episodes, from_end[number].tolist(), strict=False)]
        yield Row(episodes, origins, ids, mask[: len(ids)], segments, text)


def _origin(plan: LoadPlan, episode: int, segment: int) -> str:
    """The source and line that a segment of an episode was made of."""
    found = conversation(plan.sources, plan.split, episode, segment)
    assert found is not None
    name = f"{one_line(found.source.name)} " if found.source.name else ""
    return name + one_line(found.place or f"{plan.split} {found.episode}")


def _tokenizer(plan: LoadPlan, spec: str | None) -> Tokenizer | None:
    """What the rows were made with: the one that is named if it is the dataset's, or `bytes`; None if unknown."""
    source = plan.sources[0]
    if isinstance(source.dataset, PrimerCache):
        state: Any = {"control": dict(load_format("primer").tokens), "added_tokens": True}
    elif source.dataset.metadata is None:
        # Another program wrote it, and nobody can say whether a tokenizer is its own.
        return None if spec is None else open_tokenizer(spec)
    else:
        state = source.dataset.tokenizer_state()
    if spec is None and state.get("name", "bytes") != "bytes":
        return None
    opened = open_tokenizer(
        spec or "bytes",
        control=state.get("control"),
        besides=state.get("besides", ()),
        add_tokens=state.get("added_tokens", False),
    )
    if opened.sha256 == source.tokenizer_sha256:
        return opened
    if spec is not None:
        raise UsageError(f"{source.path}: was made with another tokenizer than {one_line(spec)}; name that one")
    return None


def _heads(path: Path, log: Path) -> dict[str, str]:
    """The heads of this log that a checkpoint keeps, by where they are kept."""
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    heads: dict[str, str] = {}
    for file in files:
        try:
            state = json.loads(file.read_bytes())
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror}); expected the state of a checkpoint") from None
        except (ValueError, RecursionError):
            continue
        for kept in _kept(state):
            if kept["log"] == log.name:
                heads[str(file)] = kept["head"]
    if not heads:
        raise DataError(f"{path}: keeps no head of {log.name}; expected the state of a checkpoint of that run")
    return heads


def _kept(value: Any) -> Iterator[dict[str, str]]:
    """Every state of an audit log in a JSON value."""
    if isinstance(value, dict) and isinstance(value.get("log"), str) and isinstance(value.get("head"), str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _kept(each)
