"""Show the progress of a run: a progress bar in a terminal, otherwise periodic lines."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 24
"""Width of the progress bar in characters."""
SECONDS = 0.2
"""Minimum time between updates of the progress bar, in seconds."""
DECAY = 0.95
"""Decay rate of the moving averages that measure speed."""


class TrainProgress:
    def __init__(self, first: int, total: int, *, every: int, stream: TextIO | None = None) -> None:
        self._at, self._total, self._every = first, total, every
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._shown = 0.0
        self._epoch: float | None = None
        # Exponential moving averages; dividing an average by the average of "ones" corrects the bias of the first
        # steps.
        self._means = dict.fromkeys(("seconds", "tokens", "trained", "ones"), 0.0)

    def step(
        self,
        step: int,
        *,
        loss: float | None,
        seconds: float,
        tokens: float,
        trained: float,
        epoch: float | None = None,
    ) -> None:
        for name, value in (("seconds", seconds), ("tokens", tokens), ("trained", trained), ("ones", 1.0)):
            self._means[name] = DECAY * self._means[name] + (1 - DECAY) * value
        self._at, self._epoch = step, epoch
        now = time.monotonic()
        if self._is_terminal:
            if now - self._shown >= SECONDS or step == self._total:
                self._shown = now
                done = int(WIDTH * step / max(1, self._total))
                self._stream.write(f"\r\x1b[K[{'=' * done}{' ' * (WIDTH - done)}] {self._line(loss)}")
                self._stream.flush()
        elif step % self._every == 0 or step == self._total:
            print(self._line(loss), file=self._stream, flush=True)

    def _line(self, loss: float | None) -> str:
        seconds = self._means["seconds"] or 1e-9
        speed, trained = self._means["tokens"] / seconds, self._means["trained"] / seconds
        remaining = (self._total - self._at) * seconds / self._means["ones"]
        shown_loss = "-" if loss is None else f"{loss:.4f}"
        epoch = "" if self._epoch is None else f"  epoch {self._epoch:.2f}"
        return (
            f"step {self._at:,}/{self._total:,}{epoch}  loss {shown_loss}  {_short(speed)} tokens/s  "
            f"{_short(trained)} trained/s  {_clock(remaining)} left"
        )

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        print(f"\r\x1b[K{text}" if self._is_terminal else text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._is_terminal and self._shown:
            print(file=self._stream, flush=True)


def _short(value: float) -> str:
    for unit in ("", "k", "M"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G" if value < 1000 else f"{value:.0f}G"


def _clock(duration: float) -> str:
    minutes, seconds = divmod(round(duration), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
