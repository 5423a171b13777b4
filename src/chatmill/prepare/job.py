"""Job: everything that determines the bytes of a dataset; and recipes, which are jobs as TOML files.

A recipe may have several sources, each read in its own way:

    tokenizer = "tokenizer.json"
    max_tokens = 2048
    val_split = 0.05

    [[source]]
    inputs = ["chat/*.jsonl"]

    [[source]]
    inputs = ["tools.jsonl"]
    shape = "tool"
    name = "tools"
    train_on = "last"
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from chatmill.config import LONGEST, key, keys_of, misfits, read_toml, required
from chatmill.errors import DataError, UsageError, one_line
from chatmill.format import Mask, TextTokens
from chatmill.records import ShapeOptions
from chatmill.rows import TrainOn

Fit = Literal["exchanges", "turns", "tail", "windows", "drop", "error", "blocks"]
FITS: tuple[str, ...] = get_args(Fit)
SplitBy = Literal["hash", "shuffle"]
SHARD_TOKENS = 2**24
UNROLL_ALL = "--unroll makes a row of each answer, and --train-on all trains every turn; give one of them"


@dataclass(frozen=True)
class InputSource:
    """Files and globs that are read with the same settings.

    >>> chatmill.InputSource(("data/tool_conversations.jsonl",), shape="tool", train_on="last").name is None
    True
    """

    inputs: tuple[str, ...] = required("Files or globs.")
    shape: str | None = key(None, "Shape of the records. Default: detected from the first records.")
    name: str | None = key(None, "Name of the source; left out, that of each file.")
    train_on: TrainOn | None = key(None, "Whose turns are trained in these files; left out, as the job says.")
    only_val: bool = key(False, "Use all of these files for validation, whatever the split.")
    columns: str | None = key(
        None,
        "Names of keys and roles in the files: messages=conversations,role=from,content=value,user=human.",
        metavar="NAME=COLUMN,...",
    )
    response_template: str | None = key(
        None, "For records of one text: train only the text after this string.", metavar="TEXT"
    )
    instruction_template: str | None = key(
        None, "With --response-template: the string at which an answer ends and the next prompt begins.", metavar="TEXT"
    )

    def options(self) -> ShapeOptions:
        return ShapeOptions(self.columns, self.response_template, self.instruction_template)


@dataclass(frozen=True)
class Job:
    """What to build. Its keys are the flags of `chatmill prepare` and the keys of a recipe.

    >>> job = chatmill.Job((chatmill.InputSource(("data/conversations.jsonl",)),), max_tokens=512, pack=2048)
    >>> job.format, job.fit
    (None, 'exchanges')
    """

    sources: tuple[InputSource, ...]
    tokenizer: str = key(
        "bytes", "`bytes` (embedded), a tokenizer.json, a SentencePiece or tiktoken file, or a Hugging Face folder."
    )
    format: str | None = key(
        None,
        "Chat format: a preset (see `chatmill formats`), a .toml file, or `template`. Default: the "
        "chat template of the tokenizer's folder if it has one, else chatml.",
    )
    add_tokens: bool = key(False, "Add the control tokens of the format that the tokenizer lacks.")
    chat_template: str | None = key(
        None, "With --format template: a Jinja file instead of the tokenizer's own.", metavar="FILE"
    )
    template_args: tuple[str, ...] = key(
        (),
        "Variable for the template, such as enable_thinking=false; may be given several times.",
        flag="--template-arg",
        metavar="NAME=VALUE",
    )
    template_date: str | None = key(None, "Date for templates that print it. Today, if left out.", metavar="YYYY-MM-DD")
    mask: Mask = key("derived", "With --format template: derive what is trained, or follow its generation tags.")
    text_tokens: TextTokens = key(
        "as-transformers",
        "With --format template: encode added tokens such as <think> in message text as tokens, as transformers does, "
        "or never. Special tokens and those of headers are always plain text.",
    )
    allow_no_end_token: bool = key(
        False, "With --format template: train answers that no token ends, instead of refusing them."
    )
    strip_prompt_space: bool = key(
        False,
        "With --format template: train the spaces that the assistant header ends in as part of answers; prompts are "
        "without them.",
    )
    train_on: TrainOn = key(
        "assistant",
        "Which turns to train: every assistant turn, the last one, those after the last user message, or all but tool "
        "results.",
    )
    unroll: bool = key(
        False,
        "Make one row per answer, with all messages before it as context. For templates that drop earlier reasoning.",
    )
    max_tokens: int | None = key(None, "The longest row, or the size of a block. Left out, nothing is cut.")
    fit: Fit = key(
        "exchanges",
        "How rows over --max-tokens are cut: see docs/packing.md; blocks makes stream blocks instead.",
    )
    require_terminators: bool = key(False, "Drop rows that end inside an answer.")
    pack: int | None = key(None, "Put whole rows together into rows of at most this many tokens.")
    val_split: float = key(0.0, "The share of conversations for validation, chosen by a hash of what they say.")
    split: SplitBy = key("hash", "By hash, which never moves a conversation, or by a shuffle with --seed.")
    seed: int = key(42, "For --split shuffle.")
    shard_tokens: int = key(SHARD_TOKENS, "Tokens in a shard.")
    dedupe: bool = key(False, "Keep only the first of equal conversations; 16 bytes of memory for each.")
    on_error: Literal["stop", "skip"] = key(
        "stop", "At a faulty record: stop with its line, or skip it and write it to the rejects."
    )

    def check(self) -> None:
        """Raise `UsageError` with all faults in one line."""
        faults = []
        if not any(source.inputs for source in self.sources):
            faults.append("no input")
        if self.fit not in FITS:
            faults.append(f'--fit "{self.fit}" is none of {", ".join(FITS)}')
        if self.unroll and "all" in [source.train_on or self.train_on for source in self.sources]:
            faults.append(UNROLL_ALL)
        if self.max_tokens is not None and self.max_tokens < 2:
            faults.append(f"--max-tokens {self.max_tokens} is too small; a row that can be trained has 2 tokens")
        if self.pack is not None and self.pack < 2:
            faults.append(f"--pack {self.pack} is too small; give at least 2")
        if self.pack is not None and self.pack > LONGEST:
            faults.append(f"--pack {self.pack} is too large; give at most {LONGEST}")
        if self.pack is not None and self.max_tokens is not None and self.max_tokens > self.pack:
            faults.append(f"--max-tokens {self.max_tokens} is over --pack {self.pack}; such rows would not fit")
        if self.fit == "blocks" and self.max_tokens is None:
            faults.append("--fit blocks needs the size of a block as --max-tokens")
        if self.fit == "blocks" and self.pack is not None:
            faults.append("--fit blocks makes full rows already; leave out --pack")
        if not (math.isfinite(self.val_split) and 0 <= self.val_split < 1):
            faults.append(f"--val-split {self.val_split} is outside of 0 to 1; 0.1 keeps a tenth for validation")
        if self.val_split and any(source.only_val for source in self.sources):
            faults.append("--val-split and --val-file both say what is for validation; give one")
        if self.seed < 0:
            faults.append(f"--seed {self.seed} is below 0; give a whole number from 0 on")
        for source in self.sources:
            if source.name is not None and (not source.name or "/" in source.name or "\\" in source.name):
                faults.append(f'the source name "{one_line(source.name)}" is empty or a path; give a plain name')
        if self.shard_tokens < 1:
            faults.append(f"--shard-tokens {self.shard_tokens} is too small; give at least 1")
        if faults:
            raise UsageError("; ".join(faults))

    @property
    def capacity(self) -> int | None:
        """The longest row that may come out of fitting; None for any."""
        return self.max_tokens if self.max_tokens is not None else self.pack

    @property
    def wants_val(self) -> bool:
        return self.val_split > 0 or any(source.only_val for source in self.sources)

    def named_files(self) -> list[Path]:
        """The files and folders that it reads besides its input: tokenizer, format and chat template."""
        return existing(self.tokenizer, self.format, self.chat_template)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


def existing(*names: str | None) -> list[Path]:
    """Those names that are files or folders, rather than the names of something built in."""
    return [Path(name) for name in names if name is not None and os.path.exists(name)]  # noqa: PTH110


def load_recipe(path: Path) -> Job:
    """The job that a recipe describes; all faults of the file are reported together, in one line."""
    data = read_toml(path, what="a recipe is a TOML file")
    faults: list[str] = []
    tables = data.pop("source", [])
    if not isinstance(tables, list) or not tables:
        faults.append("no [[source]]; name the files of each in `inputs`")
        tables = []
    sources = []
    for number, table in enumerate(tables):
        values = _values(InputSource, table, f"source {number}", faults)
        if not values.get("inputs"):
            faults.append(f"source {number} has no inputs; give a list of files or globs")
        sources.append(values)
    values = _values(Job, data, "the recipe", faults)
    if faults:
        raise DataError(f"{path}: " + "; ".join(faults))
    return Job(tuple(InputSource(**source) for source in sources), **values)


def _values(config: type[Any], table: Any, where: str, faults: list[str]) -> dict[str, Any]:
    """The values of a table that are right; all others are faults."""
    if not isinstance(table, dict):
        faults.append(f"{where} must be a table")
        return {}
    keys = keys_of(config)
    known = ", ".join(sorted(keys))
    faults += [f'{where} has unknown key "{one_line(name)}" (known: {known})' for name in table if name not in keys]
    wrong = misfits(keys, table)
    for each in wrong:
        # TOML has no null, and lists options with commas.
        expected = each.expected.removesuffix(", or null").replace('" or "', '", "')
        faults.append(f"{where}: {each.name} must be {expected}")
    refused = {each.name for each in wrong}
    right = {name: value for name, value in table.items() if name in keys and name not in refused}
    # As Job holds them: its hash names the build.
    return {
        name: tuple(value) if isinstance(value, list) else float(value) if keys[name].type is float else value
        for name, value in right.items()
    }
