"""The string functions that a recorded trace of a chat template can call, by name. The functions have no side effects.

The process that runs a template records a trace as plain data; the renderer replays the trace in another process. A
trace can call only the functions in `STEP_FUNCTIONS`.
"""

from __future__ import annotations

import json
import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

Range = tuple[int, int]


class Kind(IntEnum):
    """The type of the arguments or of the result of a function that a trace calls."""

    TEXT = 0
    PARTS = 1
    """A list of texts, as returned by `split`."""
    CUTS = 2
    """The result of `cut_pattern`."""


class StepFunction(NamedTuple):
    call: Callable[..., Any]
    takes: Kind = Kind.TEXT
    gives: Kind | None = None
    """The type of the result, or None for functions that only guards use."""
    growth: int = 1
    """Maximum number of output characters per input character."""


def fill_pattern(*args: Any) -> str:
    """Replace each None in a sequence of strings, which is the last argument, by the next of the other arguments, and
    join the strings.
    """
    *values, pattern = args
    given = iter(values)
    return "".join([next(given) if literal is None else literal for literal in pattern])


def cut_ranges(lengths: Sequence[int], ranges: Sequence[Range]) -> list[list[tuple[int, int, int]]]:
    """Return, for each range of characters in a text of several pieces, the slices of the pieces inside the range as
    (index of the piece, start, stop).
    """
    starts = [*accumulate(lengths, initial=0)]
    cuts = []
    for start, stop in ranges:
        inside = []
        at = max(0, bisect_right(starts, start) - 1)
        while at < len(lengths) and starts[at] < stop:
            first, last = max(start - starts[at], 0), min(stop - starts[at], lengths[at])
            if first < last:
                inside.append((at, first, last))
            at += 1
        cuts.append(inside)
    return cuts


def cut_pattern(*args: Any) -> tuple[Any, ...]:
    """Apply a string method that returns one or more slices, such as `strip` or `split`, to a text that consists of
    several pieces.

    The first returned tuple contains the pieces of each slice as (index of the piece, literal), where the literal is
    None for a piece of message text. The second returned tuple contains the texts of these pieces of message text.
    `count` is the expected number of slices; if the actual number differs, both tuples are empty.
    """
    *values, name, method_args, pattern, count = args
    given = iter(values)
    parts = [next(given) if literal is None else literal for literal in pattern]
    ranges = RANGES[name]("".join(parts), *method_args)
    if len(ranges) != count:
        return (), ()
    cuts = [
        [(at, parts[at][start:stop]) for at, start, stop in inside]
        for inside in cut_ranges([len(part) for part in parts], ranges)
    ]
    shape = tuple(tuple((at, None if pattern[at] is None else text) for at, text in inside) for inside in cuts)
    return shape, tuple(text for inside in cuts for at, text in inside if pattern[at] is None)


def begins_with(*args: Any) -> bool:
    """Whether the concatenation of one sequence of strings starts with the concatenation of another.

    The last two arguments are sequences of strings, in which each None is replaced by one of the other arguments, in
    order. For speed, only as much of the first sequence is concatenated as the comparison needs.
    """
    *values, pattern, other = args
    given = iter(values)
    prefix = fill_pattern(*values[pattern.count(None) :], other)
    missing = len(prefix)
    head: list[str] = []
    for part in pattern:
        text = (str(next(given)) if part is None else part)[:missing]
        head.append(text)
        missing -= len(text)
        if missing <= 0:
            break
    return "".join(head) == prefix


def escape_json(text: str, ensure_ascii: bool) -> str:
    """Escape a string for use inside a JSON string."""
    return json.dumps(text, ensure_ascii=ensure_ascii)[1:-1]


def escape_html(text: str) -> str:
    """Escape a string like Jinja's filter `escape`."""
    for character, name in (("&", "&amp;"), (">", "&gt;"), ("<", "&lt;"), ("'", "&#39;"), ('"', "&#34;")):
        text = text.replace(character, name)
    return text


def _cut_text(cuts: tuple[Any, ...], number: int) -> str:
    return str(cuts[1][number])


def _shape(cuts: tuple[Any, ...]) -> Any:
    return cuts[0]


def _none_empty(*texts: str) -> bool:
    return all(texts)


def _is_blank(text: str) -> bool:
    return not text.strip()


def _has_index(text: str, at: int) -> bool:
    return -len(text) <= at < len(text)


def _sliced(text: str, start: int | None, stop: int | None) -> str:
    return text[start:stop]


def _compare_length(compare: Callable[[int, int], bool]) -> Callable[[Any, int], bool]:
    return lambda value, number: compare(len(value), number)


MAPPED = ("lower", "upper", "capitalize", "title", "swapcase", "casefold")
STRIPPED = ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix")
SPLIT = ("split", "rsplit", "splitlines", "partition", "rpartition")
OBSERVED = (
    *("startswith", "endswith", "find", "rfind", "index", "rindex", "count"),
    *(name for name in dir(str) if name.startswith("is")),
)
ORDERED = ("lt", "le", "gt", "ge")
LENGTHS = {name: f"length_{name}" for name in ("eq", "ne", "lt", "lteq", "gt", "gteq")}
"""Step functions that compare a length with a number, keyed by Jinja's comparison operator."""

STEP_FUNCTIONS: dict[str, StepFunction] = {
    # Functions that map texts to one text.
    "fill_pattern": StepFunction(fill_pattern, gives=Kind.TEXT),
    **{name: StepFunction(getattr(str, name), gives=Kind.TEXT, growth=3) for name in MAPPED},
    **{name: StepFunction(getattr(str, name), gives=Kind.TEXT) for name in STRIPPED},
    "sliced": StepFunction(_sliced, gives=Kind.TEXT),
    "at": StepFunction(operator.getitem, gives=Kind.TEXT),
    "escape_json": StepFunction(escape_json, gives=Kind.TEXT, growth=12),
    "escape_html": StepFunction(escape_html, gives=Kind.TEXT, growth=5),
    # Functions that split a text, and a function that selects one of the results.
    **{name: StepFunction(getattr(str, name), gives=Kind.PARTS) for name in SPLIT},
    "part": StepFunction(operator.getitem, Kind.PARTS, Kind.TEXT),
    "cut_pattern": StepFunction(cut_pattern, gives=Kind.CUTS),
    "cut_text": StepFunction(_cut_text, Kind.CUTS, Kind.TEXT),
    # Functions for the conditions that a template tests; these conditions become guards.
    **{name: StepFunction(getattr(str, name)) for name in OBSERVED},
    **{name: StepFunction(getattr(operator, name)) for name in ("eq", *ORDERED, "contains")},
    **{
        function: StepFunction(_compare_length(getattr(operator, name.replace("teq", "e"))))
        for name, function in LENGTHS.items()
    },
    "bool": StepFunction(bool),
    "len": StepFunction(len),
    "has_index": StepFunction(_has_index),
    "is_blank": StepFunction(_is_blank),
    "none_empty": StepFunction(_none_empty),
    "begins_with": StepFunction(begins_with),
    "num_parts": StepFunction(len, Kind.PARTS),
    "shape": StepFunction(_shape, Kind.CUTS),
}


# The following functions return the character ranges of a string method's results.


def _stripped(text: str, chars: str | None = None, *, left: bool = True, right: bool = True) -> list[Range]:
    start = len(text) - len(text.lstrip(chars)) if left else 0
    stop = len(text.rstrip(chars)) if right else len(text)
    return [(start, max(start, stop))]


def _consecutive(text: str, parts: Sequence[str], gap: int | None) -> list[Range]:
    """Return the character range of each of the given parts of a text, in order. Consecutive parts are separated by
    `gap` characters, or by any number of characters if `gap` is None.
    """
    ranges, at = [], 0
    for part in parts:
        start = text.index(part, at) if gap is None else at
        ranges.append((start, start + len(part)))
        at = start + len(part) + (gap or 0)
    return ranges


def _split(method: str) -> Callable[..., list[Range]]:
    def ranges(text: str, sep: str | None, maxsplit: int) -> list[Range]:
        return _consecutive(text, getattr(text, method)(sep, maxsplit), None if sep is None else len(sep))

    return ranges


def _lines(text: str, keepends: bool) -> list[Range]:
    whole = _consecutive(text, text.splitlines(True), 0)
    return [(start, start + len(line)) for (start, _), line in zip(whole, text.splitlines(keepends), strict=True)]


def _slice_range(text: str, start: int | None, stop: int | None) -> list[Range]:
    first, last, _ = slice(start, stop).indices(len(text))
    return [(first, max(first, last))]


RANGES: dict[str, Callable[..., list[Range]]] = {
    "strip": _stripped,
    "lstrip": lambda text, chars=None: _stripped(text, chars, right=False),
    "rstrip": lambda text, chars=None: _stripped(text, chars, left=False),
    "removeprefix": lambda text, prefix: [(len(prefix) if text.startswith(prefix) else 0, len(text))],
    "removesuffix": lambda text, suffix: [(0, len(text.removesuffix(suffix)))],
    "split": _split("split"),
    "rsplit": _split("rsplit"),
    "splitlines": _lines,
    "partition": lambda text, sep: _consecutive(text, text.partition(sep), 0),
    "rpartition": lambda text, sep: _consecutive(text, text.rpartition(sep), 0),
    "sliced": _slice_range,
    "at": lambda text, at: [(at % len(text), at % len(text) + 1)],
}
