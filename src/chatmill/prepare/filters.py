"""Filters that decide which records and rendered conversations a job keeps.

User predicates and the filters on turns, text and language are applied to records before rendering. The filters on the
number of tokens and the fraction of trained tokens are applied to rendered rows, before truncation.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from chatmill.config import keys_of
from chatmill.errors import DataError, RecordError, UsageError, one_line
from chatmill.prepare.job import Filters, Job
from chatmill.records import Record
from chatmill.records.record import NO_ROLE
from chatmill.rows import Index

EXCLUDE = "exclude"
"""Name of the filter that removes records whose ids are in the `--exclude` file."""
NAMES = (*keys_of(Filters), EXCLUDE)
"""All filters; the index of a filter is staged with each record that it removes."""
ROW_FILTERS = ("min_tokens", "max_tokens", "min_trained_share", "max_trained_share")
"""Filters that check rendered rows; all other filters check records."""
LANGUAGE_CHARACTERS = 2000
"""Number of characters, from the start of the answers, used to detect the language."""
MATCH_SECONDS = 10.0
"""Time limit in seconds for matching a regular expression against all messages of one record."""

TIME_LIMIT = "time_limit"
"""Error kind of a record for which a regular expression exceeds the time limit."""

RecordTest = Callable[[Record], bool]


def reason(name: str) -> str:
    """Return the name that the ledger and the list of removed records use for a filter."""
    return "excluded" if name == EXCLUDE else f"filter {name}"


def filters_of(job: Job, source: int) -> tuple[Filters, ...]:
    return (job.filters, job.sources[source].filters)


def all_filters(job: Job) -> tuple[Filters, ...]:
    return (job.filters, *(source.filters for source in job.sources))


# Records.


@dataclass(frozen=True)
class Predicate:
    """A user-defined filter function that is allowed to run, and the hash of the file that defines it."""

    name: str
    """As module:function."""
    folder: str
    """Folder to import the module from, in addition to Python's own path."""
    sha256: str


def allowed_predicates(job: Job, allow_code: Sequence[str]) -> tuple[Predicate, ...]:
    """Import the predicates of a job; raise `UsageError` if a predicate is not allowed, or an allowed predicate is not
    used.

    The predicates are imported only if all of them are allowed.
    """
    named = dict.fromkeys(filters.predicate for filters in all_filters(job) if filters.predicate is not None)
    for name in named:
        if name not in allow_code:
            raise UsageError(f"the predicate {one_line(name)} would run code; allow it with --allow-code {name}")
    for name in allow_code:
        if name not in named:
            raise UsageError(f"--allow-code {one_line(name)}: no filter uses this predicate; remove the flag")
    folder = str(Path.cwd())
    return tuple(Predicate(name, folder, _module_hash(_function(name, folder)[0])) for name in named)


def _function(name: str, folder: str) -> tuple[ModuleType, Callable[[Any], Any]]:
    """Import the module and function of a predicate; raise `UsageError` if that fails."""
    module_name, _, function_name = name.partition(":")
    # Add the folder to sys.path only during this import, so that no other module is imported from the folder.
    sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        what = one_line(f"{type(error).__name__}: {error}", 200)
        raise UsageError(f"the predicate {name}: the module cannot be imported from {folder} ({what})") from None
    finally:
        sys.path.remove(folder)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"the predicate {name}: {module_name} has no function {function_name}")
    return module, function


def _module_hash(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


@lru_cache
def _loaded(predicate: Predicate) -> Callable[[Any], Any]:
    """Import the function of a predicate; raise `DataError` if the main process imported a different file."""
    module, function = _function(predicate.name, predicate.folder)
    if _module_hash(module) != predicate.sha256:
        raise DataError(
            f"{getattr(module, '__file__', predicate.name)}: changed during the build, or differs on this node; "
            "build again with the same file on every node"
        )
    return function


@lru_cache
def record_tests(
    filters: tuple[Filters, ...], predicates: tuple[Predicate, ...] = ()
) -> tuple[tuple[str, RecordTest], ...]:
    """Return the configured record filters as pairs of a name and a function that returns whether a record passes.

    The function raises `RecordError` if a predicate fails.
    """
    allowed = {predicate.name: predicate for predicate in predicates}
    make: dict[str, Callable[[Any], RecordTest]] = {
        "min_turns": lambda least: lambda record: turns(record) >= least,
        "max_turns": lambda most: lambda record: turns(record) <= most,
        "match": lambda pattern: partial(_matches, re.compile(pattern), "match"),
        "no_match": lambda pattern: partial(_matches_not, re.compile(pattern)),
        "languages": lambda languages: lambda record: _language_is_of(record, languages),
        "predicate": lambda name: partial(_passes, allowed[name]),
    }
    return tuple(
        (name, make[name](value))
        for name in keys_of(Filters)
        if name not in ROW_FILTERS
        for each in filters
        if (value := getattr(each, name)) not in (None, ())
    )


def failed_test(record: Record, tests: Sequence[tuple[str, RecordTest]]) -> str | None:
    """Return the name of the first filter that a record does not pass, or None if it passes all."""
    return next((name for name, passes in tests if not passes(record)), None)


def turns(record: Record) -> int:
    """Return the number of messages of a record, not counting system messages and text outside turns."""
    return sum(message.role not in ("system", NO_ROLE) for message in record.messages)


def _matches(pattern: re.Pattern[str], name: str, record: Record) -> bool:
    """Whether the text or the reasoning of any message matches `pattern`."""
    try:
        with _time_limit(MATCH_SECONDS):
            return any(
                pattern.search(text)
                for message in record.messages
                for text in (message.content, message.reasoning)
                if text
            )
    except _MatchTimeError:
        what = f"the regular expression of the filter {name} took more than {MATCH_SECONDS:g} seconds"
        fault = RecordError(
            what,
            "simplify the regular expression: matching nested repetitions such as (a+)+ may never end",
            kind=TIME_LIMIT,
        )
        raise fault.at(record.file, record.line, record.id) from None


def _matches_not(pattern: re.Pattern[str], record: Record) -> bool:
    return not _matches(pattern, "no_match", record)


class _MatchTimeError(Exception):
    pass


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `_MatchTimeError` in the `with` block after `seconds` seconds.

    The limit works only in the main thread, which receives signals. A regular expression match holds the GIL, so only a
    signal can stop it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _MatchTimeError

    handler, began = signal.signal(signal.SIGALRM, stop), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            # Restore the caller's timer.
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-6), interval)


@lru_cache
def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise UsageError(
            "the languages filter needs py3langid, which is not installed; pip install 'chatmill[recipe]'"
        ) from None
    return LanguageIdentifier.from_model_file(MODEL_FILE)


def check_languages(job: Job) -> None:
    """Raise `UsageError` if a filter names an unsupported language, or if py3langid is not installed.

    The function also loads the language detection model, so that the workers share it.
    """
    wanted = {code for each in all_filters(job) for code in each.languages}
    if wanted and (unknown := sorted(wanted - set(_identifier().labels))):
        known = ", ".join(sorted(_identifier().labels))
        raise UsageError(
            f"the languages filter has unknown codes: {', '.join(map(one_line, unknown))}; expected codes from: {known}"
        )


def _language_is_of(record: Record, languages: Sequence[str]) -> bool:
    """Whether the answers are in one of the given languages. Answers without letters always pass."""
    answers = "\n".join(
        message.content for message in record.messages if message.role == "assistant" and message.content
    )
    answers = answers[:LANGUAGE_CHARACTERS]
    if not any(map(str.isalpha, answers)):
        return True
    return _identifier().classify(answers)[0] in languages


def _passes(predicate: Predicate, record: Record) -> bool:
    function = _loaded(predicate)
    try:
        result = function(as_dict(record))
    except Exception as error:
        what = one_line(f"the predicate {predicate.name} failed ({type(error).__name__}: {error})", 300)
    else:
        if type(result) in (bool, np.bool_):
            return bool(result)
        what = f"the predicate {predicate.name} returned {one_line(repr(result))}"
    fault = RecordError(what, "a predicate must return True or False for every record", kind="predicate")
    raise fault.at(record.file, record.line, record.id)


def as_dict(record: Record) -> dict[str, Any]:
    """Return a record as the dict that predicates receive; every message has a role and content.

    >>> from chatmill import Record
    >>> as_dict(Record([{"role": "user", "content": "Hi"}]))["messages"]
    [{'role': 'user', 'content': 'Hi'}]
    """
    fields: dict[str, Any] = msgspec.to_builtins(record)
    fields["messages"] = [
        {"role": message.role, "content": message.content, **msgspec.to_builtins(message)}
        for message in record.messages
    ]
    # Omit `line`: it counts from the start of a unit of work, so it depends on how the input is split.
    del fields["line"], fields["unread_keys"]
    return fields


# Rendered rows.


def has_row_filters(filters: Sequence[Filters]) -> bool:
    return any(getattr(each, name) is not None for each in filters for name in ROW_FILTERS)


def failed_row_filters(
    filters: Sequence[Filters], tokens: NDArray[Any], trained: NDArray[Any], record_of: Index
) -> NDArray[np.uint8]:
    """For each row, return 0 if it is kept, or 1 + the index in `NAMES` of the first filter that removes it.

    A conversation is kept or removed with all its rows, which are consecutive and have the same index in `record_of`.
    The token count of a conversation is the length of its longest row; its trained share is the fraction of trained
    tokens in all its rows.
    """
    failed = np.zeros(len(record_of), dtype=np.uint8)
    if not len(record_of):
        return failed
    first = np.flatnonzero(np.diff(record_of, prepend=-1))
    longest = np.maximum.reduceat(tokens, first)
    share = np.add.reduceat(trained, first) / np.add.reduceat(tokens, first)
    removed = np.zeros(len(first), dtype=np.uint8)
    for name in reversed(ROW_FILTERS):
        value = longest if name.endswith("tokens") else share
        for bound in (getattr(each, name) for each in filters):
            if bound is not None:
                removed[value < bound if name.startswith("min") else value > bound] = 1 + NAMES.index(name)
    return np.repeat(removed, np.diff(np.append(first, len(record_of))))
