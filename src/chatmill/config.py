"""Config classes: each key is declared once, with its default, its help text and a check of its value.

    @dataclass(frozen=True, kw_only=True)
    class LoadConfig(Config):
        batch_size: int = key(8, "rows per optimizer step", integer(1))

Config files, environment variables, command-line flags and help texts all use these declarations. Config classes are
plain dataclasses, because msgspec is often not installed in container images for training.
"""

from __future__ import annotations

import errno
import json
import sys
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.plain_file import local_path

INHERITS = "inherits"
SYSTEM_FAILURES = (errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
LONGEST = 1 << 31
"""The largest count that a config accepts."""
LARGEST = sys.float_info.max
"""The largest number that a config accepts; infinity and integers too large for a float are rejected."""

NO_FLAG = ""
"""The `flag` of a key that only files can set."""

T = TypeVar("T")


# Checks.


@dataclass(frozen=True)
class ValueCheck:
    """A check of a config value: a predicate, and a description of valid values for error messages."""

    expected: str
    accepts: Callable[[Any], bool]
    fault: Callable[[Any], str | None] = lambda value: None
    """Returns a description of the error in a rejected value, or None if `expected` is description enough."""


def integer(least: int, most: int | None = None) -> ValueCheck:
    """Return a check that accepts integers from `least` to `most`; the default of `most` is `LONGEST`."""
    limit = LONGEST if most is None else most
    expected = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    return ValueCheck(expected, lambda value: type(value) is int and least <= value <= limit)


def number(least: float) -> ValueCheck:
    """Return a check that accepts finite numbers greater than or equal to `least`."""
    return ValueCheck(f"a number of at least {least:g}", lambda value: _is_number(value) and least <= value <= LARGEST)


def one_of(*options: str) -> ValueCheck:
    return ValueCheck(" or ".join(f'"{option}"' for option in options), lambda value: value in options)


def named(what: str) -> ValueCheck:
    """Return a check that accepts non-empty strings, such as the name of a file or folder."""
    return ValueCheck(f"the name of a {what}", lambda value: isinstance(value, str) and value != "")


def optional(check: ValueCheck) -> ValueCheck:
    """Return a check that accepts None and every value that `check` accepts."""
    return ValueCheck(f"{check.expected}, or null", lambda value: value is None or check.accepts(value), check.fault)


SHARE = ValueCheck(
    "a fraction from 0 to 1, such as 0.03 for 3 percent", lambda value: _is_number(value) and 0 <= value <= 1
)
BELOW_ONE = ValueCheck("a number of at least 0 and below 1", lambda value: _is_number(value) and 0 <= value < 1)
SWITCH = ValueCheck("true or false", lambda value: type(value) is bool)
_OF_TYPE = {
    bool: SWITCH,
    int: ValueCheck("an integer", lambda value: type(value) is int),
    float: ValueCheck("a number", lambda value: _is_number(value) and abs(value) <= LARGEST),
    str: ValueCheck("a non-empty string", lambda value: isinstance(value, str) and value != ""),
}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _check_of(hint: Any) -> ValueCheck:
    """Return the check for a type hint, which can be a basic type, a Literal or a list of strings, each optionally
    combined with None.
    """
    if get_origin(hint) in (Union, types.UnionType):
        [present] = [option for option in get_args(hint) if option is not type(None)]
        return optional(_check_of(present))
    if get_origin(hint) is Literal:
        return one_of(*get_args(hint))
    if hint in _OF_TYPE:
        return _OF_TYPE[hint]
    texts = _OF_TYPE[str]
    return ValueCheck(
        "a list of strings", lambda value: isinstance(value, list | tuple) and all(map(texts.accepts, value))
    )


# Declarations.


class Key(NamedTuple):
    name: str
    type: Any
    default: Any
    help: str
    check: ValueCheck
    flag: str | None
    """Command-line flag, if it differs from the name of the key; `NO_FLAG` for a key without a flag."""
    variable: str | None
    """Environment variable that sets the key."""
    metavar: str | None
    """Placeholder for the value in the help of a command."""


def key(
    default: T,
    help: str,
    check: ValueCheck | None = None,
    *,
    flag: str | None = None,
    variable: str | None = None,
    metavar: str | None = None,
) -> T:
    """Declare a config key; without `check`, the key accepts every value of its type."""
    about = {"help": help, "check": check, "flag": flag, "variable": variable, "metavar": metavar}
    return field(default=default, metadata=about)


def required(help: str, check: ValueCheck | None = None) -> Any:
    """Declare a config key that has no default, so that a value must be given."""
    return key(MISSING, help, check)


_declared: dict[Any, Mapping[str, Key]] = {}


def keys_of(config: type[Any]) -> Mapping[str, Key]:
    """Return the keys that a config class declares, by name and in order of declaration."""
    if config not in _declared:
        _declared[config] = types.MappingProxyType(_read_keys(config))
    return _declared[config]


def _read_keys(config: type[Any]) -> dict[str, Key]:
    hints = get_type_hints(config)
    keys = {}
    for each in fields(config):
        if "help" in each.metadata:
            about = {**each.metadata, "check": each.metadata["check"] or _check_of(hints[each.name])}
            keys[each.name] = Key(each.name, hints[each.name], each.default, **about)
    return keys


class Misfit(NamedTuple):
    """An invalid value of a config key."""

    name: str
    value: Any
    expected: str
    fault: str | None = None
    """What is wrong with the value, such as the name of an unknown key in it."""

    def __str__(self) -> str:
        fault = "" if self.fault is None else f", {self.fault}"
        return f"{self.name} is {_shown(self.value)}{fault}; expected {self.expected}"


def misfits(keys: Mapping[str, Key], values: Mapping[str, Any]) -> list[Misfit]:
    """Return the invalid values among the given config values."""
    return [
        Misfit(name, value, keys[name].check.expected, keys[name].check.fault(value))
        for name, value in values.items()
        if name in keys and not keys[name].check.accepts(value)
    ]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base class of config classes, whose fields are declared with `key`. If values are invalid, one `UsageError` lists
    all of them.
    """

    def __post_init__(self) -> None:
        if faults := [str(each) for each in misfits(keys_of(type(self)), vars(self))] or list(self.conflicts()):
            raise UsageError("; ".join(faults))

    def conflicts(self) -> Iterator[str]:
        """Yield error messages for values that are valid separately but not in combination."""
        yield from ()

    def to_json(self) -> dict[str, Any]:
        """Return all keys and values as a dictionary of JSON types."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, place: str = "the config") -> Self:
        """Build a config from the given values, with defaults for all other keys. If keys or values are invalid, one
        error lists all of them.
        """
        keys = keys_of(cls)
        unknown = [f'unknown key "{one_line(str(name))}"' for name in values if name not in keys]
        hint = f" (known: {', '.join(sorted(keys))})" if unknown else ""
        if faults := [*unknown, *map(str, misfits(keys, values))]:
            raise UsageError(f"{place}: {'; '.join(faults)}{hint}")
        try:
            return cls(**values)
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from None

    @classmethod
    def from_file(cls, path: str | Path, **changes: Any) -> Self:
        """Read a config from a JSON file and the files that it inherits from; `changes` override their values."""
        return cls.from_mapping({**read_values(Path(path)), **changes}, place=str(path))

    @classmethod
    def of_run(cls, path: str | Path, **changes: Any) -> Self:
        """Like `from_file`, but ignore keys in the files that this config class does not declare."""
        values = {name: value for name, value in read_values(Path(path)).items() if name in keys_of(cls)}
        return cls.from_mapping({**values, **changes}, place=str(path))


def _shown(value: Any) -> str:
    try:
        return one_line(json.dumps(value))
    except (TypeError, ValueError):
        return one_line(str(value))


def from_environment(config: type[Config], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the config values that are set by environment variables; a boolean variable is 0 or 1."""
    values: dict[str, Any] = {}
    faults = []
    for key in keys_of(config).values():
        if key.variable is None or not (text := environment.get(key.variable)):
            continue
        switch = key.check.accepts(True)
        try:
            values[key.name] = {"0": False, "1": True}[text] if switch else float(text)
        except (KeyError, ValueError):
            expected = "0 or 1" if switch else key.check.expected.removesuffix(", or null")
            faults.append(f"{key.variable} is {one_line(text)}; expected {expected}")
    if faults:
        raise UsageError("; ".join(faults))
    return values


def from_flags(config: type[Config], flags: Mapping[str, str]) -> dict[str, Any]:
    """Parse the value of each flag as JSON; keep it as a string if it is not valid JSON or if the key accepts only
    strings.
    """
    keys = keys_of(config)
    values = {name: _flag_value(text, keys[name].check) for name, text in flags.items()}
    if faults := misfits(keys, values):
        faults = [each._replace(fault=each.fault or _json_fault(each.value)) for each in faults]
        raise UsageError(f"the flags: {'; '.join(map(str, faults))}")
    return values


def flag_spellings(name: str) -> list[str]:
    """Return the command-line flags for a config key, such as `--max_iters` and `--max-iters`."""
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def _flag_value(text: str, check: ValueCheck) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if check.accepts(value) or not check.accepts(text) else text


def _json_fault(value: Any) -> str | None:
    """Return a message if a flag's value is an object or a list that is not valid JSON."""
    is_nested = isinstance(value, str) and value.lstrip()[:1] in ("{", "[")
    return "which is not valid JSON" if is_nested else None


# Files.


def read_toml(path: Path, *, what: str, name: str = "", error: type[ChatmillError] = DataError) -> dict[str, Any]:
    """Read a TOML file. Error messages refer to the file as `name`. If the file cannot be read, the error message ends
    with `what`.
    """
    name = name or str(path)
    try:
        table = tomllib.loads(local_path(path).read_text("utf-8"))
        # Reject values that a later error message could not print: very long integers and deeply nested tables.
        repr(table)
        return table
    except OSError as reason:
        raise error(f"{name}: cannot be read ({reason.strerror}); {what}") from None
    except (ValueError, RecursionError) as reason:
        raise error(f"{name}: not valid TOML: {one_line(str(reason))}") from None


def read_values(path: Path, heirs: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read the config values in a JSON file and in the files that it inherits from; values in the file override
    inherited values.

    `heirs` lists the files that inherit from this file, directly or indirectly, starting with the file that was read
    first. Raise `UsageError` if a file inherits from itself.
    """
    # Read the file before resolving its path, so that the error for a circular symbolic link names the link.
    table = _read_json(path)
    if path.resolve() in [heir.resolve() for heir in heirs]:
        circle = " -> ".join(map(str, [*heirs, path]))
        raise UsageError(f"{heirs[0]}: inherits from itself ({circle}); expected a chain without cycles")
    parent = table.pop(INHERITS, None)
    return table if parent is None else {**read_values(_parent_path(parent, path), (*heirs, path)), **table}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(local_path(path).read_bytes(), object_pairs_hook=lambda pairs: _unique(path, pairs))
    except OSError as error:
        # Do not report a system failure, such as a lack of memory, as a usage error.
        kind = DataError if error.errno in SYSTEM_FAILURES else UsageError
        raise kind(f"{path}: cannot be read ({error.strerror}); expected a JSON file of settings") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {one_line(str(error))}; expected a JSON object of settings") from None
    if not isinstance(table, dict):
        raise UsageError(f"{path}: is not a JSON object; expected an object of settings")
    return table


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise UsageError(f'{path}: "{one_line(twice)}" is given twice; expected each key once')
    return table


def _parent_path(parent: Any, child: Path) -> Path:
    """Return the path of an inherited file, which is searched for in the current folder and then in the folder of
    `child`.
    """
    if not isinstance(parent, str) or not parent:
        raise UsageError(f'{child}: "{INHERITS}" is {_shown(parent)}; expected the name of a file')
    places = [local_path(parent), child.parent / parent]
    for place in places:
        if place.is_file():
            return place
    looked = " or ".join(dict.fromkeys(str(place) for place in places))
    raise UsageError(f'{child}: inherits "{one_line(parent)}", which was not found; expected {looked}')
