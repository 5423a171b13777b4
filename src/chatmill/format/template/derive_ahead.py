"""Derive the answers of several conversations in parallel, before a build forks its workers.

The workers inherit the results. Otherwise, every worker would derive the same results again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import NamedTuple

from chatmill.errors import RecordError
from chatmill.format.template.answers.derived import DerivedAnswers
from chatmill.format.template.laid_out_columns import conversation
from chatmill.format.template.process.client import TemplateProcess
from chatmill.format.template.trace_cache import ShapeKey
from chatmill.records import ChatColumns, Record

MAX_AHEAD = 2**6
"""Maximum number of conversations to derive, which limits the time until the workers start."""

Derive = Callable[[Record, TemplateProcess], DerivedAnswers]


class FirstOfShape(NamedTuple):
    """The first conversation with a given sequence of roles."""

    key: ShapeKey
    texts: list[str]
    record: Record


def first_of_shapes(columns: ChatColumns, skip: set[int]) -> Iterator[FirstOfShape]:
    """Yield the first conversation of each sequence of roles. The conversations in `skip` are ignored."""
    roles, first = columns.roles.tobytes(), columns.first_message.tolist()
    rows: dict[bytes, int] = {}
    for row in range(len(columns)):
        if row not in skip:
            rows.setdefault(roles[first[row] : first[row + 1]], row)
    for shape, row in rows.items():
        texts = columns.texts(row)
        yield FirstOfShape((False, shape), texts, conversation(columns, row, texts))


def derive_ahead(
    shapes: Sequence[FirstOfShape],
    derive: Derive,
    process: TemplateProcess,
    *,
    processes: int,
    before: Callable[[], object],
) -> Iterator[tuple[FirstOfShape, DerivedAnswers]]:
    """Derive each conversation, in parallel in a template process and its copies; skip conversations that are rejected.

    `before` is called before the process itself is used, while the copies start.
    """
    # The longest conversations come first, so that all processes end at about the same time.
    shapes = sorted(shapes[:MAX_AHEAD], key=lambda each: -len(each.texts))
    count = min(processes, len(shapes))
    if not count:
        return
    # The first thread uses the process itself. Each other thread starts its own copy, so that the copies start in
    # parallel.
    own, unused = threading.local(), iter([process])

    def derived(shape: FirstOfShape) -> DerivedAnswers | None:
        if not hasattr(own, "process"):
            own.process = next(unused, None) or stack.enter_context(closing(process.copy()))
            if own.process is process:
                before()
        try:
            return derive(shape.record, own.process)
        except RecordError:
            return None

    with ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        for shape, result in zip(shapes, pool.map(derived, shapes), strict=True):
            if result is not None:
                yield shape, result
