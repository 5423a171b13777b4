"""A trial injects one kind of fault many times and counts every attempt by its result.

Every attempt has exactly one of these results:

    survived         the result is the same as without the fault, or the previous state is intact
    found            the fault was noticed and reported in one line
    lost             data is gone, or a command failed without a helpful message
    silently wrong   the result is wrong, and no error was reported
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KEPT = 5
"""Number of failed attempts that are kept as examples."""
MEMORY = "/dev/shm"
QUIET = 15.0
"""Seconds between two progress lines."""


@dataclass
class Tally:
    name: str = ""
    expected: int = 0
    """Expected number of attempts, shown in progress lines; 0 if it is unknown."""
    survived: int = 0
    found: int = 0
    lost: int = 0
    wrong: int = 0
    seconds: float = 0.0
    skipped: str = ""
    """Why the trial was skipped; empty if it ran."""
    broke: str = ""
    """Error that ended the trial itself; empty if it finished."""
    examples: list[str] = field(default_factory=list)
    """Descriptions of the first failed attempts."""
    notes: Counter[str] = field(default_factory=Counter)
    """Additional counts that are reported with the results."""
    _last_line: float = field(default_factory=time.monotonic)

    @property
    def tried(self) -> int:
        return self.survived + self.found + self.lost + self.wrong

    @property
    def is_red(self) -> bool:
        return bool(self.lost or self.wrong or self.broke)

    def survives(self) -> None:
        self.survived += 1
        self._progress()

    def finds(self) -> None:
        self.found += 1
        self._progress()

    def loses(self, what: str) -> None:
        self.lost += 1
        self._note_example(f"lost: {what}")

    def is_wrong(self, what: str) -> None:
        self.wrong += 1
        self._note_example(f"silently wrong: {what}")

    def judge(self, *, survived: bool = False, found: bool = False, lost: str = "") -> None:
        if survived:
            self.survives()
        elif found:
            self.finds()
        else:
            self.loses(lost)

    def _note_example(self, what: str) -> None:
        if len(self.examples) < KEPT:
            self.examples.append(what)
            print(f"{self.name}: {what}", file=sys.stderr, flush=True)
        self._progress()

    def _progress(self) -> None:
        if time.monotonic() - self._last_line > QUIET:
            self._last_line = time.monotonic()
            of = f" of {self.expected:,}" if self.expected else ""
            print(f"{self.name}: {self.tried:,}{of}", file=sys.stderr, flush=True)

    def to_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(self).items() if name not in ("expected", "_last_line")}
        return {**fields, "tried": self.tried, "notes": dict(self.notes)}


@dataclass(frozen=True)
class Trial:
    """One kind of fault injection. `work(size, seed, folder, tally)` makes all attempts in a temporary folder."""

    name: str
    does: str
    work: Callable[[int, int, Path, Tally], None]
    full: int
    """Size of a full run; its unit depends on the trial."""
    short: int
    cores: int = 1
    in_memory: bool = False
    """Whether to use a folder in memory, for trials that do not need a real disk."""

    def run(self, size: int, seed: int) -> Tally:
        """Run the trial in this process. Raise AssertionError if the trial made no attempt and was not skipped."""
        tally, began = Tally(self.name), time.perf_counter()
        place = MEMORY if self.in_memory and os.access(MEMORY, os.W_OK) else None
        folder = Path(tempfile.mkdtemp(prefix="chatmill-trial-", dir=place))
        try:
            self.work(size, seed, folder, tally)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        tally.seconds = time.perf_counter() - began
        if not tally.tried and not tally.skipped:
            raise AssertionError(f"{self.name}: no attempt was made")
        return tally
