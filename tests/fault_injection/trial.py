"""What a trial is: it does something harmful again and again, and counts each attempt by its result.

Every attempt ends in exactly one of these:

    survived         all is as if nothing had happened, or as it was before
    found            it was noticed, and said in one line
    lost             something is gone, or broke without a word that helps
    silently wrong   something else came out than should have, and nobody said so
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
"""Of what went wrong, so many are told."""
MEMORY = "/dev/shm"
QUIET = 15.0
"""Seconds between two lines of progress."""


@dataclass
class Tally:
    """What came of the attempts of one trial."""

    name: str = ""
    expected: int = 0
    """Attempts there will be, for progress; 0 if nobody knows."""
    survived: int = 0
    found: int = 0
    lost: int = 0
    wrong: int = 0
    seconds: float = 0.0
    skipped: str = ""
    """Why nothing was tried, if so."""
    broke: str = ""
    """What ended the trial itself before it was done."""
    examples: list[str] = field(default_factory=list)
    """What was lost or wrong, the first few."""
    notes: Counter[str] = field(default_factory=Counter)
    """Other figures that make the trial's own more telling."""
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
        """Count one attempt by what holds of it, the best first."""
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
    """One way of breaking things. `work(size, seed, folder, tally)` does it in a folder that is gone afterwards."""

    name: str
    does: str
    work: Callable[[int, int, Path, Tally], None]
    full: int
    """The size of the whole run; what it counts is the trial's own affair."""
    short: int
    cores: int = 1
    in_memory: bool = False
    """Where the real disk plays no part, its folder is in memory if it can be."""

    def run(self, size: int, seed: int) -> Tally:
        """Do it, here and now. An exception in the trial counts as a fault."""
        tally, began = Tally(self.name), time.perf_counter()
        place = MEMORY if self.in_memory and os.access(MEMORY, os.W_OK) else None
        folder = Path(tempfile.mkdtemp(prefix="chatmill-trial-", dir=place))
        try:
            self.work(size, seed, folder, tally)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        tally.seconds = time.perf_counter() - began
        if not tally.tried and not tally.skipped:
            raise AssertionError(f"{self.name}: nothing was tried")
        return tally
