"""Settings: what the commands that build caches take from `chatmill.toml` where a flag does not say it.

data.primer.val_frac = 0.2       in the file, or as tables: [data.primer] val_frac = 0.2
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.errors import UsageError, one_line

FILE = Path("chatmill.toml")
SOURCES = ("primer", "oasst1", "dolly15k")
LONGEST = 2**31


class Setting(NamedTuple):
    key: str
    """Where it stands in the file; `{source}` is the name of a source."""
    default: Any
    right: str
    fits: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1


SETTINGS = {
    "path": Setting("data.{source}.path", None, "the name of a file", _is_text),
    "val_frac": Setting("data.{source}.val_frac", 0.1, "a number from 0 to below 1", _is_share),
    "out_dir": Setting("data.caches.sft_token_cache", "data/cache/sft", "the name of a folder", _is_text),
    "seed": Setting("training.seed", 42, "a whole number from 0 on", lambda value: type(value) is int and value >= 0),
    "t_max": Setting(
        "model.T",
        1024,
        f"a whole number from 2 to {LONGEST}",
        lambda value: type(value) is int and 2 <= value <= LONGEST,
    ),
}
DEFAULT_PATHS = {"primer": "data/primer.jsonl"}


@dataclass(frozen=True)
class BuildSettings:
    """All that decides what the cache of a source holds, but for its tokenizer."""

    path: str
    out_dir: Path
    seed: int
    val_frac: float
    t_max: int


def build_settings(source: str, flags: Mapping[str, tuple[str, Any]], *, file: Path = FILE) -> BuildSettings:
    """The settings of a source: a flag wins over the file, the file over the default; all faults are one line.

    `flags` holds for each setting the flag's name and what it was given, None for nothing.
    """
    found, faults = _read(file)
    for name, (flag, value) in flags.items():
        if value is not None and not SETTINGS[name].fits(value):
            faults.append(f"{flag} is {one_line(str(value))}, expected {SETTINGS[name].right}")
    values: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        default = DEFAULT_PATHS.get(source) if name == "path" else setting.default
        given = flags[name][1]
        values[name] = found.get(setting.key.format(source=source), default) if given is None else given
    if values["path"] is None:
        faults.append(f"no input; give {flags['path'][0]}, or data.{source}.path in {file}")
    if faults:
        raise UsageError("; ".join(faults))
    return BuildSettings(
        path=values["path"],
        out_dir=Path(values["out_dir"]),
        seed=values["seed"],
        val_frac=float(values["val_frac"]),
        t_max=values["t_max"],
    )


def _read(file: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings of the file, if there is one, by their dotted keys; and what is wrong with them."""
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError:
        return {}, []
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"{file}: cannot be read ({reason}); expected a TOML file") from None
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{file}: not TOML: {one_line(str(error))}") from None
    known = {setting.key.format(source=source): setting for setting in SETTINGS.values() for source in SOURCES}
    found, faults = {}, []
    for key, value in _flat(data):
        if key not in known:
            faults.append(f'{file}: unknown key "{one_line(key)}" (known: {", ".join(sorted(known))})')
        elif not known[key].fits(value):
            faults.append(f"{file}: {key} is {one_line(repr(value))}, expected {known[key].right}")
        else:
            found[key] = value
    return found, faults


def _flat(table: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no table, by its dotted key; an empty table is a value, so that its name is seen."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
