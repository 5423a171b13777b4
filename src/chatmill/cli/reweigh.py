"""`chatmill reweigh`: copy a dataset with a different loss mask."""

from __future__ import annotations

from typing import Annotated

import typer

from chatmill.cli.options import AsJson, Dataset, GivenPlace, counted, dataset_place, echo_json, echo_line, share
from chatmill.rows import TrainOn
from chatmill.store.reweigh import reweigh_dataset


def reweigh(
    dataset: Dataset,
    train_on: Annotated[
        TrainOn,
        typer.Option(
            help="Turns to train on: every assistant turn, the last assistant turn, assistant turns after the last "
            "user message, or all turns. "
            "Messages with their own train flag, and tokens that the format always masks, keep their mask."
        ),
    ],
    output: Annotated[
        GivenPlace,
        typer.Option(
            "--output", "-o", metavar="NEW", help="Dataset to write: a folder or a URL.", parser=dataset_place
        ),
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace NEW if it already exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy a dataset with a different loss mask, without tokenizing again.

    Token files are hard-linked and take no extra space. Where links are not possible, such as on another file system,
    the files are copied. Either dataset can be removed or replaced without affecting the other. Rows that were
    truncated or dropped when DIR was prepared are not restored.

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
            f"{name}: {counted(split.num_episodes, 'episode')}, {split.num_tokens:,} tokens, {now} trained, "
            f"previously {then}"
        )
    if done.untrained:
        typer.echo(f"{done.untrained:,} conversations now have no trained tokens")
    if done.copied:
        echo_line(f"{done.copied:,} files were copied")
    else:
        echo_line(f"{done.linked:,} files are shared with {dataset}")
    echo_line(f"{output}: sha256 {done.metadata.sha256}")
