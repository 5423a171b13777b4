"""The configuration of a run: documented keys with their defaults, read from JSON files that may inherit.

A key says its own meaning and what is right for it, so that one validator serves every configuration, and
a subclass adds keys by declaring them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar

from chatmill.errors import UsageError, one_line

INHERITS = "inherits"
LONGEST = 1 << 31
"""No count in a configuration is larger."""
LARGEST = sys.float_info.max
"""No number is: neither infinity nor an integer that is no float."""

T = TypeVar("T")


@dataclass(frozen=True)
class Right:
    """What is right for a key, in words and as a check."""

    words: str
    fits: Callable[[Any], bool]


def whole(least: int, most: int = LONGEST) -> Right:
    words = f"a whole number from {least} on" if most == LONGEST else f"a whole number from {least} to {most}"
    return Right(words, lambda value: type(value) is int and least <= value <= most)


def number(least: float, most: float = LARGEST) -> Right:
    words = f"a number from {least:g} on" if most == LARGEST else f"a number from {least:g} to {most:g}"
    return Right(words, lambda value: type(value) in (int, float) and least <= value <= most)


def flag() -> Right:
    return Right("true or false", lambda value: type(value) is bool)


def text() -> Right:
    return Right("a text", lambda value: isinstance(value, str) and value != "")


def one_of(*options: str) -> Right:
    return Right(" or ".join(f'"{option}"' for option in options), lambda value: value in options)


def optional(right: Right) -> Right:
    return Right(f"{right.words}, or null", lambda value: value is None or right.fits(value))


def key(default: T, doc: str, right: Right) -> T:
    """A key of a configuration: its default, its meaning in a few words, and what is right for it."""
    chosen: T = field(default=default, metadata={"doc": doc, "right": right})
    return chosen


@dataclass(frozen=True, kw_only=True)
class Config:
    """Keys with their meanings. A wrong value is a `UsageError` that names all that is wrong."""

    def __post_init__(self) -> None:
        if faults := faults_of(type(self), vars(self)) or list(self.conflicts()):
            raise UsageError("; ".join(faults))

    def conflicts(self) -> Iterator[str]:
        """What is wrong with keys that are each right by themselves."""
        yield from ()

    def to_json(self) -> dict[str, Any]:
        """Every key with its value, as JSON holds it."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, place: str = "the config") -> Self:
        """A configuration of these values and, for the rest, defaults; all faults are one error."""
        known = {each.name for each in fields(cls)}
        unknown = [f'unknown key "{one_line(str(name))}"' for name in values if name not in known]
        faults = unknown + faults_of(cls, {name: value for name, value in values.items() if name in known})
        hint = f" (known: {', '.join(sorted(known))})" if unknown else ""
        if faults:
            raise UsageError(f"{place}: {'; '.join(faults)}{hint}")
        try:
            return cls(**values)
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from None

    @classmethod
    def from_file(cls, path: str | Path, **changes: Any) -> Self:
        """The configuration of a JSON file and of those it inherits from; `changes` come last."""
        return cls.from_mapping({**read_values(Path(path)), **changes}, place=str(path))

    @classmethod
    def of_run(cls, path: str | Path, **changes: Any) -> Self:
        """The same of a run's file, whose other keys, of the model and its training, are nothing to this."""
        known = {each.name for each in fields(cls)}
        values = {name: value for name, value in read_values(Path(path)).items() if name in known}
        return cls.from_mapping({**values, **changes}, place=str(path))


def faults_of(kind: type[Any], values: Mapping[str, Any]) -> list[str]:
    """One line for each of these values that is not what its key expects."""
    rights = {each.name: each.metadata["right"] for each in fields(kind)}
    return [
        f"{name} is {_shown(value)}; expected {rights[name].words}"
        for name, value in values.items()
        if not rights[name].fits(value)
    ]


def _shown(value: Any) -> str:
    try:
        return one_line(json.dumps(value))
    except (TypeError, ValueError):
        return one_line(str(value))


# Files.


def read_values(path: Path) -> dict[str, Any]:
    """The keys of a file over those of the file it inherits from, and so on; `UsageError` for a circle."""
    chain: list[Path] = []
    tables: list[dict[str, Any]] = []
    at: Path | None = path
    while at is not None:
        # Read before it is resolved: a link to itself is said by name.
        table = _read(at)
        if at.resolve() in (seen.resolve() for seen in chain):
            circle = " -> ".join(str(each) for each in [*chain, at])
            raise UsageError(f"{path}: inherits from itself ({circle}); a chain of files must end")
        chain.append(at)
        parent = table.pop(INHERITS, None)
        tables.append(table)
        at = None if parent is None else _found(parent, at)
    return {name: value for table in reversed(tables) for name, value in table.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_bytes(), object_pairs_hook=lambda pairs: _unrepeated(path, pairs))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); expected a JSON file of settings") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {one_line(str(error))}; expected a JSON object of settings") from None
    if not isinstance(table, dict):
        raise UsageError(f"{path}: holds no JSON object; expected one of settings")
    return table


def _unrepeated(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise UsageError(f'{path}: "{one_line(twice)}" stands there twice; expected each key once')
    return table


def _found(parent: Any, child: Path) -> Path:
    """Where an inherited file lies: from the working directory, else from the folder of the file that names it."""
    if not isinstance(parent, str) or not parent:
        raise UsageError(f'{child}: "{INHERITS}" is {_shown(parent)}; expected the name of a file')
    places = [Path(parent), child.parent / parent]
    for place in places:
        if place.is_file():
            return place
    looked = " and ".join(dict.fromkeys(str(place) for place in places))
    raise UsageError(f'{child}: inherits "{one_line(parent)}", which is neither of {looked}; expected one to be a file')
