"""Write the memory tables in docs/explanation/models.md: estimates next to measurements, and estimates by model.

By default, the script prints the tables. `--write` writes them into the page, and `--check` exits with 1 if the tables
in the page differ.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "src")]

from train_lines import MODELS, QWEN, TRAIN_LINES, TrainLine  # noqa: E402

from chatmill.train.config import TrainConfig  # noqa: E402
from chatmill.train.estimate import GIB, Estimator  # noqa: E402

PAGE = ROOT / "docs" / "explanation" / "models.md"
MEASURED = ROOT / "benchmarks" / "results" / "gpu.json"
FITTED = {"0.6b-own-adamw", "8b-hf-lora", "1.7b-own-fp8"}
"""The runs to which the three constants of the estimate were fitted."""
SHAPES: dict[str, dict[str, Any]] = {
    "1.7 B": MODELS["1.7b"],
    "4 B": MODELS["4b"],
    "8 B": MODELS["8b"],
    "14 B": {**QWEN, "n_layer": 40, "n_embd": 5120, "n_head": 40, "n_ffn": 17408, "tie_weights": False},
    "32 B": {**QWEN, "n_layer": 64, "n_embd": 5120, "n_head": 64, "n_ffn": 25600, "tie_weights": False},
}
"""The shapes of the Qwen3 models."""
WAYS: dict[str, dict[str, Any]] = {
    "full, `adamw`": {},
    "full, `adamw_bf16`": {"optimizer": "adamw_bf16"},
    "full, `adamw8bit`": {"optimizer": "adamw8bit"},
    "LoRA, bfloat16 base": {"lora": {"r": 16}},
    "QLoRA, NF4 base": {"lora": {"r": 16}, "quantize": "nf4"},
    "QLoRA, `activation_offload`": {"lora": {"r": 16}, "quantize": "nf4", "activation_offload": True},
}
ROWS = {"1": 1, "8": 8}


def qwen3_folder(shape: dict[str, Any], dtype: torch.dtype, folder: Path) -> Path:
    """Write a Qwen3 model folder: the config, and a safetensors file with a header but no weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["n_embd"],
        intermediate_size=shape["n_ffn"],
        num_hidden_layers=shape["n_layer"],
        num_attention_heads=shape["n_head"],
        num_key_value_heads=shape["n_kv_head"],
        head_dim=shape["head_dim"],
        tie_word_embeddings=shape.get("tie_weights", True),
        max_position_embeddings=4096,
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    header, at = {}, 0
    for name, parameter in model.named_parameters():
        stop = at + parameter.numel() * dtype.itemsize
        kind = {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
        header[name] = {"dtype": kind, "shape": list(parameter.shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        # Write a sparse file, which takes no disk space.
        file.truncate(8 + len(text) + at)
    return folder


def line_config(line: TrainLine, folder: Path) -> TrainConfig:
    """Return the config of a benchmark run of benchmarks/train.py. If the run loads a model, write the model to
    `folder`.
    """
    keys: dict[str, Any] = {
        "optimizer": line.optimizer,
        "fp8": line.fp8,
        "activation_checkpointing": line.checkpointing,
        "activation_offload": line.offload,
        "batch_size": line.rows,
        "block_size": 4096,
        "packing": "bins",
        "use_loss_mask": True,
    }
    if line.own:
        return TrainConfig(**keys, max_positions=4096, **MODELS[line.model])
    dtype = torch.bfloat16 if line.precision.base else torch.float32
    place = folder / f"{line.model}-{dtype}"
    if not place.exists():
        qwen3_folder(MODELS[line.model], dtype, place)
    adapters: dict[str, Any] = {"lora": {"r": 16}} if line.precision.base else {}
    return TrainConfig(
        **keys, **adapters, init_from_model=str(place), quantize="nf4" if line.precision.base == "nf4" else "none"
    )


def compared(folder: Path) -> Iterator[tuple[str, str, float, float]]:
    """Yield the name, the title, the estimated memory and the measured memory (in GiB) of each measured chatmill
    run.
    """
    measured = json.loads(MEASURED.read_text("utf-8"))
    for name, line in TRAIN_LINES.items():
        # Skip results without a precision, which are from an older version that used more memory.
        if line.side == "chatmill" and "precision" in measured.get(name, {}):
            estimate = Estimator(on_gpu=True)(line_config(line, folder))
            # Compare only the memory of tensors, because `torch.cuda.max_memory_allocated` measures only tensors.
            what = line.what.removeprefix("chatmill, ")
            yield name, what, estimate.tensors / GIB, measured[name]["gib"]


def comparison_table(folder: Path) -> Iterator[str]:
    yield "| benchmark | model and optimizer | estimated | measured | error |"
    yield "|---|---|---|---|---|"
    for name, what, estimated, gib in compared(folder):
        error = f"{estimated / gib - 1:+.1%}" + (" (fitted)" if name in FITTED else "")
        yield f"| `{name}` | {what} | {estimated:.1f} | {gib:.1f} | {error} |"


def fitting_table(
    folder: Path, models: Sequence[str] = tuple(SHAPES), ways: Sequence[str] = tuple(WAYS)
) -> Iterator[str]:
    """Yield a Markdown table of estimated memory in GiB, for 1 and 8 rows of 4,096 tokens on one GPU with activation
    checkpointing.
    """
    yield f"| | {' | '.join(models)} |"
    yield f"|---|{'---|' * len(models)}"
    cells: dict[str, list[str]] = {way: [] for way in ways}
    for model in models:
        estimator = Estimator(on_gpu=True)
        place = qwen3_folder(SHAPES[model], torch.bfloat16, folder / f"table {model}")
        for way in ways:
            totals = []
            for rows in ROWS.values():
                about = {"batch_size": rows, "block_size": 4096, "activation_checkpointing": True, **WAYS[way]}
                config = TrainConfig(**about, init_from_model=str(place))
                totals.append(estimator(config).total / GIB)
            cells[way].append(" – ".join(f"{total:.0f}" for total in totals))
    for way, row in cells.items():
        yield f"| {way} | {' | '.join(row)} |"


def page() -> str:
    """Return the text of docs/explanation/models.md with new tables."""
    text = PAGE.read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for name, table in (("comparison", comparison_table), ("fitting", fitting_table)):
            mark = f"<!-- {name}: scripts/memory_table.py --write -->\n"
            made = "\n".join(table(Path(folder)))
            text, count = re.subn(f"{re.escape(mark)}(\\|.*\n)*", lambda _, new=f"{mark}{made}\n": new, text)
            if count != 1:
                sys.exit(f"{PAGE}: has no line {mark.strip()}")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/explanation/models.md")
    parser.add_argument(
        "--check", action="store_true", help="exit with code 1 if docs/explanation/models.md is out of date"
    )
    args = parser.parse_args()
    if args.write or args.check:
        made = page()
        if args.check:
            return int(made != PAGE.read_text("utf-8"))
        PAGE.write_text(made, "utf-8")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        print(*comparison_table(Path(folder)), "", *fitting_table(Path(folder)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
