"""The command `python train.py`: its flags, training and the summary. `chatmill train` also uses this module."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from chatmill.config import flag_spellings, from_environment, from_flags, keys_of, read_values
from chatmill.errors import ChatmillError, UsageError, one_line
from chatmill.plain_file import local_path
from chatmill.remote.named_files import local_file
from chatmill.remote.urls import place
from chatmill.settings import CACHE_ROOT, FILE
from chatmill.store.primer_cache import CACHES
from chatmill.train.checkpoint_files import BEST, step_name
from chatmill.train.config import (
    FIRST_FLAG,
    RunFlags,
    TrainConfig,
    layered,
    renamed_keys,
    size_keys,
    with_bare_switches,
)
from chatmill.train.fitting import FIT_COLUMNS, Fit, estimate_run
from chatmill.train.loop import OpenText, train_model
from chatmill.train.lost_ranks import LostRankError, RankError
from chatmill.train.project import TokenizerHash, compare_tokenizer, project_keys, project_settings
from chatmill.train.result import TrainResult
from chatmill.train.run_dir import CONFIG, METRICS
from chatmill.train.trackers.pages import ReportPage

ESTIMATE_FLAGS = ("estimate", "gpus", "gpu_memory")
"""Flags for --estimate, whose values are parsed; the values of all other run flags are plain text."""
OTHER_NAMES = {
    "model_name_or_path": "--init_from_model",
    "dataset_name": "--dataset_dir, the folder that chatmill prepare writes",
    "output_dir": "--out_dir and --model_name",
    "max_steps": "--max_iters",
    "num_train_epochs": "--epochs",
    "per_device_train_batch_size": "--batch_size, the number of rows per step on all GPUs",
    "max_length": "--block_size",
    "max_seq_length": "--block_size",
    "warmup_ratio": "--warmup_pct",
    "warmup_steps": "--warmup_iters",
    "lr_scheduler_type": "--lr_schedule",
    "optim": "--optimizer",
    "max_grad_norm": "--grad_clip",
    "logging_steps": "--log_interval",
    "eval_steps": "--eval_interval",
    "save_steps": "--save_interval",
    "save_total_limit": "--keep_checkpoints",
    "gradient_checkpointing": "--activation_checkpointing",
    "resume_from_checkpoint": "--resume",
    "use_peft": "--lora",
    "lora_r": """--lora '{"r": 16}'""",
}
"""Maps flags of transformers and TRL to the flags of chatmill."""
EXAMPLES = """\
examples:
  {prog} --model_name mine --config_file configs/sft1/150M.json --dataset_dir data/chat_sft --max_iters 5000
  {prog} --model_name mine --resume auto
  {prog} --config_file configs/sft1/600M.json --dataset_dir data/chat_sft --estimate --gpus 8 --gpu_memory 80
  POST_TRAINING=1 WARMUP_PCT=0.05 {prog} --model_name chat --config_file configs/tiny.json --dataset_dir data/blocks
  torchrun --nproc-per-node 8 train.py --model_name mine --config_file configs/sft1/150M.json \
      --dataset_dir data/chat_sft --parallel fsdp

Every key of a config file is a flag. Flags override the config file, which overrides chatmill.toml in the current
folder. Values are JSON or plain text.
"""


def main(
    args: Sequence[str] | None = None,
    *,
    prog: str = "python train.py",
    tokenizer_sha256: TokenizerHash | None = None,
    report_page: ReportPage | None = None,
) -> None:
    """Run the train command with the flags in `args`; the default is `sys.argv`.

    `tokenizer_sha256` returns the hash of the tokenizer that chatmill.toml specifies. `report_page` returns the report
    page of a dataset, which is logged to the experiment trackers.
    """
    with errors_of_first_rank():
        given, unknown = parser(prog).parse_known_args(with_bare_switches(sys.argv[1:] if args is None else args))
        flags = {name: text for name, text in vars(given).items() if isinstance(text, str)}
        run_and_print(
            flags,
            unknown,
            prog=prog,
            as_json=given.json,
            tokenizer_sha256=tokenizer_sha256,
            report_page=report_page,
        )


@contextmanager
def errors_of_first_rank() -> Iterator[None]:
    """If an error occurs on all ranks, report it only once: rank 0 raises the error, and the other ranks exit.

    A `RankError` is raised on the rank where it occurs, unless another rank reports it.
    """
    try:
        yield
    except ChatmillError as error:
        is_silent = not is_first_rank() and not isinstance(error, RankError)
        if is_silent or (isinstance(error, LostRankError) and error.reported):
            sys.exit(error.exit_code)
        raise


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError`, which is printed as one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def parser(prog: str) -> argparse.ArgumentParser:
    """Build the parser of `train.py`, with flags for the run and a flag for each config key."""
    made = _Parser(
        prog=prog,
        usage=f"{prog} --model_name NAME --config_file FILE --dataset_dir DIR [--KEY VALUE ...]",
        description="Train a model on a dataset, a cache, or a mix of the caches in a folder.",
        epilog=EXAMPLES.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    run_keys, keys = keys_of(RunFlags), dict(keys_of(TrainConfig))
    first = keys.pop(FIRST_FLAG)
    for title, declared in (
        ("loss mask", [first]),
        ("the run", run_keys.values()),
        ("config keys", keys.values()),
    ):
        group = made.add_argument_group(title)
        for each in declared:
            text = f"{each.help} ({json.dumps(each.default)})".replace("%", "%%")
            group.add_argument(*flag_spellings(each.name), dest=each.name, metavar=each.metavar or "V", help=text)
    output = made.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the result as JSON")
    output.add_argument("-h", "--help", action="help", help="show this message and exit")
    return made


def run_and_print(
    flags: Mapping[str, str],
    unknown: Sequence[str],
    *,
    prog: str,
    as_json: bool,
    open_text: OpenText | None = None,
    tokenizer_sha256: TokenizerHash | None = None,
    report_page: ReportPage | None = None,
    print_fit: Callable[[Fit], None] | None = None,
) -> None:
    """Train with these flags and print the result; sample answers are shown if `open_text` is given.

    With --estimate, call `print_fit` to print a memory estimate instead of training.
    """
    if "--tensorboard" in unknown:
        raise UsageError("unrecognized argument: --tensorboard; use --report_to tensorboard")
    if unknown:
        names = (
            each.removeprefix("--").partition("=")[0].replace("-", "_") for each in unknown if each.startswith("--")
        )
        named = "".join(
            f"; for {name}, use {OTHER_NAMES[name]}" for name in dict.fromkeys(names) if name in OTHER_NAMES
        )
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}{named}; see {prog} --help")
    where = _run_flags(flags)
    if where.estimate:
        fit = estimate(flags)
        if is_first_rank():
            print(json.dumps(fit.to_json())) if as_json else (print_fit or _print_fit)(fit)
        return
    result = run(flags, open_text=open_text, tokenizer_sha256=tokenizer_sha256, report_page=report_page)
    if is_first_rank():
        print(json.dumps(result.to_json()) if as_json else summary(result))


def _run_flags(flags: Mapping[str, str]) -> RunFlags:
    given = {name: text for name, text in flags.items() if name in keys_of(RunFlags)}
    # Treat names and folders as plain text, even if they look like numbers or JSON.
    plain: dict[str, Any] = {name: text for name, text in given.items() if name not in ESTIMATE_FLAGS}
    values = from_flags(RunFlags, {name: text for name, text in given.items() if name in ESTIMATE_FLAGS})
    where = RunFlags(**plain, **values)
    if not where.estimate and (alone := [name for name in ESTIMATE_FLAGS if values.get(name)]):
        raise UsageError(f"--{alone[0]} requires --estimate; a training run uses the GPUs that its launcher assigns")
    return where


def run(
    flags: Mapping[str, str],
    *,
    open_text: OpenText | None = None,
    tokenizer_sha256: TokenizerHash | None = None,
    report_page: ReportPage | None = None,
) -> TrainResult:
    """Train with the given flags, a mapping from flag names to unparsed values."""
    where = _run_flags(flags)
    if where.model_name is None:
        raise UsageError("--model_name is missing; expected a name for the run")
    settings = project_settings()
    config, notes = _config_of(flags, where, settings)
    if config.dataset_dir is None:
        raise UsageError(
            f"dataset_dir is missing; pass --dataset_dir, set {CACHE_ROOT} in {FILE}, or build a cache in {CACHES}"
        )
    return train_model(
        config,
        model_name=where.model_name,
        out_dir=local_path(where.out_dir),
        resume=where.resume,
        open_text=open_text,
        report_page=report_page,
        notes=[*notes, *compare_tokenizer(settings, config, tokenizer_sha256)],
    )


def estimate(flags: Mapping[str, str]) -> Fit:
    """Estimate the memory use of a run with these flags, without reading weights."""
    where = _run_flags(flags)
    config, _ = _config_of(flags, where, project_settings())
    return estimate_run(config, gpus=where.gpus, gpu_memory=where.gpu_memory)


def _config_of(flags: Mapping[str, str], where: RunFlags, settings: Any) -> tuple[TrainConfig, list[str]]:
    """Merge chatmill.toml, the config file, environment variables and flags; return the config, and notes on values
    that the user did not pass.
    """
    stored = local_path(where.out_dir) / (where.model_name or "") / CONFIG
    resumes = where.config_file is None and where.resume is not None and stored.is_file()
    file = str(stored) if resumes else where.config_file
    base = {} if file is None else read_values(local_file(file))
    if resumes:
        base = renamed_keys(base)
    given = from_flags(TrainConfig, {name: text for name, text in flags.items() if name in keys_of(TrainConfig)})
    stated = layered(base, from_environment(TrainConfig, os.environ), given)
    if stated.get("dataset_dir") is None:
        stated.pop("dataset_dir", None)
    project = project_keys(settings, stated.get("dataset_dir"))
    values = layered(project, stated)
    stops_no_more = bool(base.get("early_stop_patience")) and values.get("early_stop_patience") is None
    if resumes and stops_no_more and values.get("keep_best") is None and values.get("save_interval"):
        # The resumed run no longer stops early, so the default of keep_best (null) would now mean false. Set keep_best
        # to true, so that the best checkpoint is still kept.
        values["keep_best"] = True
    shape = [name for name in given if name in size_keys()]
    if shape and values.get("init_from_model") is not None:
        raise UsageError(
            f"{', '.join(f'--{name}' for name in shape)}: cannot change the shape of "
            f"{one_line(str(values['init_from_model']), 300)} (init_from_model); remove these flags"
        )
    notes = [f"{FILE}: {', '.join(used)}"] if (used := _shown(project, stated)) else []
    config = TrainConfig.from_mapping(values, place="the flags" if file is None else str(place(file)))
    if config.dataset_dir is None and Path(CACHES).is_dir():
        config = replace(config, dataset_dir=CACHES)
        notes.append(f"training on {CACHES}, the default cache folder; pass --dataset_dir to train on other data")
    return config, notes


def _print_fit(fit: Fit) -> None:
    for row in [FIT_COLUMNS, *fit.rows()]:
        print(f"{row[0]:<18}{row[1]:>10}{row[2]:>13}")
    print(*fit.notes(), sep="\n")


def _shown(project: Mapping[str, Any], stated: Mapping[str, Any]) -> list[str]:
    """Return the keys and values from chatmill.toml that are not overridden."""
    return [f"{name} {one_line(json.dumps(value), 300)}" for name, value in project.items() if name not in stated]


def val_lines(result: TrainResult) -> list[str]:
    """Return a list with one line, the val losses of all sources in a mix, or an empty list if the run has no mix."""
    shown = []
    for name, each in result.val_sources.items():
        loss = None if each is None else each["loss"]
        nothing = "has no episodes in val" if each is None else "has no trained tokens in val"
        shown.append(f"{one_line(name)} {nothing if loss is None else f'{loss:.4f}'}")
    return [f"val loss by source: {', '.join(shown)}"] if shown else []


def best_lines(result: TrainResult) -> list[str]:
    """Return a list with one line, the lowest val loss and its checkpoint.

    The list is empty if the run has no val loss, or if no best checkpoint was kept and the last val loss is the lowest.
    """
    if result.best_val_loss is None or result.best_step is None:
        return []
    line = f"best val loss {result.best_val_loss:.4f} at step {result.best_step:,}"
    if result.best_checkpoint is not None:
        return [f"{line}: {result.folder / BEST} -> {result.best_checkpoint.name}"]
    if result.val_loss == result.best_val_loss:
        return []
    return [f"{line}, but its checkpoint was not kept; use --keep_best to keep the best checkpoint"]


def summary(result: TrainResult) -> str:
    lines = []
    if result.stopped_by is not None:
        saved = result.checkpoint is not None and result.checkpoint.name == step_name(result.step)
        then = "continue with --resume auto" if saved else "this step was not saved because save_interval is 0"
        lines.append(f"stopped by {result.stopped_by} at step {result.step:,} of {result.total:,}; {then}")
    else:
        if result.stopped_early is not None:
            lines.append(f"stopped early at step {result.step:,} of {result.total:,}: {result.stopped_early}")
        steps = "1 step" if result.step == 1 else f"{result.step:,} steps"
        lines.append(f"{steps}, {result.tokens:,} tokens, {result.trained:,} of them trained")
    if result.cut_episodes:
        lines.append(
            f"truncated: {result.cut_episodes:,} conversations are longer than a row and lost "
            f"{result.cut_tokens:,} tokens at the start; {result.answer_cut:,} conversations lost part of an "
            "answer (answer_cut); raise block_size, or prepare the data with --max-tokens"
        )
    if result.untrained_rows:
        lines.append(
            f"{result.untrained_rows:,} rows had no trained tokens; {result.skipped_steps:,} steps without trained "
            f"tokens were skipped"
        )
    if result.loss_spikes:
        lines.append(f'loss spikes: {result.loss_spikes:,} steps; see "spike" in {result.folder / METRICS}')
    if result.loss is not None:
        lines.append(f"loss {result.loss:.4f}")
        if result.val_loss is not None:
            lines[-1] += f", val loss {result.val_loss:.4f}, perplexity {result.val_perplexity:.4g}"
            lines += val_lines(result)
    lines += best_lines(result)
    lines.append(f"see {result.folder}" + ("" if result.checkpoint is None else f"; checkpoint {result.checkpoint}"))
    return "\n".join(lines)
