"""Project settings: `chatmill.toml` in the current folder, read by the commands that build caches and by training.

flags  >  config file  >  chatmill.toml  >  defaults

[tokenizer]
path = "tokenizer.json"
[training]
seed = 42
[model]
T = 1024
[data]
caches.sft_token_cache = "data/cache/sft"
mix_sft = {primer = 0.1, oasst1 = 0.7, dolly15k = 0.2}
primer = {path = "data/primer.jsonl", val_frac = 0.1}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from chatmill.config import BELOW_ONE, LONGEST, SWITCH, ValueCheck, integer, named, read_toml
from chatmill.errors import ChatmillError, UsageError, one_line
from chatmill.load.config import MIX
from chatmill.load.mix import MIX_SFT, shares

FILE = Path("chatmill.toml")
TOKENIZER, ADD_TOKENS = "tokenizer.path", "tokenizer.add_tokens"
SEED, CONTEXT, MIXED = "training.seed", "model.T", "data.mix_sft"
CACHE_ROOT = "data.caches.sft_token_cache"
SOURCES = tuple(MIX_SFT)
"""Sources with their own build command."""
BARE = re.compile(r"[A-Za-z0-9_-]+\Z")


KEYS: Mapping[str, ValueCheck] = {
    TOKENIZER: named("tokenizer"),
    ADD_TOKENS: SWITCH,
    # The seed is used for splits, the order of batches and initial weights, so it must be valid for all of these.
    SEED: integer(0, LONGEST),
    CONTEXT: integer(2, LONGEST),
    CACHE_ROOT: named("folder"),
    MIXED: MIX,
    **{f"data.{source}.path": named("file") for source in SOURCES},
    **{f"data.{source}.val_frac": BELOW_ONE for source in SOURCES},
}
"""The keys of the file by dotted name, with a check for each."""


def read_settings() -> tuple[dict[str, Any], list[str]]:
    """Return a dict of settings, such as `training.seed`, and a list of errors; both are empty without a file."""
    if not FILE.exists():
        return {}, []
    settings, unknown, faults = {}, [], []
    for path, value in _leaves(read_toml(FILE, what="expected a TOML file of settings", error=UsageError)):
        name = _dotted(path)
        if name not in KEYS:
            unknown.append(f'unknown key "{one_line(name)}"')
        elif not KEYS[name].accepts(value):
            faults.append(f"{name} is {one_line(repr(value))}; expected {KEYS[name].expected}")
        else:
            settings[name] = value
    if MIXED in settings:
        try:
            shares(settings[MIXED])
        except ChatmillError as error:
            faults.append(f"data.{error}")
    if unknown:
        faults.append(f"{', '.join(unknown)} (known: {', '.join(sorted(KEYS))})")
    return settings, [f"{FILE}: {fault}" for fault in faults]


def _leaves(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value with its keys. An empty table is also yielded, so that its name is checked."""
    pending: list[tuple[tuple[str, ...], Any]] = [((), table)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict) and (value or not path) and _dotted(path) != MIXED:
            pending += [((*path, name), each) for name, each in reversed(value.items())]
        else:
            yield path, value


def _dotted(path: tuple[str, ...]) -> str:
    """Join names to a TOML key; names with special characters, such as a dot, are quoted."""
    return ".".join(name if BARE.match(name) else f"'{name}'" for name in path)
