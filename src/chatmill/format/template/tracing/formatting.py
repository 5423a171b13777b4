"""A safe implementation of `str.format` and `%` for chat templates, which returns each formatted field separately.

Python's `str.format` can read attributes of its arguments. In a chat template, a format field such as `{name}` can
refer to a value, but cannot access its attributes or items. Widths and precisions are limited to four digits, and
values must be strings, numbers, booleans, None, lists or dicts.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined

from chatmill.format.template.tracing.limits import LimitError

MAX_DIGITS = 4
"""Maximum number of digits in a width or precision."""
_SPEC = re.compile(r"(?:[^{}]?[<>=^])?[-+ ]?[z#]{0,2}(\d*)[,_]?(?:\.(\d+))?[a-zA-Z%]?")
_PERCENT = re.compile(
    r"%(?:\((?P<key>[^()]*)\))?(?P<flags>[-+ #0]*)(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?(?P<type>.?)", re.DOTALL
)
MAX_DEPTH = 100
"""Maximum nesting depth of lists and dicts that are converted to text."""
_SCALARS = (str, int, float, bool, type(None))


def format_fields(pattern: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the pieces of `pattern.format(*args, **kwargs)`: (text, None) for text of the pattern, and (formatted text,
    value) for each field.
    """
    unnamed, has_numbers = 0, False
    for text, name, spec, conversion in string.Formatter().parse(pattern):
        if text:
            yield text, None
        if name is None:
            continue
        if not re.fullmatch(r"\w*", name):
            raise SecurityError(
                f"format field {name!r}: a field can name a value, but cannot access its attributes or items"
            )
        if name and not name.isdecimal():
            value = kwargs[name]
        else:
            has_numbers = has_numbers or bool(name)
            if has_numbers and unnamed + (not name):
                raise ValueError("cannot mix numbered and unnumbered fields")
            value = args[int(name) if name else unnamed]
            unnamed += not name
        yield _field(value, spec or "", conversion), value


def _field(value: Any, spec: str, conversion: str | None) -> str:
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise SecurityError(f"the format spec {spec!r} is not available to templates")
    _check_digits(match[1], match[2])
    check_plain(value)
    if conversion in ("r", "a"):
        value = repr(value) if conversion == "r" else ascii(value)
    elif conversion == "s" or not isinstance(value, _SCALARS):
        if spec and conversion is None:
            raise TypeError(f"unsupported format string passed to {type(value).__name__}.__format__")
        value = str(value)
    return str.__format__(str.__str__(value), spec) if isinstance(value, str) else format(value, spec)


def format_percent(pattern: str, values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the pieces of `pattern % values` in the same form as `format_fields`."""
    given = list(values) if isinstance(values, tuple) else [values]
    used, at = 0, 0
    for match in _PERCENT.finditer(pattern):
        if pattern[at : match.start()]:
            yield pattern[at : match.start()], None
        at = match.end()
        if "*" in (match["width"], match["precision"]):
            raise SecurityError("a width or precision that is an argument of % is not available to templates")
        _check_digits(match["width"], match["precision"])
        if match["type"] == "%":
            yield match[0] % (), None
            continue
        if match["key"] is not None:
            if not isinstance(values, dict):
                raise TypeError("format requires a mapping")
            value, used = values[match["key"]], len(given)
        else:
            if used >= len(given):
                raise TypeError("not enough arguments for format string")
            value, used = given[used], used + 1
        check_plain(value)
        field = "%" + match[0][match[0].index(")") + 1 if match["key"] is not None else 1 :]
        yield str.__str__(field % (value,)), value
    if used < len(given) and not isinstance(values, dict):
        raise TypeError("not all arguments converted during string formatting")
    if pattern[at:]:
        yield pattern[at:], None


def _check_digits(*numbers: str | None) -> None:
    for number in numbers:
        if number and len(number) > MAX_DIGITS:
            raise LimitError(f"the width {number[:20]} has more than {MAX_DIGITS} digits")


def check_plain(value: Any, depth: int = 0) -> None:
    """Raise an error if a value is not plain data. The `str` of a function or generator, for example, is not
    reproducible.
    """
    if isinstance(value, (*_SCALARS, Undefined)):
        return
    if isinstance(value, list | tuple) and depth < MAX_DEPTH:
        for inner in value:
            check_plain(inner, depth + 1)
    elif isinstance(value, dict) and depth < MAX_DEPTH:
        for key, inner in value.items():
            check_plain(key, depth + 1)
            check_plain(inner, depth + 1)
    elif isinstance(value, list | tuple | dict):
        raise LimitError(f"an output value is nested more than {MAX_DEPTH} levels deep")
    else:
        raise SecurityError(f"an output value is a {type(value).__name__}, which is not plain data")
