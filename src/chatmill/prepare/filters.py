"""Filters: which records, and which rendered conversations, a job keeps.

Filters of turns, text, language and a predicate look at a record before it is rendered. Those of tokens and of the
trained share look at the rendered rows of a conversation before they are cut, many at a time.
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
"""Removes the records whose ids are in the file of `--exclude`."""
NAMES = (*keys_of(Filters), EXCLUDE)
"""All filters; the number of one is staged with what it removes."""
ROW_FILTERS = ("min_tokens", "max_tokens", "min_trained_share", "max_trained_share")
"""Filters of rendered rows; all others are of records."""
LANGUAGE_CHARACTERS = 2000
"""Characters of the answers by which their language is told."""
MATCH_SECONDS = 10.0
"""The longest time that the regular expressions may take for one record."""

TIME_LIMIT = "time_limit"
"""The kind of fault of a record for which they take longer."""

RecordTest = Callable[[Record], bool]


def reason(name: str) -> str:
    """How the ledger and the list of removed records call a filter."""
    return "excluded" if name == EXCLUDE else f"filter {name}"


def filters_of(job: Job, source: int) -> tuple[Filters, ...]:
    """The filters that the records of a source must pass: those of the job, and its own."""
    return (job.filters, job.sources[source].filters)


def all_filters(job: Job) -> tuple[Filters, ...]:
    return (job.filters, *(source.filters for source in job.sources))


# Records.


@dataclass(frozen=True)
class Predicate:
    """A function of the user's that may run, and the hash of the file that defines it."""

    name: str
    """As module:function."""
    folder: str
    """The folder in which its module is looked for, besides those of Python."""
    sha256: str


def allowed_predicates(job: Job, allow_code: Sequence[str]) -> tuple[Predicate, ...]:
    """The predicates of a job, imported; `UsageError` if one is not allowed, or one is allowed that it does not name.

    Nothing is imported unless all are allowed.
    """
    named = dict.fromkeys(filters.predicate for filters in all_filters(job) if filters.predicate is not None)
    for name in named:
        if name not in allow_code:
            raise UsageError(
                f"the predicate {one_line(name)} is code that would run; allow it with --allow-code {name}"
            )
    for name in allow_code:
        if name not in named:
            raise UsageError(f"--allow-code {one_line(name)}: no filter names this predicate; leave it out")
    folder = str(Path.cwd())
    return tuple(Predicate(name, folder, _module_hash(_function(name, folder)[0])) for name in named)


def _function(name: str, folder: str) -> tuple[ModuleType, Callable[[Any], Any]]:
    """The module and the function of a predicate; `UsageError` if there is none."""
    module_name, _, function_name = name.partition(":")
    # Last, and not for longer than it takes: no other module shall be found there.
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
    """The function of a predicate, perhaps in another process or on another machine than the one that allowed it."""
    module, function = _function(predicate.name, predicate.folder)
    if _module_hash(module) != predicate.sha256:
        raise DataError(
            f"{getattr(module, '__file__', predicate.name)}: was changed while the build ran, or is another on this "
            "node; build again with one"
        )
    return function


@lru_cache
def record_tests(
    filters: tuple[Filters, ...], predicates: tuple[Predicate, ...] = ()
) -> tuple[tuple[str, RecordTest], ...]:
    """The filters of records that are given: the name of each, and a function that says whether a record passes it.

    The function of a predicate raises `RecordError` if the predicate fails.
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
    """The name of the first filter that a record does not pass; None if it passes all."""
    return next((name for name, passes in tests if not passes(record)), None)


def turns(record: Record) -> int:
    """The messages of a record, without system messages and text outside of turns."""
    return sum(message.role not in ("system", NO_ROLE) for message in record.messages)


def _matches(pattern: re.Pattern[str], name: str, record: Record) -> bool:
    """Whether the text or the reasoning of a message matches."""
    try:
        with _time_limit(MATCH_SECONDS):
            return any(
                pattern.search(text)
                for message in record.messages
                for text in (message.content, message.reasoning)
                if text
            )
    except _MatchTimeError:
        what = f"the regular expression of the filter {name} took over {MATCH_SECONDS:g} seconds"
        fault = RecordError(what, "simplify it: nested repetitions such as (a+)+ may never end", kind=TIME_LIMIT)
        raise fault.at(record.file, record.line, record.id) from None


def _matches_not(pattern: re.Pattern[str], record: Record) -> bool:
    return not _matches(pattern, "no_match", record)


class _MatchTimeError(Exception):
    pass


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `_MatchTimeError` in the block after so many seconds; only in the main thread, which alone gets signals.

    While an expression is matched no other thread runs, so that one that never ends could not be stopped otherwise.
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
            # That of the caller goes on.
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-6), interval)


@lru_cache
def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise UsageError(
            "the filter languages needs py3langid, which is not installed; pip install 'chatmill[recipe]'"
        ) from None
    return LanguageIdentifier.from_model_file(MODEL_FILE)


def check_languages(job: Job) -> None:
    """Raise `UsageError` if a filter names a language that cannot be told, or if py3langid is not installed.

    Also loads its model, which the workers then share.
    """
    wanted = {code for each in all_filters(job) for code in each.languages}
    if wanted and (unknown := sorted(wanted - set(_identifier().labels))):
        known = ", ".join(sorted(_identifier().labels))
        raise UsageError(f"the filter languages: {', '.join(map(one_line, unknown))} is not a known code ({known})")


def _language_is_of(record: Record, languages: Sequence[str]) -> bool:
    """Whether the answers are in one of these languages. Answers without a letter are in any."""
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
    fault = RecordError(what, "it must return True or False for every record", kind="predicate")
    raise fault.at(record.file, record.line, record.id)


def as_dict(record: Record) -> dict[str, Any]:
    """A record as a predicate gets it; every message has a role and a content.

    >>> from chatmill import Record
    >>> as_dict(Record([{"role": "user", "content": "Hi"}]))["messages"]
    [{'role': 'user', 'content': 'Hi'}]
    """
    fields: dict[str, Any] = msgspec.to_builtins(record)
    fields["messages"] = [
        {"role": message.role, "content": message.content, **msgspec.to_builtins(message)}
        for message in record.messages
    ]
    # The number within a part of the file, which depends on how the work is cut.
    del fields["line"], fields["unread_keys"]
    return fields


# Rendered rows.


def has_row_filters(filters: Sequence[Filters]) -> bool:
    return any(getattr(each, name) is not None for each in filters for name in ROW_FILTERS)


def failed_row_filters(
    filters: Sequence[Filters], tokens: NDArray[Any], trained: NDArray[Any], record_of: Index
) -> NDArray[np.uint8]:
    """For each row 0 if it is kept, or 1 + the number in `NAMES` of the first filter that removes it.

    A conversation is kept or removed with all its rows, which follow each other and have one number in `record_of`: its
    tokens are those of its longest row, its trained share is that of all its rows.
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
