"""The command: `python train.py` and `chatmill train`, which are one."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from chatmill.errors import ChatmillError, UsageError
from chatmill.load.config import read_values
from chatmill.train import checkpoint as checkpoints
from chatmill.train.config import TrainConfig, from_environment, layered
from chatmill.train.loop import CONFIG, OnEval, Result, as_json, train

EXAMPLES = """\
examples:
  {prog} --model_name mine --config_file configs/sft1/150M.json --dataset_dir data/chat_sft --max_iters 5000
  {prog} --model_name mine --resume auto
  POST_TRAINING=1 WARMUP_PCT=0.05 {prog} --model_name chat --config_file configs/tiny.json --dataset_dir data/blocks
  torchrun --nproc-per-node 8 train.py --model_name mine --config_file configs/sft1/150M.json \
      --dataset_dir data/chat_sft --parallel fsdp

Every key of a config file is a flag, which wins over the file; values are JSON or plain text.
"""


def main(args: Sequence[str] | None = None, *, prog: str = "python train.py", on_eval: OnEval | None = None) -> None:
    """Train as the flags say. Faults are raised as `ChatmillError`, on rank 0 alone; the others just end."""
    given = parser(prog).parse_args(args)
    try:
        result = run(given, on_eval=on_eval)
    except ChatmillError as error:
        if os.environ.get("RANK", "0") != "0":
            sys.exit(error.exit_code)
        raise
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(as_json(result)) if given.json else told(result))


class _Parser(argparse.ArgumentParser):
    """A parser whose faults are one line like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def parser(prog: str) -> argparse.ArgumentParser:
    made = _Parser(
        prog=prog,
        usage=f"{prog} --model_name NAME --config_file FILE --dataset_dir DIR [--KEY VALUE ...]",
        description="Train a model on a dataset, a cache, or a folder of caches that are mixed.",
        epilog=EXAMPLES.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run = made.add_argument_group("the run")
    flags: Mapping[str, str] = {
        "model_name": "name of the run; it is written to checkpoints/NAME",
        "config_file": "a JSON file of the keys below; it may inherit from another",
        "dataset_dir": "what to train on",
        "out_dir": "where runs are written, checkpoints if not given",
        "resume": "auto: go on with the newest checkpoint, if there is one; or the folder of a checkpoint",
    }
    for name, text in flags.items():
        run.add_argument(*_spelled(name), metavar=name.split("_")[-1].upper(), help=text)
    run.add_argument("--json", action="store_true", help="print the result as JSON")
    keys = made.add_argument_group("keys of the config")
    for each in fields(TrainConfig):
        text = f"{each.metadata['doc']} ({json.dumps(each.default)})".replace("%", "%%")
        # A flag without a value is true, for keys that are.
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if isinstance(each.default, bool) else {}
        keys.add_argument(*_spelled(each.name), dest=f"key_{each.name}", metavar="V", help=text, **bare)
    return made


def _spelled(name: str) -> list[str]:
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def run(given: argparse.Namespace, *, on_eval: OnEval | None = None) -> Result:
    """The run that parsed flags ask for."""
    if given.model_name is None:
        raise UsageError("--model_name is missing; expected a name for the run")
    out_dir = Path(given.out_dir or "checkpoints")
    stored = _stored(out_dir / given.model_name) if given.resume is not None else {}
    dataset_dir = given.dataset_dir or stored.get("dataset_dir")
    if dataset_dir is None:
        raise UsageError("--dataset_dir is missing; expected the folder of a dataset")
    if given.config_file is None:
        base = {name: value for name, value in stored.items() if name != "dataset_dir"}
    else:
        base = read_values(Path(given.config_file))
    flags = {
        name.removeprefix("key_"): _value(text)
        for name, text in vars(given).items()
        if name.startswith("key_") and text is not None
    }
    place = given.config_file or "the flags"
    config = TrainConfig.from_mapping(layered(base, from_environment(os.environ), flags), place=place)
    return train(
        config,
        model_name=given.model_name,
        dataset_dir=dataset_dir,
        out_dir=out_dir,
        resume=given.resume,
        on_eval=on_eval,
    )


def _stored(folder: Path) -> dict[str, Any]:
    """What a run was last started with."""
    path = folder / CONFIG
    return read_values(path) if path.is_file() and checkpoints.found(folder) else {}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def told(result: Result) -> str:
    """The result in a few lines."""
    lines = []
    if result.stopped_by is not None:
        lines.append(
            f"stopped by {result.stopped_by} at step {result.step:,} of {result.total:,}; go on with --resume auto"
        )
    else:
        lines.append(f"{result.step:,} steps, {result.tokens:,} tokens, {result.trained:,} of them trained")
    if result.untrained_rows:
        lines.append(
            f"{result.untrained_rows:,} rows had nothing to train; {result.skipped_steps:,} steps were skipped for it"
        )
    if result.loss is not None:
        val = (
            ""
            if result.val_loss is None
            else f", val loss {result.val_loss:.4f}, perplexity {result.val_perplexity:.4g}"
        )
        lines.append(f"loss {result.loss:.4f}{val}")
    lines.append(f"see {result.folder}" + ("" if result.checkpoint is None else f"; checkpoint {result.checkpoint}"))
    return "\n".join(lines)
