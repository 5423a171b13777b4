"""Job: everything that determines the bytes of a dataset."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from chatmill.errors import UsageError, one_line
from chatmill.format import Mask
from chatmill.rows import TrainOn

Fit = Literal["turns", "tail", "windows", "drop", "error", "blocks"]
FITS: tuple[str, ...] = get_args(Fit)
SplitBy = Literal["hash", "shuffle"]
SHARD_TOKENS = 2**24
LONGEST = 2**31
"""No row is longer."""


@dataclass(frozen=True)
class InputSource:
    """Files that are read alike. All of them go to `val` if `only_val`, whatever the split."""

    inputs: tuple[str, ...]
    shape: str | None = None
    name: str | None = None
    train_on: TrainOn | None = None
    """Whose turns are trained in these files, if not as the job says."""
    only_val: bool = False


@dataclass(frozen=True)
class Job:
    sources: tuple[InputSource, ...]
    tokenizer: str = "bytes"
    format: str = "chatml"
    add_tokens: bool = False
    chat_template: str | None = None
    """A Jinja file, for the format `template`, that goes before the one of the tokenizer's folder."""
    template_args: tuple[str, ...] = ()
    """What a chat template is given besides the conversation, as `name=value`."""
    template_date: str | None = None
    """The day that a chat template is told, if it asks; None is the day of the build."""
    mask: Mask = "derived"
    """Under a chat template: trained is what is derived to be, or what its generation tags say."""
    train_on: TrainOn = "assistant"
    max_tokens: int | None = None
    fit: Fit = "turns"
    require_terminators: bool = False
    pack: int | None = None
    val_split: float = 0.0
    split: SplitBy = "hash"
    seed: int = 42
    shard_tokens: int = SHARD_TOKENS
    dedupe: bool = False
    on_error: Literal["stop", "skip"] = "stop"

    def check(self) -> None:
        """Raise `UsageError` with everything that cannot be meant, in one line."""
        faults = []
        if not any(source.inputs for source in self.sources):
            faults.append("no input")
        if self.fit not in FITS:
            faults.append(f'--fit "{self.fit}" is none of {", ".join(FITS)}')
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
