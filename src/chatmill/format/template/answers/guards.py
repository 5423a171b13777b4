"""Add guards to a trace for the results of `by_prefix`, so that other conversations can reuse the trace.

Usually, the literals alone determine whether one rendering is a prefix of another. If the result depends on the text in
a slot, a guard is added.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from chatmill.errors import RecordError
from chatmill.format.template.answers.by_origin import RenderTraced
from chatmill.format.template.answers.by_prefix import header_of
from chatmill.format.template.tracing.trace import Rendering, TextItem, Trace, common_length

Items = list[TextItem]


def guard_prefixes(
    trace: Trace,
    full: Rendering,
    render_traced: RenderTraced,
    assistants: Sequence[int],
    prompts: Sequence[int],
    token: re.Pattern[str],
) -> None:
    """Add guards for all conditions that `answers_by_prefix` depends on, or mark the trace as not cacheable."""
    whole = list(full.items)
    usual = ""

    @cache
    def rendered(messages: int, prompt: bool) -> Items | None:
        try:
            return list(render_traced(messages, prompt).items)
        except RecordError:
            return None

    for messages in prompts:
        if usual:
            break
        prompt, before = rendered(messages, True), rendered(messages, False)
        if prompt is not None and before is not None:
            (head, end), (head_before, end_before) = _split_end(prompt), _split_end(before)
            if head != head_before:
                # Do not cache the trace, because the header depends on texts of the conversation.
                trace.cacheable = False
                return
            usual = header_of(end, end_before, token)
    for message in assistants:
        prompt, before = rendered(message, True), rendered(message, False)
        if prompt is None or not trace.cacheable:
            continue
        _guard_prefix(trace, whole, prompt)
        alone, next_prompt = rendered(message + 1, False), rendered(message + 1, True)
        if alone is not None:
            _guard_prefix(trace, whole, alone)
        if before is None:
            continue
        (head, end), (head_before, end_before) = _split_end(prompt), _split_end(before)
        if head != head_before or len(end) < len(usual):
            trace.cacheable = False
            return
        header = usual if usual and end.endswith(usual) else header_of(end, end_before, token)
        if usual and not header:
            _guard_prefix(trace, whole, [*head, end + usual])
        if header and next_prompt is not None:
            body, next_end = _split_end(next_prompt)
            if len(next_end) < len(header):
                trace.cacheable = False
            elif next_end.endswith(header):
                _guard_prefix(trace, whole, [*body, *filter(None, [next_end[: -len(header)]])])


def _split_end(items: Items) -> tuple[Items, str]:
    """Split off the literal at the end of `items`, and return the other items and the literal."""
    return (items[:-1], items[-1]) if items and isinstance(items[-1], str) else (items, "")


def _guard_prefix(trace: Trace, whole: Items, prefix: Items) -> None:
    """Add a guard on whether `prefix` is a prefix of `whole`, unless the literals alone determine this."""
    whole, prefix = _without_common(whole, prefix)
    if not prefix or not whole or (isinstance(whole[0], str) and isinstance(prefix[0], str)):
        return
    if isinstance(prefix[0], str) and not trace.evaluate(*_condition(whole, prefix[:1]), guard_true=False):
        return
    trace.evaluate(*_condition(whole, prefix), guard_true=True)


def _condition(whole: Items, prefix: Items) -> tuple[Any, ...]:
    """Return the arguments of `Trace.evaluate` that test whether `whole` begins with `prefix`."""
    literals = [item for item in prefix if isinstance(item, str)]
    if len(literals) == len(prefix):
        # Keep only the items of `whole` that are compared with `prefix`. Count each slot as one character, because its
        # text has at least one.
        size = 0
        for number, item in enumerate(whole):
            size += len(item) if isinstance(item, str) else 1
            if size >= sum(map(len, literals)):
                whole = whole[: number + 1]
                break
    slots = tuple(item for item in (*whole, *prefix) if isinstance(item, int))
    patterns = (tuple(None if isinstance(item, int) else item for item in items) for items in (whole, prefix))
    return "begins_with", slots, *patterns


def _without_common(whole: Items, prefix: Items) -> tuple[Items, Items]:
    """Return `whole` and `prefix` without their common prefix."""
    one, other = list(whole), list(prefix)
    while one and other:
        if one[0] == other[0]:
            del one[0], other[0]
        elif isinstance(one[0], str) and isinstance(other[0], str):
            common = common_length(one[0], other[0])
            one[0], other[0] = one[0][common:], other[0][common:]
            if one[0] and other[0]:
                break
            one, other = one[not one[0] :], other[not other[0] :]
        else:
            break
    return one, other
