"""Derive the answers of several conversations in parallel, before a build forks its workers.

The workers inherit the results. Otherwise, every worker would derive the same results again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from itertools import chain, zip_longest
from typing import NamedTuple

import msgspec

from chatmill.errors import RecordError
from chatmill.format.template.answers.derived import DerivedAnswers
from chatmill.format.template.laid_out_columns import conversation
from chatmill.format.template.process.client import TemplateProcess
from chatmill.format.template.trace_cache import MAX_MESSAGES, ShapeKey
from chatmill.records import ChatColumns, Record

MAX_AHEAD = 2**6
"""Maximum number of conversations to derive, which limits the time until the workers start."""

Derive = Callable[[Record, TemplateProcess, bool], DerivedAnswers]
"""Derives the answers of a record in a template process. If the third argument is true, the process keeps the
renderings.
"""


class FirstOfShape(NamedTuple):
    """The first conversation with a given sequence of roles."""

    key: ShapeKey
    texts: list[str]
    record: Record

    def begins(self, other: FirstOfShape) -> bool:
        """Whether the roles of another conversation begin with the roles of this conversation."""
        return other.key[1].startswith(self.key[1])

    def cut_from(self, longer: FirstOfShape) -> FirstOfShape:
        """Return the first messages of a longer conversation, with the roles of this conversation."""
        count = len(self.texts)
        record = msgspec.structs.replace(longer.record, messages=longer.record.messages[:count])
        return FirstOfShape(self.key, longer.texts[:count], record)


Family = list[FirstOfShape]
"""A conversation, and shorter conversations whose roles are the first roles of that conversation."""
Result = tuple[FirstOfShape, DerivedAnswers]


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
    shapes: Iterable[FirstOfShape],
    derive: Derive,
    process: TemplateProcess,
    *,
    processes: int,
    before: Callable[[], object],
) -> Iterator[Result]:
    """Derive a conversation of each shape, in parallel in a template process and its copies; skip shapes whose
    conversations are rejected.

    A long conversation also gives the shorter conversations of its family, because the renderings of their prompts are
    the same. `before` is called before the process itself is used, while the copies start.
    """
    families = _families(shapes)
    # If there are more processes than families, split the families.
    splits = max(1, processes // max(1, len(families)))
    parts = [family[start::splits] for family in families for start in range(min(splits, len(family)))]
    groups = [parts[start::processes] for start in range(min(processes, len(parts)))]

    def derived(
        own: Future[TemplateProcess], shape: FirstOfShape, longest: Future[Result | None] | None, keep: bool
    ) -> Result | None:
        # If the longest conversation was rejected, do not cut others from it: the template process may have been killed
        # because of it, and only a few kills are allowed.
        known = longest.result() if longest is not None else None
        for each in [shape] if known is None else [shape.cut_from(known[0]), shape]:
            with suppress(RecordError):
                return each, derive(each.record, own.result(), keep)
        return None

    with ExitStack() as copies, ExitStack() as pools:

        def started(number: int) -> TemplateProcess:
            if number:
                return copies.enter_context(closing(process.copy()))
            before()
            return process

        # Each group has a thread and a process of its own.
        results: list[list[Future[Result | None]]] = []
        for number, group in enumerate(groups):
            pool = ThreadPoolExecutor(1)
            pools.callback(pool.shutdown, cancel_futures=True)
            own = pool.submit(started, number)
            results.append([])
            for part in group:
                longest = pool.submit(derived, own, part[0], None, len(part) > 1)
                results[-1] += [longest, *(pool.submit(derived, own, shape, longest, False) for shape in part[1:])]
        for result in chain.from_iterable(zip_longest(*results)):
            if result is not None and (each := result.result()) is not None:
                yield each


def _families(shapes: Iterable[FirstOfShape]) -> list[Family]:
    """Group the shapes into families, each in descending order of the number of messages."""
    families: list[Family] = []
    cacheable = [shape for shape in shapes if len(shape.texts) <= MAX_MESSAGES]
    for shape in sorted(cacheable[:MAX_AHEAD], key=lambda each: -len(each.texts)):
        family = next((family for family in families if shape.begins(family[0])), None)
        if family is None:
            families.append([shape])
        else:
            family.append(shape)
    return families
