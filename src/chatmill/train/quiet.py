"""Suppress log messages from libraries."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_logs(level: int = logging.WARNING) -> Iterator[None]:
    """Suppress log messages up to a level, such as torchao warnings about features that chatmill does not use."""
    before = logging.root.manager.disable
    logging.disable(max(before, level))
    try:
        yield
    finally:
        logging.disable(before)
