"""`python train.py`: its flags, and the run and summary that `chatmill train` shares with it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from chatmill.config import flag_spellings, from_environment, from_flags, keys_of, read_values
from chatmill.errors import ChatmillError, UsageError, one_line
from chatmill.plain_file import local_path
from chatmill.settings import CACHE_ROOT, FILE
from chatmill.store.primer_cache import CACHES
from chatmill.train.checkpoint_files import step_name
from chatmill.train.config import FIRST_FLAG, RunFlags, TrainConfig, layered, size_keys, with_bare_switches
from chatmill.train.distributed import RankError
from chatmill.train.loop import OpenText, TrainResult, train_model
from chatmill.train.project import TokenizerHash, compare_tokenizer, project_keys, project_settings
from chatmill.train.run_dir import CONFIG

EXAMPLES = """\
examples:
  {prog} --model_name mine --config_file configs/sft1/150M.json --dataset_dir data/chat_sft --max_iters 5000
  {prog} --model_name mine --resume auto
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
) -> None:
    """Train with these flags; `tokenizer_sha256` hashes the tokenizer that chatmill.toml names."""
    with errors_of_first_rank():
        given, unknown = parser(prog).parse_known_args(with_bare_switches(sys.argv[1:] if args is None else args))
        flags = {name: text for name, text in vars(given).items() if isinstance(text, str)}
        run_and_print(flags, unknown, prog=prog, as_json=given.json, tokenizer_sha256=tokenizer_sha256)


@contextmanager
def errors_of_first_rank() -> Iterator[None]:
    """Report a fault that all ranks meet once: rank 0 raises it, the others end. `RankError` is raised by any rank."""
    try:
        yield
    except ChatmillError as error:
        if not _is_first_rank() and not isinstance(error, RankError):
            sys.exit(error.exit_code)
        raise


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


class _Parser(argparse.ArgumentParser):
    """A parser whose faults are one line like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def parser(prog: str) -> argparse.ArgumentParser:
    """The flags of `train.py`, one for each declared key."""
    made = _Parser(
        prog=prog,
        usage=f"{prog} --model_name NAME --config_file FILE --dataset_dir DIR [--KEY VALUE ...]",
        description="Train a model on a dataset, a cache, or a folder of caches that are mixed.",
        epilog=EXAMPLES.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    run_keys, keys = keys_of(RunFlags), dict(keys_of(TrainConfig))
    first = keys.pop(FIRST_FLAG)
    for title, declared in (
        ("what is trained", [first]),
        ("the run", run_keys.values()),
        ("keys of the config", keys.values()),
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
) -> None:
    """Train as the flags say and print the result; sample answers are shown if `open_text` is given."""
    if unknown:
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}; see {prog} --help")
    result = run(flags, open_text=open_text, tokenizer_sha256=tokenizer_sha256)
    if _is_first_rank():
        print(json.dumps(result.to_json()) if as_json else summary(result))


def run(
    flags: Mapping[str, str], *, open_text: OpenText | None = None, tokenizer_sha256: TokenizerHash | None = None
) -> TrainResult:
    """The run that these flags ask for, given as text by their names."""
    where = RunFlags(**{name: text for name, text in flags.items() if name in keys_of(RunFlags)})
    if where.model_name is None:
        raise UsageError("--model_name is missing; expected a name for the run")
    out_dir = local_path(where.out_dir)
    stored = out_dir / where.model_name / CONFIG
    resumes = where.config_file is None and where.resume is not None and stored.is_file()
    file = str(stored) if resumes else where.config_file
    base = {} if file is None else read_values(local_path(file))
    given = from_flags(TrainConfig, {name: text for name, text in flags.items() if name in keys_of(TrainConfig)})
    settings = project_settings()
    stated = layered(base, from_environment(TrainConfig, os.environ), given)
    if stated.get("dataset_dir") is None:
        stated.pop("dataset_dir", None)
    project = project_keys(settings, stated.get("dataset_dir"))
    values = layered(project, stated)
    shape = [name for name in given if name in size_keys()]
    if shape and values.get("init_from_model") is not None:
        raise UsageError(
            f"the flags: {', '.join(shape)} would shape a fresh model, and init_from_model is "
            f"{one_line(str(values['init_from_model']), 300)}, which has its shape; leave them out"
        )
    notes = [f"{FILE}: {', '.join(used)}"] if (used := _shown(project, stated)) else []
    config = TrainConfig.from_mapping(values, place=file or "the flags")
    if config.dataset_dir is None:
        if not Path(CACHES).is_dir():
            raise UsageError(
                f"dataset_dir is missing; expected the folder of a dataset, or {CACHE_ROOT} in {FILE}, or {CACHES}"
            )
        config = replace(config, dataset_dir=CACHES)
        notes.append(f"trains on {CACHES}, the default folder of caches; set --dataset_dir to train on other data")
    return train_model(
        config,
        model_name=where.model_name,
        out_dir=out_dir,
        resume=where.resume,
        open_text=open_text,
        notes=[*notes, *compare_tokenizer(settings, config, tokenizer_sha256)],
    )


def _shown(project: Mapping[str, Any], stated: Mapping[str, Any]) -> list[str]:
    """The keys that chatmill.toml decides, because neither the config file nor a flag states them."""
    return [f"{name} {one_line(json.dumps(value), 300)}" for name, value in project.items() if name not in stated]


def val_lines(result: TrainResult) -> list[str]:
    """The val loss of each source of a mix in one line."""
    shown = []
    for name, each in result.val_sources.items():
        loss = None if each is None else each["loss"]
        nothing = "has no episodes in val" if each is None else "has no trained tokens in val"
        shown.append(f"{one_line(name)} {nothing if loss is None else f'{loss:.4f}'}")
    return [f"val loss by source: {', '.join(shown)}"] if shown else []


def summary(result: TrainResult) -> str:
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
            f"truncated tail: {result.cut_episodes:,} conversations are longer than a row and lost "
            f"{result.cut_tokens:,} tokens at their beginning; {result.answer_cut:,} conversations lost part of an "
            "answer (answer_cut); raise block_size, or prepare the data with --max-tokens"
        )
    if result.untrained_rows:
        lines.append(
            f"{result.untrained_rows:,} rows had nothing to train; {result.skipped_steps:,} steps were skipped for it"
        )
    if result.loss is not None:
        lines.append(f"loss {result.loss:.4f}")
        if result.val_loss is not None:
            lines[-1] += f", val loss {result.val_loss:.4f}, perplexity {result.val_perplexity:.4g}"
            lines += val_lines(result)
    lines.append(f"see {result.folder}" + ("" if result.checkpoint is None else f"; checkpoint {result.checkpoint}"))
    return "\n".join(lines)
