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

from chatmill.config import Right, faults_of, read_values
from chatmill.errors import ChatmillError, UsageError, one_line
from chatmill.train.checkpoint import step_name
from chatmill.train.config import TrainConfig, from_environment, layered, size_keys
from chatmill.train.loop import OutOfMemoryError, TrainResult, Words, train_model
from chatmill.train.run_dir import CONFIG

EXAMPLES = """\
examples:
  {prog} --model_name mine --config_file configs/sft1/150M.json --dataset_dir data/chat_sft --max_iters 5000
  {prog} --model_name mine --resume auto
  POST_TRAINING=1 WARMUP_PCT=0.05 {prog} --model_name chat --config_file configs/tiny.json --dataset_dir data/blocks
  torchrun --nproc-per-node 8 train.py --model_name mine --config_file configs/sft1/150M.json \
      --dataset_dir data/chat_sft --parallel fsdp

Every key of a config file is a flag, which wins over the file; values are JSON or plain text.
"""


def main(args: Sequence[str] | None = None, *, prog: str = "python train.py", words: Words | None = None) -> None:
    """Train as the flags say; sample answers are shown if `words` says how tokens read.

    What all ranks find wrong is raised as `ChatmillError` by rank 0; the others just end.
    """
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        given = parser(prog).parse_args(args)
        result = run(given, words=words)
    except ChatmillError as error:
        if not speaks and not isinstance(error, OutOfMemoryError):
            sys.exit(error.exit_code)
        raise
    if speaks:
        print(json.dumps(result.to_json()) if given.json else told(result))


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
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if each.metadata["right"].fits(True) else {}
        keys.add_argument(*_spelled(each.name), dest=f"key_{each.name}", metavar="V", help=text, **bare)
    return made


def _spelled(name: str) -> list[str]:
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def run(given: argparse.Namespace, *, words: Words | None = None) -> TrainResult:
    """The run that parsed flags ask for."""
    if given.model_name is None:
        raise UsageError("--model_name is missing; expected a name for the run")
    out_dir = Path(given.out_dir or "checkpoints")
    stored = out_dir / given.model_name / CONFIG
    if given.config_file is None and given.resume is not None and stored.is_file():
        given.config_file = stored
    base = {} if given.config_file is None else read_values(Path(given.config_file))
    flags = {
        each.name: _value(text, each.metadata["right"])
        for each in fields(TrainConfig)
        if (text := getattr(given, f"key_{each.name}")) is not None
    }
    if faults := faults_of(TrainConfig, flags):
        raise UsageError(f"the flags: {'; '.join(faults)}")
    values = layered(base, from_environment(os.environ), flags)
    shape = [name for name in flags if name in size_keys()]
    if shape and values.get("init_from_model") is not None:
        raise UsageError(
            f"the flags: {', '.join(shape)} would shape a fresh model, and init_from_model is "
            f"{one_line(str(values['init_from_model']), 300)}, which has its shape; leave them out"
        )
    config = TrainConfig.from_mapping(values, place=str(given.config_file or "the flags"))
    return train_model(config, model_name=given.model_name, out_dir=out_dir, resume=given.resume, words=words)


def _value(text: str, right: Right) -> Any:
    """A flag's value: JSON if that is right for its key, else the text itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if right.fits(value) or not right.fits(text) else text


def told(result: TrainResult) -> str:
    """The result in a few lines."""
    lines = []
    if result.stopped_by is not None:
        saved = result.checkpoint is not None and result.checkpoint.name == step_name(result.step)
        then = "go on with --resume auto" if saved else "it was not saved, save_interval is 0"
        lines.append(f"stopped by {result.stopped_by} at step {result.step:,} of {result.total:,}; {then}")
    else:
        lines.append(f"{result.step:,} steps, {result.tokens:,} tokens, {result.trained:,} of them trained")
    if result.cut_episodes:
        lines.append(
            f"{result.cut_episodes:,} conversations were longer than a row and lost {result.cut_tokens:,} tokens at "
            "their beginning; raise block_size, or prepare the data with --max-tokens"
        )
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
