"""`chatmill doctor`: check the nodes of a cluster before a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chatmill.cli.options import AsJson


def doctor(
    shared: Annotated[
        list[Path] | None,
        typer.Option(
            "--shared",
            metavar="DIR",
            help="Folder that all ranks must share; may be repeated. Default: the current folder and, if it exists, "
            "checkpoints.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Time limit per check.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Check the nodes of a cluster before a training run, and print the results as a table.

    Checks versions, GPUs, memory, disk, system limits and network settings. With several ranks, also checks that their
    versions and clocks agree, that they see the same files in shared folders, and that an all-reduce works with gloo
    and NCCL. Start the command with the same launcher as the run, such as torchrun. Exits with code 1 if a check fails.
    `python -m chatmill.train.doctor` is the same command and needs only numpy, torch and safetensors.

    \b
    Examples:
      chatmill doctor --shared /data/runs
      torchrun --nproc-per-node 8 -m chatmill.train.doctor --shared /data/runs --json
    """
    from chatmill.train.doctor import print_diagnosis

    if code := print_diagnosis(shared or (), seconds=timeout, as_json=as_json):
        raise typer.Exit(code)
