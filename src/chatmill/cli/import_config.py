"""`chatmill import`: convert configs from other trainers to a recipe and a training config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chatmill.cli.options import AsJson, argument, command_group, echo_json, echo_line
from chatmill.integrations.configs import (
    ImportedConfig,
    import_axolotl,
    import_llamafactory,
    import_trl,
    write_import,
)
from chatmill.plain_file import local_path

app = command_group("Convert the config of another trainer to a recipe and a training config.")
Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FOLDER", help="Output folder.", parser=local_path),
]
Ranks = Annotated[
    int | None,
    typer.Option("--ranks", min=1, metavar="N", help="Number of GPUs, used to compute the batch size. Default: 1."),
]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="FOLDER", help="Folder of the base model, instead of the one in the config."),
]
OverwriteFiles = Annotated[bool, typer.Option("--overwrite", help="Replace the files of an earlier import.")]


@app.command("axolotl")
def axolotl_command(
    config: Annotated[str, argument("CONFIG", "Axolotl config in YAML.")],
    output: Output,
    ranks: Ranks = None,
    model: Model = None,
    overwrite: OverwriteFiles = False,
    as_json: AsJson = False,
) -> None:
    """Import an Axolotl config, and report how each of its keys was handled.

    Writes recipe.yaml for `chatmill prepare`, train.json for `chatmill train`, and the report as keys.txt.

    \b
    Examples:
      chatmill import axolotl config.yml -o run
      chatmill import axolotl config.yml -o run --ranks 8 --model models/Llama-3.2-1B
    """
    _write(import_axolotl(config, ranks=ranks, model=model), output, overwrite, as_json)


@app.command("llamafactory")
def llamafactory_command(
    config: Annotated[str, argument("FILE", "dataset_info.json, or the YAML config of a run.")],
    output: Output,
    other: Annotated[
        str | None,
        argument("[FILE]", "The other file: the config of a run if FILE is dataset_info.json, and vice versa."),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset",
            metavar="NAME",
            help="Import only this dataset from dataset_info.json; may be repeated. Not allowed with a run config.",
        ),
    ] = None,
    ranks: Ranks = None,
    model: Model = None,
    overwrite: OverwriteFiles = False,
    as_json: AsJson = False,
) -> None:
    """Import a LLaMA-Factory dataset_info.json, the config of a run, or both.

    If only the config of a run is given, dataset_info.json is looked up in its dataset_dir. Writes recipe.yaml for
    `chatmill prepare`, train.json for `chatmill train`, and a report on each key as keys.txt.

    \b
    Examples:
      chatmill import llamafactory train_lora_sft.yaml -o run
      chatmill import llamafactory data/dataset_info.json train_lora_sft.yaml -o run
      chatmill import llamafactory data/dataset_info.json --dataset identity --model models/Qwen3-4B -o run
    """
    imported = import_llamafactory(config, other, datasets=names or (), ranks=ranks, model=model)
    _write(imported, output, overwrite, as_json)


@app.command("trl")
def trl_command(
    config: Annotated[str, argument("CONFIG", "YAML config of `trl sft`, or a recipe of the alignment handbook.")],
    output: Output,
    ranks: Ranks = None,
    model: Model = None,
    overwrite: OverwriteFiles = False,
    as_json: AsJson = False,
) -> None:
    """Import the config of a `trl sft` run, and report how each of its keys was handled.

    Writes recipe.yaml for `chatmill prepare`, train.json for `chatmill train`, and the report as keys.txt.

    \b
    Examples:
      chatmill import trl sft.yaml -o run
      chatmill import trl recipes/zephyr-7b-beta/sft/config_qlora.yaml -o run --ranks 8
    """
    _write(import_trl(config, ranks=ranks, model=model), output, overwrite, as_json)


def _write(imported: ImportedConfig, output: Path, overwrite: bool, as_json: bool) -> None:
    files = write_import(imported, output, overwrite=overwrite)
    if as_json:
        echo_json(imported.to_json(output))
        return
    for line in imported.lines():
        echo_line(line)
    echo_line("")
    echo_line(f"wrote {', '.join(map(str, files))}; next:")
    for command in imported.commands(output):
        echo_line(f"  {command}")
