"""Progress of a run on standard error: a bar that moves in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 24
SECONDS = 0.2
"""The bar moves this often at most."""
MEMORY = 0.95
"""How much of what a speed was stays in it with every step."""


class TrainProgress:
    """Tells of steps as they end."""

    def __init__(self, first: int, total: int, *, every: int, stream: TextIO | None = None) -> None:
        self._at, self._total, self._every = first, total, every
        self._stream = stream or sys.stderr
        self._moves = self._stream.isatty()
        self._shown = 0.0
        # Means that forget: each is divided by what a mean of ones would be.
        self._means = dict.fromkeys(("seconds", "tokens", "trained", "ones"), 0.0)

    def step(self, step: int, *, loss: float | None, seconds: float, tokens: float, trained: float) -> None:
        for name, value in (("seconds", seconds), ("tokens", tokens), ("trained", trained), ("ones", 1.0)):
            self._means[name] = MEMORY * self._means[name] + (1 - MEMORY) * value
        self._at = step
        now = time.monotonic()
        if self._moves:
            if now - self._shown >= SECONDS or step == self._total:
                self._shown = now
                done = int(WIDTH * step / max(1, self._total))
                self._stream.write(f"\r\x1b[K[{'=' * done}{' ' * (WIDTH - done)}] {self._line(_loss(loss))}")
                self._stream.flush()
        elif step % self._every == 0 or step == self._total:
            print(self._line(_loss(loss)), file=self._stream, flush=True)

    def _line(self, loss: str) -> str:
        seconds = self._means["seconds"] or 1e-9
        speed, trained = self._means["tokens"] / seconds, self._means["trained"] / seconds
        left = (self._total - self._at) * seconds / self._means["ones"]
        return (
            f"step {self._at:,}/{self._total:,}  loss {loss}  {_short(speed)} tokens/s  "
            f"{_short(trained)} trained/s  {_clock(left)} left"
        )

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        print(f"\r\x1b[K{text}" if self._moves else text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._moves and self._shown:
            print(file=self._stream, flush=True)


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _short(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if value < 1000 or unit == "G":
            return f"{value:.3g}{unit}" if value < 1000 else f"{value:.0f}{unit}"
        value /= 1000
    raise AssertionError


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
