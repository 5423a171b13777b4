"""Render: conversations to Rows, in bulk.

Each message is up to six pieces: what begins the conversation, the opener, the body, the close, what
follows the close, and what ends the conversation.

    <|im_start|> user\\nHello <|im_end|> \\n  <|im_start|>assistant\\n  Hi <|im_end|> \\n
    open         body         close      rest open                     body close  rest

All but the body are the same ids every time. The bodies of a whole chunk are encoded in one call; the rest
is arithmetic on columns, and one copy of the tokens. What stands between two control tokens is one text,
except that an assistant's header is encoded apart from its body: in serving it belongs to the prompt, so
the ids of a prompt are a prefix of the ids of the training row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import RecordError
from chatmill.format.body import cut_bodies
from chatmill.format.chat_format import ChatFormat
from chatmill.format.compiled import BEGIN, CLOSE, END, OPEN, PARTS, REST, CompiledFormat, RenderTokenizer
from chatmill.format.message_columns import MessageColumns, lay_out
from chatmill.records import ChatColumns, Record
from chatmill.records.record import ROLES
from chatmill.rows import (
    EMPTY,
    NO_MESSAGE,
    ORIGIN,
    OWN_ID,
    SPAN,
    File,
    Ids,
    Index,
    Part,
    Role,
    Rows,
    Rule,
    TrainOn,
    copy_tokens,
    offsets,
    weigh,
)

SOURCE = attrgetter("source", "file")


def renderable(
    records: Iterable[Record], format: ChatFormat, on_reject: Callable[[RecordError], None] | None = None
) -> Iterator[Record]:
    """The records that the format can write; the others go to `on_reject`, or raise if there is none."""
    if format.turns.keys() >= set(ROLES):
        yield from records
        return
    for record in records:
        for number, message in enumerate(record.messages):
            if message.role not in format.turns:
                fault = RecordError(
                    f"message {number} has role {message.role}, which the format {format.name} cannot write",
                    f"it writes {', '.join(format.turns)}; add [{message.role}] to the format",
                    kind="role_not_in_format",
                ).at(record.file, record.line, record.id)
                if on_reject is None:
                    raise fault
                on_reject(fault)
                break
        else:
            yield record


def render(
    records: Sequence[Record],
    format: ChatFormat,
    tokenizer: RenderTokenizer,
    *,
    train_on: TrainOn = "assistant",
    plates: CompiledFormat | None = None,
) -> Rows:
    """One row for each record: its tokens, and for each of them what it is and whether it is trained.

    Who renders often gives the `plates`, which are the same each time.
    """
    if not records:
        return EMPTY
    plates = plates or CompiledFormat(format, tokenizer)
    sheet = lay_out(records, format, plates)
    return _print(sheet, plates, tokenizer, *tokenizer.encode_batch(sheet.texts), train_on=train_on)


def render_chunks(
    records: Iterable[Record],
    format: ChatFormat,
    tokenizer: RenderTokenizer,
    *,
    train_on: TrainOn = "assistant",
    chunk: int = 512,
) -> Iterator[Rows]:
    """All records, `chunk` at a time, so that memory does not grow with their number and stays in the cache."""
    plates = CompiledFormat(format, tokenizer)
    stream = iter(records)
    while batch := list(islice(stream, chunk)):
        yield render(batch, format, tokenizer, train_on=train_on, plates=plates)


def prompt_ids(record: Record, format: ChatFormat, tokenizer: RenderTokenizer) -> list[int]:
    """What a server would feed the model to get the next answer: a prefix of the row it was trained on."""
    plates = CompiledFormat(format, tokenizer)
    ids: list[int] = render([record], format, tokenizer).ids.tolist()
    return ids[: len(ids) - len(plates.fixed("assistant", END))] + plates.fixed("assistant", OPEN)


def _print(
    sheet: MessageColumns,
    plates: CompiledFormat,
    tokenizer: RenderTokenizer,
    flat: Ids,
    text_start: Index,
    *,
    train_on: TrainOn,
) -> Rows:
    """The rows of a sheet whose texts have been encoded."""
    messages, roles, bodies = sheet.messages, sheet.roles, sheet.bodies
    first_message, text_of = sheet.first_message, sheet.text_of
    # Pieces: five fixed ones a message, and its body, which is one piece but for the messages in `bodies`.
    widths = np.full(len(roles), 6, dtype=np.int64)
    for at, pieces in bodies.items():
        widths[at] = 5 + len(pieces)
    base = offsets(widths)
    lengths = np.empty(base[-1], dtype=np.int64)
    starts = np.empty(base[-1], dtype=np.int64)
    parts = np.empty(base[-1], dtype=np.uint8)
    rules = np.empty(base[-1], dtype=np.uint8)
    after = base[1:]
    places: dict[int, Index | slice] = {
        BEGIN: base[:-1],
        OPEN: base[:-1] + 1,
        CLOSE: after - 3,
        REST: after - 2,
        END: after - 1,
    }
    body: Index | slice = base[:-1] + 2
    if not bodies:
        # The same places, said in a way that is quicker to write to.
        steps = [slice(at, None, 6) for at in range(6)]
        places, body = dict(zip((BEGIN, OPEN, CLOSE, REST, END), (*steps[:2], *steps[3:]), strict=True)), steps[2]
    for column, where in places.items():
        lengths[where] = plates.lengths[roles, column]
        starts[where] = plates.starts[roles, column] + len(flat)
        parts[where] = PARTS[column]
        rules[where] = plates.rules[column]
    inner = np.ones(len(roles), dtype=bool)
    inner[first_message[:-1]] = False
    lengths[base[:-1][inner]] = 0
    inner[first_message[:-1]] = True
    inner[first_message[1:] - 1] = False
    lengths[after[inner] - 1] = 0

    lengths[body] = text_start[text_of + 1] - text_start[text_of]
    starts[body] = text_start[text_of]
    # Texts that recur are copied from a pool of their own, so that all others stand in their order.
    again = np.flatnonzero(text_of != np.arange(len(text_of)))
    recurring, which = np.unique(text_of[again], return_inverse=True)
    pool = copy_tokens(flat, text_start[recurring], text_start[recurring + 1] - text_start[recurring])
    pool_start = len(flat) + len(plates.literals) + offsets(text_start[recurring + 1] - text_start[recurring])
    starts[base[again] + 2] = pool_start[which]
    parts[body] = Part.CONTENT
    rules[body] = plates.body_rule
    if bodies:
        cuts = cut_bodies(bodies, flat, text_start, tokenizer, plates.control_start)
        inside = np.concatenate([np.arange(len(pieces)) + base[at] + 2 for at, pieces in bodies.items()])
        starts[inside], lengths[inside], parts[inside] = cuts
        rules[inside] = plates.body_rule

    # Flags: a weight of the message's own, and turns that never closed.
    weights = np.zeros(base[-1], dtype=np.float32)
    for at in sheet.odd:
        message = messages[at]
        if message.weight is not None or not message.complete:
            of_message = slice(base[at], base[at + 1])
            decided = rules[of_message] == Rule.ROLE
            if message.complete:
                rules[of_message][decided] = Rule.FLAG
                weights[of_message][decided] = message.weight
            else:
                rules[of_message][decided] = Rule.UNFINISHED
                lengths[after[at] - 3 : after[at] - 1] = 0

    kept = np.flatnonzero(lengths)
    spans = np.zeros(len(kept), dtype=SPAN)
    spans["length"] = lengths.take(kept)
    numbers = np.repeat(_message_numbers(first_message, sheet.lead), widths)
    numbers[places[BEGIN]] = NO_MESSAGE
    spans["message"] = numbers.take(kept)
    spans["weight"] = weights.take(kept)
    spans["target"] = OWN_ID
    speakers = np.repeat(roles, widths)
    speakers[places[BEGIN]] = speakers[places[END]] = Role.NONE
    spans["role"] = speakers.take(kept)
    spans["part"] = parts.take(kept)
    spans["rule"] = rules.take(kept)
    first_span = np.searchsorted(kept, base[first_message])
    weigh(spans, first_span, train_on)
    origins, files = origins_of(sheet.records)
    ids = copy_tokens(flat, starts, lengths, np.concatenate([plates.literals, pool]))
    return Rows(ids, spans, first_span, origins, np.arange(len(sheet.records) + 1, dtype=np.int64), files)


def _message_numbers(first_message: Index, lead: Index) -> NDArray[np.uint32]:
    """The index of each message in its record; one that the format put in front has `NO_MESSAGE`, which is -1."""
    counts = np.diff(first_message)
    number = np.arange(first_message[-1], dtype=np.int64) - np.repeat(first_message[:-1] + lead, counts)
    return number.astype(np.uint32)


def origins_of(records: Sequence[Record]) -> tuple[NDArray[np.void], tuple[File, ...]]:
    """Where rows of one record each came from."""
    if isinstance(records, ChatColumns):
        origins = np.zeros(len(records), dtype=ORIGIN)
        origins["line"] = np.arange(records.line, records.line + len(records))
        return origins, (File(records.source, records.file),)
    sources = list(map(SOURCE, records))
    # Files are numbered as they come; a chunk is nearly always of one.
    numbers = {key: number for number, key in enumerate(dict.fromkeys(sources))}
    origins = np.zeros(len(records), dtype=ORIGIN)
    if len(numbers) > 1:
        origins["file"] = [numbers[key] for key in sources]
    origins["line"] = [record.line for record in records]
    return origins, tuple(File(*key) for key in numbers)
