"""The messages between a renderer and its template process, encoded as MessagePack frames.

A malicious template could take over its process and send arbitrary bytes, so every response is checked here. A
malicious response can contain a wrong rendering, but it cannot make the renderer crash, run out of memory, or read out
of bounds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from chatmill.format.template.answers.by_origin import AnswerSpan
from chatmill.format.template.answers.by_prefix import PrefixAnswer
from chatmill.format.template.answers.contexts import Context
from chatmill.format.template.answers.derived import DerivedAnswers, Note
from chatmill.format.template.template_input import Style
from chatmill.format.template.tracing.steps import STEP_FUNCTIONS, Kind
from chatmill.format.template.tracing.trace import OUTSIDE, Rendering, TracedPiece, TraceStep
from chatmill.records.record import Record

MAX_STEPS = 2**14
"""Maximum number of steps in a replayed trace. If a trace has more than `MAX_STEPS` steps, the answers of each record
are derived separately.
"""
MAX_COPIES = 2**7
"""Maximum number of times that a replayed trace may copy a text of the conversation."""
MAX_GROWTH = 2**10
"""Like MAX_COPIES, but also counts the characters that functions add, for example by escaping."""
MAX_WRITTEN = 8
"""Maximum number of times that a replayed trace may output a text of the conversation."""
MAX_LITERALS = 2**23
"""Maximum number of template characters that replaying a trace may copy."""


class Setup(msgspec.Struct, frozen=True):
    """The first message to a new template process."""

    memory: int
    """Bytes of memory that the process may use in addition to its current memory."""
    arguments: tuple[str, ...] = ()
    """The arguments of the start function, which must not contain untrusted data."""


class Ready(msgspec.Struct, frozen=True):
    """The response to `Setup`, sent before the process reads a template."""

    pid: int
    protections: list[str]
    """The names of the active protections, as returned by `lock_down`."""


class OpenTemplates(msgspec.Struct, tag="open", frozen=True):
    sources: list[tuple[str, str]]
    """The name and the text of each template."""
    variables: bytes
    """The template variables as JSON, because MessagePack limits the size of integers."""
    now: str
    tokens: list[str]
    """The control tokens of the tokenizer."""
    ends: list[str]
    """The tokens at which an inference server stops generating."""
    seconds: float


class RenderText(msgspec.Struct, tag="text", frozen=True):
    template: int
    record: Record
    messages: int | None
    prompt: bool
    seconds: float


class Derive(msgspec.Struct, tag="derive", frozen=True):
    template: int
    record: Record
    mask: Literal["derived", "tags"]
    cacheable: bool
    last_only: bool
    text_tokens: list[str]
    """The control tokens that message text may contain."""
    seconds: float
    keep: bool = False
    """Whether to keep the renderings of the record for requests about its first messages."""


Request = OpenTemplates | RenderText | Derive


class Opened(msgspec.Struct, tag="opened", frozen=True):
    has_tags: list[bool]
    styles: list[Style]


class Text(msgspec.Struct, tag="text", frozen=True):
    text: str


class Derived(msgspec.Struct, tag="derived", frozen=True):
    pieces: tuple[TracedPiece, ...]
    answers: tuple[AnswerSpan, ...]
    prefixes: tuple[PrefixAnswer, ...]
    contexts: tuple[Context, ...]
    steps: tuple[TraceStep, ...] | None
    notes: tuple[Note, ...]


class RecordFault(msgspec.Struct, tag="record", frozen=True):
    """A `RecordError` that the renderer raises."""

    what: str
    right: str
    kind: Annotated[str, msgspec.Meta(pattern=r"^[a-z_]{1,40}\Z")]


class TemplateFault(msgspec.Struct, tag="template", frozen=True):
    """The template cannot be used; the renderer raises a `DataError`."""

    what: str


class Stopped(msgspec.Struct, tag="stopped", frozen=True):
    """The template exceeded the time or memory limit; `place` is the template line that was running."""

    limit: Literal["time", "memory"]
    place: str


Response = Opened | Text | Derived | RecordFault | TemplateFault | Stopped

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_response = msgspec.msgpack.Decoder(Response).decode
decode_ready = msgspec.msgpack.Decoder(Ready).decode
decode_setup = msgspec.msgpack.Decoder(Setup).decode


class BrokenResponseError(ValueError):
    """The template process sent an invalid response."""


def check_derived(response: Derived, record: Record, texts: int) -> DerivedAnswers:
    """Check the process's response for `record`, and return the rendered text and its answers.

    `texts` is the number of strings in the record, such as message contents.
    """
    count = len(record.messages)
    kinds = None
    steps = None
    if response.steps is not None:
        steps = tuple(
            step._replace(args=_tuples(step.args), expected=_tuples(step.expected)) for step in response.steps
        )
        kinds = _check_steps(steps, texts)
    length = 0
    for piece in response.pieces:
        _require(bool(piece.text) and OUTSIDE <= piece.owner < count)
        if piece.source is not None:
            _require(OUTSIDE <= piece.source.message < count and bool(piece.source.path))
        if piece.slot is not None and kinds is not None:
            _require(0 <= piece.slot < len(kinds) and kinds[piece.slot] == Kind.TEXT)
        length += len(piece.text)
    for answer in response.answers:
        _require(0 <= answer.message < count and record.messages[answer.message].role == "assistant")
        _require(0 <= answer.start <= answer.stop <= length)
    for prefix in response.prefixes:
        _require(all(at is None or 0 <= at <= length for at in prefix[1:]))
    if steps is not None and not _is_bounded(steps, response.pieces, texts):
        steps = None
    _require(len(response.contexts) in (0, len(response.answers)))
    return DerivedAnswers(
        Rendering(response.pieces), response.answers, response.prefixes, response.contexts, steps, response.notes
    )


def _check_steps(steps: tuple[TraceStep, ...], texts: int) -> list[Kind]:
    """Check the steps of a trace, and return the type of each value that the steps use or compute. Raise
    `BrokenResponseError` if a step is invalid.
    """
    kinds = [Kind.TEXT] * texts
    for step in steps:
        function = STEP_FUNCTIONS.get(step.function)
        _require(function is not None)
        assert function is not None
        _require(all(0 <= slot < len(kinds) and kinds[slot] == function.takes for slot in step.slots))
        if not step.is_guard:
            _require(function.gives is not None)
            assert function.gives is not None
            kinds.append(function.gives)
    return kinds


def _is_bounded(steps: tuple[TraceStep, ...], pieces: tuple[TracedPiece, ...], texts: int) -> bool:
    """Whether the memory needed to replay a trace grows at most linearly with the size of the conversation."""
    if len(steps) > MAX_STEPS:
        return False
    # For each slot, `copies` counts how often the slot may contain each text of the conversation, and, under the key
    # -1, the template characters in the slot. `grown` is like `copies`, plus the characters that functions may add.
    copies: list[dict[int, int]] = [{slot: 1} for slot in range(texts)]
    grown: list[dict[int, int]] = [{slot: 1} for slot in range(texts)]

    def add(counts: list[dict[int, int]], held: dict[int, int], step: TraceStep, growth: int, limit: int) -> bool:
        """Count how often the result of a step contains each text of the conversation. Return whether the totals are
        within the limits.
        """
        total = {-1: sum(map(_characters, step.args))}
        held[-1] += total[-1]
        for slot in step.slots:
            for text, count in counts[slot].items():
                total[text] = total.get(text, 0) + count * growth
                held[text] += count * growth
                if held[text] > (MAX_LITERALS if text < 0 else limit):
                    return False
        counts.append(total)
        return held[-1] <= MAX_LITERALS

    all_copies, all_grown = dict.fromkeys(range(-1, texts), 0), dict.fromkeys(range(-1, texts), 0)
    for step in steps:
        # A slice or part of a text is counted like the whole text.
        if not step.is_guard and not (
            add(copies, all_copies, step, 1, MAX_COPIES)
            and add(grown, all_grown, step, STEP_FUNCTIONS[step.function].growth, MAX_GROWTH)
        ):
            return False
    slots = tuple(piece.slot for piece in pieces if piece.slot is not None)
    return add(copies, dict.fromkeys(range(-1, texts), 0), TraceStep("fill_pattern", slots, ()), 1, MAX_WRITTEN)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return sum(map(_characters, value)) if isinstance(value, tuple) else 0


def _tuples(value: Any) -> Any:
    """Convert all lists in a decoded value to tuples.

    Raise `BrokenResponseError` if the value contains anything other than strings, numbers and None.
    """
    if isinstance(value, list | tuple):
        return tuple(_tuples(inner) for inner in value)
    _require(value is None or isinstance(value, str | int | float))
    return value


def _require(holds: bool) -> None:
    if not holds:
        raise BrokenResponseError
