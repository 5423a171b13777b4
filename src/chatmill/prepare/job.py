"""Job: everything that determines the bytes of a dataset. A recipe is a job stored in a file; see `recipe`."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from chatmill.config import (
    LARGEST,
    LONGEST,
    NO_FLAG,
    SHARE,
    ValueCheck,
    integer,
    key,
    optional,
    required,
)
from chatmill.errors import UsageError, one_line
from chatmill.format import Mask, TextTokens
from chatmill.records import ShapeOptions
from chatmill.remote.urls import Url, place
from chatmill.rows import TrainOn

Fit = Literal["exchanges", "turns", "tail", "windows", "drop", "error", "blocks"]
FITS: tuple[str, ...] = get_args(Fit)
SplitBy = Literal["hash", "shuffle"]
SHARD_TOKENS = 2**24
POSITIVE = ValueCheck(
    "a number over 0", lambda value: value is None or (type(value) in (int, float) and 0 < value <= LARGEST)
)
TABLE = ValueCheck("a table of filters", lambda value: isinstance(value, Filters))
UNROLL_ALL = "--unroll makes one row per answer, but --train-on all trains on every turn; use only one of them"


@dataclass(frozen=True)
class Filters:
    """Filters on records; a record is kept if it passes every filter that is set."""

    min_tokens: int | None = key(None, "Minimum tokens per conversation, before truncation.", optional(integer(1)))
    max_tokens: int | None = key(None, "Maximum tokens per conversation, before truncation.", optional(integer(1)))
    min_turns: int | None = key(None, "Minimum number of messages, not counting system messages.", optional(integer(1)))
    max_turns: int | None = key(None, "Maximum number of messages, not counting system messages.", optional(integer(1)))
    min_trained_share: float | None = key(None, "Minimum fraction of trained tokens.", optional(SHARE))
    max_trained_share: float | None = key(None, "Maximum fraction of trained tokens.", optional(SHARE))
    match: str | None = key(None, "Regular expression that the text of at least one message must match.")
    no_match: str | None = key(None, "Regular expression that no message may match.")
    languages: tuple[str, ...] = key((), "Languages of answers as ISO 639-1 codes, such as en.")
    predicate: str | None = key(None, "Python function as module:function; requires --allow-code.")

    def faults(self) -> Iterator[str]:
        for what in ("tokens", "turns", "trained_share"):
            least, most = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if least is not None and most is not None and least > most:
                yield f"min_{what} {least} is greater than max_{what} {most}; expected at most {most}"
        for name in ("match", "no_match"):
            try:
                re.compile(getattr(self, name) or "")
            except (re.error, RecursionError, OverflowError) as error:
                yield f"{name} is not a regular expression ({one_line(str(error))})"
        for code in self.languages:
            if not re.fullmatch("[a-z]{2,3}", code):
                yield f'"{one_line(code)}" is not a language code; expected codes such as en or de'
        if self.predicate is not None and not re.fullmatch(r"\w+(\.\w+)*:\w+", self.predicate):
            yield f'predicate "{one_line(self.predicate)}" is not a function; expected module:function'


@dataclass(frozen=True)
class InputSource:
    """Files, globs, folders and URLs that are read with the same settings.

    >>> chatmill.InputSource(("data/tool_conversations.jsonl",), shape="tool", train_on="last").name is None
    True
    """

    inputs: tuple[str, ...] = required("Files, globs, folders and URLs to read.")
    shape: str | None = key(None, "Shape of the records. Default: detected from the first records.")
    name: str | None = key(None, "Name of the source. Default: the name of each file.")
    train_on: TrainOn | None = key(None, "Turns to train on in this source. Default: the job's train_on.")
    only_val: bool = key(False, "Use this source only for validation.")
    weight: float | None = key(
        None, "Weight of this source in the training mix, relative to the weights of the other sources.", POSITIVE
    )
    epochs: float | None = key(None, "How often each row of this source is used per pass over the dataset.", POSITIVE)
    max_samples: int | None = key(
        None,
        "Keep at most this many records: the first records that pass the filters and deduplication.",
        optional(integer(1)),
    )
    val_split: float | None = key(None, "Fraction of this source for validation. Default: the recipe's val_split.")
    filters: Filters = key(
        Filters(), "Filters for this source, in addition to the recipe's filters.", TABLE, flag=NO_FLAG
    )
    columns: str | None = key(
        None,
        "Names of keys and roles in the files, such as messages=conversations,role=from,content=value,user=human.",
        metavar="NAME=COLUMN,...",
    )
    response_template: str | None = key(
        None, "For plain-text records: train only on the text after this string.", metavar="TEXT"
    )
    instruction_template: str | None = key(
        None, "With --response-template: string that starts the next prompt; the answer ends before it.", metavar="TEXT"
    )

    def options(self) -> ShapeOptions:
        return ShapeOptions(self.columns, self.response_template, self.instruction_template)


@dataclass(frozen=True)
class Job:
    """A description of the dataset to build. Each field is a flag of `chatmill prepare` and a key of a recipe.

    >>> job = chatmill.Job((chatmill.InputSource(("data/conversations.jsonl",)),), max_tokens=512, pack=2048)
    >>> job.format, job.fit
    (None, 'exchanges')
    """

    sources: tuple[InputSource, ...]
    tokenizer: str = key(
        "bytes",
        "Tokenizer: `bytes` (built in), a tokenizer.json, a SentencePiece or tiktoken file, or a Hugging Face model "
        "folder, as a path or URL.",
    )
    format: str | None = key(
        None,
        "Chat format: a preset (see `chatmill formats`), a .toml file, or `template`. Default: the "
        "chat template of the tokenizer's folder if it has one, else chatml.",
    )
    add_tokens: bool = key(False, "Add control tokens of the chat format that the tokenizer lacks.")
    chat_template: str | None = key(
        None, "With --format template: a Jinja file to use instead of the tokenizer's chat template.", metavar="FILE"
    )
    template_args: tuple[str, ...] = key(
        (),
        "Variable for the chat template, such as enable_thinking=false; may be repeated.",
        flag="--template-arg",
        metavar="NAME=VALUE",
    )
    template_date: str | None = key(
        None, "Date for chat templates that print the date. Default: today.", metavar="YYYY-MM-DD"
    )
    mask: Mask = key(
        "derived",
        "With --format template: derive the loss mask from the rendered text, or use the template's generation tags.",
    )
    text_tokens: TextTokens = key(
        "as-transformers",
        "With --format template, how to encode added tokens such as <think> in message text: as single tokens, as "
        "transformers does (as-transformers), or as plain text (never). Special tokens and header "
        "tokens in message text are always encoded as plain text.",
    )
    allow_no_end_token: bool = key(
        False, "With --format template: train on answers without an end-of-turn token instead of refusing them."
    )
    strip_prompt_space: bool = key(
        False,
        "With --format template: move trailing spaces of the assistant header from the prompt into the trained answer.",
    )
    train_on: TrainOn = key(
        "assistant",
        "Turns to train on: every assistant turn, the last assistant turn, assistant turns after the last user "
        "message, or all turns except tool results.",
    )
    unroll: bool = key(
        False,
        "Make one row per answer, with all messages before it as context. Use this for chat templates that drop "
        "earlier reasoning.",
    )
    max_tokens: int | None = key(
        None, "Maximum row length in tokens, or the block size with --fit blocks. Default: no limit."
    )
    fit: Fit = key(
        "exchanges",
        "How to shorten rows over --max-tokens (see docs/explanation/packing.md); `blocks` joins all conversations and "
        "cuts them into rows of equal length.",
    )
    require_terminators: bool = key(False, "Drop rows that end in the middle of an answer.")
    pack: int | None = key(None, "Pack whole conversations into rows of at most this many tokens.")
    val_split: float = key(0.0, "Fraction of conversations for validation.")
    split: SplitBy = key(
        "hash",
        "How to choose validation conversations: by a hash of their content, which is stable when data is added, "
        "or by a shuffle.",
    )
    seed: int = key(42, "Seed for --split shuffle.")
    shard_tokens: int = key(SHARD_TOKENS, "Tokens per shard.")
    dedupe: bool = key(
        False,
        "Of conversations that are equal except for case and whitespace, keep only the first.",
    )
    near_dedupe: float | None = key(
        None,
        "Like --dedupe, and also drop near-duplicates: conversations that share at least this fraction of their "
        "5-token sequences, such as 0.8.",
        metavar="SHARE",
    )
    precedence: tuple[str, ...] = key(
        (),
        "Source names in order of precedence. Among duplicates, the record from the first source in this list is kept.",
        flag=NO_FLAG,
    )
    filters: Filters = key(Filters(), "Filters for all sources.", TABLE, flag=NO_FLAG)
    exclude: str | None = key(
        None, "Leave out the records listed in this file, one FILE:LINE or id per line.", metavar="FILE"
    )
    on_error: Literal["stop", "skip"] = key(
        "stop", "How to handle an invalid record: stop and print its line, or skip it and write it to the rejects file."
    )

    def check(self) -> None:
        """Raise one `UsageError` that lists all problems of the job."""
        faults = []
        if not any(source.inputs for source in self.sources):
            faults.append("no input")
        if self.fit not in FITS:
            faults.append(f'--fit "{self.fit}" is unknown; expected {", ".join(FITS)}')
        if self.unroll and "all" in [source.train_on or self.train_on for source in self.sources]:
            faults.append(UNROLL_ALL)
        if self.max_tokens is not None and self.max_tokens < 2:
            faults.append(f"--max-tokens {self.max_tokens} is too small; expected at least 2")
        if self.pack is not None and self.pack < 2:
            faults.append(f"--pack {self.pack} is too small; expected at least 2")
        if self.pack is not None and self.pack > LONGEST:
            faults.append(f"--pack {self.pack} is too large; expected at most {LONGEST}")
        if self.pack is not None and self.max_tokens is not None and self.max_tokens > self.pack:
            faults.append(
                f"--max-tokens {self.max_tokens} is greater than --pack {self.pack}; expected at most {self.pack}"
            )
        if self.fit == "blocks" and self.max_tokens is None:
            faults.append("--fit blocks requires the block size as --max-tokens")
        if self.fit == "blocks" and self.pack is not None:
            faults.append("--fit blocks already makes full rows; remove --pack")
        if not (math.isfinite(self.val_split) and 0 <= self.val_split < 1):
            faults.append(f"--val-split {self.val_split} is not between 0 and 1; 0.1 keeps a tenth for validation")
        if self.val_split and any(source.only_val for source in self.sources):
            faults.append("--val-split and --val-file both select validation data; use only one")
        if self.seed < 0:
            faults.append(f"--seed {self.seed} is negative; expected an integer of at least 0")
        faults += self._source_faults()
        if self.near_dedupe is not None and not 0.5 <= self.near_dedupe <= 1:
            faults.append(f"--near-dedupe {self.near_dedupe} is not between 0.5 and 1; 0.8 is common")
        if self.precedence and not self.removes_duplicates:
            faults.append("precedence requires dedupe or near_dedupe")
        faults += [f"filters: {fault}" for fault in self.filters.faults()]
        if self.shard_tokens < 1:
            faults.append(f"--shard-tokens {self.shard_tokens} is too small; expected at least 1")
        if faults:
            raise UsageError("; ".join(faults))

    def _source_faults(self) -> Iterator[str]:
        names = [source.name for source in self.sources if source.name is not None]
        for name in names:
            if not name or "/" in name or "\\" in name:
                yield f'the source name "{one_line(name)}" is empty or a path; expected a plain name'
        for name in [name for name, count in Counter(names).items() if count > 1]:
            yield f'two sources have the name "{one_line(name)}"; give each its own `name`'
        for name in self.precedence:
            if name not in names:
                known = ", ".join(map(one_line, names)) or "none; give each source a `name`"
                yield f'precedence has the unknown source "{one_line(name)}" (known: {known})'
        yield from _mix_faults(self.sources)
        for number, source in enumerate(self.sources):
            where = f"source {number if source.name is None else one_line(source.name)}"
            yield from (f"{where}: filters: {fault}" for fault in source.filters.faults())
            if source.val_split is None:
                continue
            if source.only_val:
                yield f"{where}: val_split and only_val both select validation data; use only one"
            if not (math.isfinite(source.val_split) and 0 <= source.val_split < 1):
                yield f"{where}: val_split {source.val_split} is not between 0 and 1; 0.1 keeps a tenth for validation"

    @property
    def capacity(self) -> int | None:
        """Maximum length of a fitted row in tokens; None if unlimited."""
        return self.max_tokens if self.max_tokens is not None else self.pack

    @property
    def wants_val(self) -> bool:
        return any(source.only_val or self.val_share(source) > 0 for source in self.sources)

    def val_share(self, source: InputSource) -> float:
        return self.val_split if source.val_split is None else source.val_split

    @property
    def removes_duplicates(self) -> bool:
        return self.dedupe or self.near_dedupe is not None

    def source_name(self, number: int) -> str | None:
        """Return the name of a source; None if there is only one source, or if any source has no name."""
        named = len(self.sources) > 1 and all(source.name is not None for source in self.sources)
        return self.sources[number].name if named else None

    def default_mix(self) -> dict[str, dict[str, float]]:
        """Return the key `mix_epochs` or `mix_sft` of the training config with its value, or an empty dict if no source
        has a weight or epochs.
        """
        named = [(source.name, source) for source in self.sources if source.name is not None and not source.only_val]
        if any(source.epochs is not None for _, source in named):
            return {"mix_epochs": {name: 1.0 if source.epochs is None else source.epochs for name, source in named}}
        weights = {name: source.weight for name, source in named if source.weight is not None}
        return {"mix_sft": weights} if weights else {}

    def named_files(self) -> list[Path]:
        """Return the local files of the tokenizer, format, chat template and exclude list."""
        return existing(self.tokenizer, self.format, self.chat_template, self.exclude)

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON. The user, password and query of URLs are removed, because they may be secret."""
        stored = asdict(self)
        for source in stored["sources"]:
            source["inputs"] = tuple(map(_safe, source["inputs"]))
        return stored | {name: _safe(stored[name]) for name in ("tokenizer", "format", "chat_template", "exclude")}

    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


def _mix_faults(sources: Sequence[InputSource]) -> Iterator[str]:
    trained = [source for source in sources if not source.only_val]
    mixed = [source for source in sources if source.weight is not None or source.epochs is not None]
    if not mixed:
        return
    if len(sources) == 1:
        yield "weight and epochs require several sources, but there is only one; remove weight and epochs"
        return
    if any(source.only_val for source in mixed):
        yield "weight and epochs apply only to training; remove them from sources with only_val"
    weights = [source.weight is not None for source in trained]
    if any(weights) and any(source.epochs is not None for source in trained):
        yield "weight and epochs both set how often a source is used; use only one of them"
    elif any(weights) and not all(weights):
        yield "only some sources have a weight; give every training source a weight, or remove all weights"
    if any(source.name is None for source in sources):
        yield "weight and epochs require source names; give each source a `name`"


def _safe(name: str | None) -> str | None:
    return str(place(name)) if name is not None and isinstance(place(name), Url) else name


def existing(*names: str | None) -> list[Path]:
    """Return the names that are paths of existing files or folders, and omit built-in names such as `bytes`."""
    return [Path(name) for name in names if name is not None and os.path.exists(name)]  # noqa: PTH110
