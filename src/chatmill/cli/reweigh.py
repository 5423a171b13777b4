"""`chatmill reweigh`: the same tokens, another choice of who is trained."""

from __future__ import annotations

from typing import Annotated

import typer

from chatmill.cli.options import AsJson, Dataset, GivenPlace, dataset_place, echo_json, echo_line, share
from chatmill.rows import TrainOn
from chatmill.store.reweigh import reweigh_dataset


def reweigh(
    dataset: Dataset,
    train_on: Annotated[
        TrainOn,
        typer.Option(
            help="Whose turns are trained: the assistant's, the last answer of each conversation, all answers after "
            "its last user message, or everyone's. What a message's own flag decided, and what the format never "
            "trains, stays as it is."
        ),
    ],
    output: Annotated[
        GivenPlace,
        typer.Option(
            "--output", "-o", metavar="NEW", help="The dataset to write: a folder or a URL.", parser=dataset_place
        ),
    ],
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
    before = {name: split.num_trained_tokens for name, split in done.parent.splits.items()}
    if as_json:
        splits = {
            name: {
                "episodes": split.num_episodes,
                "tokens": split.num_tokens,
                "trained": split.num_trained_tokens,
                "trained_before": before[name],
            }
            for name, split in done.metadata.splits.items()
        }
        hashes = {"sha256": done.metadata.sha256, "parent": done.parent.sha256}
        files = {"linked_files": done.linked, "copied_files": done.copied}
        about = {"path": str(output), **hashes, "train_on": train_on, "splits": splits}
        echo_json({**about, "untrained_conversations": done.untrained, **files})
        return
    for name, split in done.metadata.splits.items():
        now, then = (
            f"{trained:,} ({share(trained, split.num_tokens)})" for trained in (split.num_trained_tokens, before[name])
        )
        typer.echo(
            f"{name}: {split.num_episodes:,} episodes, {split.num_tokens:,} tokens, {now} trained, before {then}"
        )
    if done.untrained:
        typer.echo(f"{done.untrained:,} conversations have no trained token now")
    if done.copied:
        echo_line(f"{done.copied:,} files were copied")
    else:
        echo_line(f"{done.linked:,} files are shared with {dataset}")
    echo_line(f"{output}: sha256 {done.metadata.sha256}")
