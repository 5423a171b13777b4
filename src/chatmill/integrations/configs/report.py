"""Convert the config of another trainer to chatmill's config keys, and report what happened to each key."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from chatmill.config import keys_of
from chatmill.errors import DataError, one_line
from chatmill.prepare.job import InputSource, Job
from chatmill.train.config import TrainConfig

Status = Literal["taken", "default", "none", "unknown"]
STATUSES: tuple[Status, ...] = get_args(Status)
OFF: tuple[Any, ...] = (None, False, 0, "", [], {}, "none", "None")
"""Values that turn a feature off."""
UNSET = "not set"
HIDDEN = "(hidden)"
_KEYS = {config: keys_of(config) for config in (Job, InputSource, TrainConfig)}
_SECRET = re.compile("api_key|hub_token|secret|password|webhook", re.IGNORECASE)
_USER = re.compile("//[^/@\\s]*@")
IS_OFF = "this feature is also off in chatmill"


@dataclass(frozen=True)
class KeyResult:
    """How one key of an imported config was converted."""

    key: str
    """The path of the key in the imported config, such as `datasets[0].type`."""
    value: Any
    status: Status
    ours: Mapping[str, Any] = field(default_factory=dict)
    """The chatmill keys that the imported key sets."""
    note: str = ""
    """A note for the report, such as the effect of the imported key."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _without_secrets(self.key, self.value))

    def __str__(self) -> str:
        """Format the result as `key: value -> chatmill keys; note`."""
        line = f"{self.key}: {shown(self.value)}"
        if self.ours:
            line += " -> " + ", ".join(f"{name} {shown(value)}" for name, value in self.ours.items())
        return f"{line}; {self.note}" if self.note else line


@dataclass(frozen=True)
class Assumption:
    """Values of chatmill keys that the imported config does not set, such as defaults of the other trainer."""

    ours: Mapping[str, Any]
    note: str

    def __str__(self) -> str:
        values = ", ".join(f"{name} {shown(value)}" for name, value in self.ours.items())
        return f"{values}: {self.note}" if values else self.note


def shown(value: Any, longest: int = 80) -> str:
    """Format a value as one line of JSON, shortened to `longest` characters; a plain string is not quoted."""
    if isinstance(value, str) and value and value == value.strip() and "\n" not in value:
        return one_line(value, longest)
    return one_line(json.dumps(value, ensure_ascii=False, default=str), longest)


def _without_secrets(key: str, value: Any) -> Any:
    """Return a config value with API keys hidden, and without user names and passwords in URLs."""
    if value in OFF or isinstance(value, bool):
        return value
    if _SECRET.search(key):
        return HIDDEN
    if isinstance(value, dict):
        return {name: _without_secrets(str(name), each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets("", each) for each in value]
    return _USER.sub("//", value) if isinstance(value, str) else value


class TheirKeys:
    """A mapping in the imported config. Reading a key removes it from the mapping; `left` lists the keys that were not
    read.
    """

    def __init__(self, values: Mapping[Any, Any], translation: Translation, prefix: str = "") -> None:
        self._values = {str(name): value for name, value in values.items()}
        self._translation = translation
        self._prefix = prefix
        self.taken_out: dict[str, Any] = {}
        """Values of the keys that were read, by key path."""
        translation.tables.append(self)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def left(self) -> Sequence[str]:
        return list(self._values)

    def path(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def peek(self, name: str) -> Any:
        return self._values.get(name)

    def pop(self, name: str) -> Any:
        """Remove a key and return its value; if the value is null, report the key as not set."""
        if name not in self._values:
            return None
        value = self.taken_out[self.path(name)] = self._values.pop(name)
        if value is None:
            self._translation.default(self.path(name), None, note=UNSET)
        return value

    def number(self, name: str, *, least: float | None = 0, most: float = 1e300) -> float | None:
        """Remove a key and return its value as a number; strings such as "2e-4" are converted."""
        value = self.pop(name)
        if value is None:
            return None
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                return self._wrong(name, value, "a number")
        if type(value) not in (int, float) or not math.isfinite(value):
            return self._wrong(name, value, "a number")
        if (least is not None and value < least) or value > most:
            return self._wrong(name, value, f"a number of at least {least:g}" if value <= most else "a smaller number")
        return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(value)

    def integer(self, name: str, *, least: int = 0, most: int = 2**31) -> int | None:
        value = self.number(name, least=least, most=most)
        if value is None or isinstance(value, int):
            return value
        return self._wrong(name, value, "an integer")

    def switch(self, name: str) -> bool | None:
        value = self.pop(name)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        return value if value is None or type(value) is bool else self._wrong(name, value, "true or false")

    def text(self, name: str) -> str | None:
        value = self.pop(name)
        return (
            value
            if value is None or (isinstance(value, str) and value)
            else self._wrong(name, value, "a non-empty string")
        )

    def text_or_no(self, name: str) -> str | None:
        """Remove a key and return its string value. For the value false, return "no", because YAML parses an unquoted
        `no` as false.
        """
        value = self.pop(name)
        value = "no" if value is False else value
        return (
            value
            if value is None or (isinstance(value, str) and value)
            else self._wrong(name, value, "a non-empty string")
        )

    def texts(self, name: str, *, separator: str | None = None) -> list[str] | None:
        """Remove a key and return its value as a list of strings; a single string is split at `separator`."""
        value = self.pop(name)
        if isinstance(value, str):
            value = [part.strip() for part in value.split(separator)] if separator else [value]
        if value is None or (isinstance(value, list) and all(isinstance(each, str) and each for each in value)):
            return value
        return self._wrong(name, value, "a string or a list of strings")

    def table(self, name: str) -> dict[str, Any] | None:
        value = self.pop(name)
        return value if value is None or isinstance(value, dict) else self._wrong(name, value, "a table")

    def tables(self, name: str) -> list[dict[str, Any]] | None:
        value = self.pop(name)
        if value is None or (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
            return value
        return self._wrong(name, value, "a list of tables")

    def _wrong(self, name: str, value: Any, expected: str) -> Any:
        self._translation.faults.append(f"{self.path(name)} is {shown(value)}; expected {expected}")
        self._translation.none(self.path(name), value, "chatmill does not understand this value")
        return None


class Translation:
    """Collects the result of converting another trainer's config: a recipe, a train config and a report."""

    def __init__(self, trainer: str, place: str, *, ranks: int | None = None, model: str | None = None) -> None:
        self.trainer, self.place, self.ranks, self.model = trainer, place, ranks, model
        self.recipe: dict[str, Any] = {}
        self.sources: list[dict[str, Any]] = []
        self.train: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        """The imported key or assumption that sets each chatmill key, such as `format` or `sources[0].inputs`."""
        self.results: list[KeyResult] = []
        self.assumptions: list[Assumption] = []
        self.faults: list[str] = []
        """Error messages about wrong types and unsupported settings."""
        self.chat_template: str | None = None
        """The chat template to write next to the recipe, or None."""
        self.downloads: list[str] = []
        """Commands that download models from the Hub."""
        self.run_name: str | None = None
        self.tables: list[TheirKeys] = []

    def take(
        self,
        key: str,
        value: Any,
        *,
        recipe: Mapping[str, Any] | None = None,
        train: Mapping[str, Any] | None = None,
        source: tuple[int, Mapping[str, Any]] | None = None,
        other: Mapping[str, Any] | None = None,
        note: str = "",
    ) -> None:
        """Add the values in `recipe`, `train` and `source` to the converted config, and report that the imported key
        sets these values and those in `other`.
        """
        ours = {**(recipe or {}), **(train or {}), **(other or {})}
        origin = f"{key}: {shown(value, 60)}"
        self.recipe.update(recipe or {})
        self.train.update(train or {})
        self.origins.update(dict.fromkeys(ours, origin))
        if source is not None:
            number, values = source
            self.sources[number].update(values)
            self.origins.update({f"sources[{number}].{name}": origin for name in values})
            ours.update(values)
        is_default = not other and all(
            [
                *(_same(each, _default(Job, name)) for name, each in (recipe or {}).items()),
                *(_same(each, _default(TrainConfig, name)) for name, each in (train or {}).items()),
                *(_same(each, _default(InputSource, name)) for name, each in (source[1] if source else {}).items()),
            ]
        )
        self.results.append(KeyResult(key, value, "default" if is_default else "taken", ours, note))

    def default(self, key: str, value: Any, *, note: str) -> None:
        """Report that an imported key requires no change to chatmill's defaults."""
        self.results.append(KeyResult(key, value, "default", {}, note))

    def none(self, key: str, value: Any, note: str) -> None:
        """Report an imported key that has no counterpart in chatmill; `note` explains what this means for the run."""
        self.results.append(KeyResult(key, value, "none", {}, note))

    def refuse(self, key: str, value: Any, reason: str) -> None:
        """Report a value that chatmill does not support, and record an error, so that the import fails."""
        self.faults.append(f"{key}: {shown(value)}: refused, {reason}")
        self.results.append(KeyResult(key, value, "none", {}, f"refused, {reason}"))

    def assume(
        self, note: str, *, recipe: Mapping[str, Any] | None = None, train: Mapping[str, Any] | None = None
    ) -> None:
        """Set chatmill keys for which the imported config has no value, and report `note` as the reason."""
        ours = {**(recipe or {}), **(train or {})}
        self.recipe.update(recipe or {})
        self.train.update(train or {})
        self.origins.update(dict.fromkeys(ours, note))
        self.assumptions.append(Assumption(ours, note))

    def close(self, keys: TheirKeys, notes: Mapping[str, str], *, off: Mapping[str, Any] | None = None) -> None:
        """Report the keys that were not read; a key that is not in `notes` is reported as unknown."""
        for name in keys.left:
            if name not in notes:
                value = keys.peek(name)
                keys.pop(name) if value is not None else None
                self.results.append(KeyResult(keys.path(name), value, "unknown"))
            elif (value := keys.pop(name)) is not None:
                is_off = any(_same(value, each) for each in OFF) or _same(value, (off or {}).get(name, UNSET))
                if is_off:
                    self.default(keys.path(name), value, note=IS_OFF)
                else:
                    self.none(keys.path(name), value, notes[name])

    def settle(self) -> None:
        """Report all imported keys that have not been reported yet."""
        reported = {part for each in self.results for part in _paths(each.key)}
        # Start with nested tables, because a report on a nested key also covers the tables that contain it.
        for table in reversed(self.tables):
            unread = {table.path(name): table.peek(name) for name in table.left}
            for path, value in {**table.taken_out, **unread}.items():
                if path in reported:
                    continue
                if any(_same(value, each) for each in OFF):
                    self.default(path, value, note="the value is empty or turns the feature off")
                else:
                    self.none(path, value, "this key has no effect in combination with the other keys")
                reported.update(_paths(path))

    def check(self) -> None:
        if self.faults:
            raise DataError(f"{self.place}: " + "; ".join(self.faults))

    def ordered(self, order: Iterable[str]) -> list[KeyResult]:
        rank = {name: number for number, name in enumerate(order)}
        return sorted(self.results, key=lambda result: rank.get(result.key.split("[")[0].split(".")[0], len(rank)))


def _paths(key: str) -> list[str]:
    """Return the path of a key and the paths of its parents: `a[0].b` -> `a[0].b`, `a[0]`, `a`."""
    return [key, *(key[: match.start()] for match in re.finditer(r"[.\[]", key))]


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal; unlike in Python, False does not equal 0, and True does not equal 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _default(config: type[Any], name: str) -> Any:
    default = _KEYS[config][name].default
    return list(default) if isinstance(default, tuple) else default
