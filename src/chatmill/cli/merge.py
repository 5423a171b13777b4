"""`chatmill merge`: merge LoRA adapters into their base model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from chatmill.cli.chat import BaseChoice, BaseModel
from chatmill.cli.options import AsJson, argument, counting, echo_json, echo_line
from chatmill.plain_file import local_path
from chatmill.train.checkpoint_files import model_folder
from chatmill.train.model_files import check_headers


def merge(
    adapters: Annotated[str, argument("RUN", "LoRA run, one of its checkpoints, or an adapter folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Model folder to write.")],
    save_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Dtype of the saved weights. auto keeps the dtype of the base model."),
    ] = "auto",
    base: BaseChoice = "trained",
    base_model: BaseModel = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FOLDER if this command wrote it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Merge the LoRA adapters of a run into their base model and save the result as a Hugging Face model folder.

    The folder includes the tokenizer and the chat template; loading the model requires neither peft nor chatmill.
    Weights are merged in float32 and rounded once. QLoRA adapters are merged into the dequantized base weights that
    they were trained with. --base original merges them into the stored weights instead, and prints how much the logits
    differ.

    \b
    Examples:
      chatmill merge checkpoints/my_adapters -o models/merged
      chatmill merge checkpoints/my_adapters/step_00000500 -o models/merged --save-dtype float32 --overwrite
    """
    # Check the model files before importing torch, which takes seconds.
    local_path(output)
    check_headers(model_folder(adapters))
    from chatmill.train.merge import merge_adapters
    from chatmill.train.preflight import trained_with
    from chatmill.train.saved_template import template_notes

    with counting("layers merged") as advance:
        merged = merge_adapters(
            adapters,
            output,
            save_dtype=save_dtype,
            base=base,
            base_model=base_model,
            overwrite=overwrite,
            progress=advance,
        )
    training = trained_with(output)
    for note in template_notes(Path(merged.base), training.get("format"), str(training.get("dataset"))):
        typer.echo(note, err=True)
    if as_json:
        echo_json({"path": str(output), **asdict(merged)})
        return
    unit, scale = ("GiB", 2**30) if merged.size >= 2**30 else ("MiB", 2**20) if merged.size >= 2**20 else ("KiB", 2**10)
    echo_line(f"{output}: {merged.layers:,} layers merged, {merged.size / scale:,.1f} {unit}, {merged.dtype}")
    if (far := merged.difference) is not None:
        echo_line(
            f"logits differ from those of the trained model (4-bit base) by {far.mean:.3g} on average, "
            f"{far.max:.3g} at most; the most likely token is the same at {far.same_top:.1%} of positions"
        )
