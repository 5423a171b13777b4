"""`chatmill reweigh`: the same tokens, another choice of who is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chatmill.cli.options import AsJson, echo_json
from chatmill.rows import TrainOn
from chatmill.store.reweigh import Reweighed, reweigh_dataset


def reweigh(
    dataset: Annotated[Path, typer.Argument(metavar="DIR", help="A dataset.", show_default=False)],
    train_on: Annotated[
        TrainOn,
        typer.Option(
            help="Whose turns are trained: the assistant's, the last answer of each conversation, or everyone's. "
            "What a message's own flag decided, and what the format never trains, stays as it is."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="NEW", help="The dataset to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace NEW if it is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a dataset with the same tokens and another mask, without tokenizing anything.

    Tokens are shared by hard link, so that they take no room of their own; they are copied where no link can be
    made, such as to another file system. Either dataset can be removed or replaced without harm to the other. Rows
    that were cut or dropped when DIR was prepared stay so.

    \b
    Example:
      chatmill reweigh data/v1 --train-on last -o data/v1-last
    """
    done = reweigh_dataset(dataset, output, train_on=train_on, overwrite=overwrite)
    if as_json:
        echo_json(_json(output, train_on, done))
        return
    for name, split in done.metadata.splits.items():
        before, tokens = done.parent.splits[name].num_trained_tokens, split.num_tokens
        typer.echo(
            f"{name}: {split.num_episodes:,} episodes, {tokens:,} tokens, "
            f"{_share(split.num_trained_tokens, tokens)} trained, before {_share(before, tokens)}"
        )
    if done.untrained:
        typer.echo(f"{done.untrained:,} conversations have no trained token now")
    if done.copied:
        typer.echo(f"{done.copied:,} files are copied: no hard link can be made from {dataset} to {output}")
    else:
        typer.echo(f"{done.linked:,} files are shared with {dataset}")
    typer.echo(f"{output}: sha256 {done.metadata.sha256}")


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole if whole else 0:.1%})"


def _json(output: Path, train_on: TrainOn, done: Reweighed) -> dict[str, object]:
    return {
        "path": str(output),
        "sha256": done.metadata.sha256,
        "parent": done.parent.sha256,
        "train_on": train_on,
        "splits": {
            name: {
                "episodes": split.num_episodes,
                "tokens": split.num_tokens,
                "trained": split.num_trained_tokens,
                "trained_before": done.parent.splits[name].num_trained_tokens,
            }
            for name, split in done.metadata.splits.items()
        },
        "untrained_conversations": done.untrained,
        "linked_files": done.linked,
        "copied_files": done.copied,
    }
