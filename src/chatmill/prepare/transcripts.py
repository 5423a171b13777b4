"""Write conversations as transcripts: one line of text each, with as many turns as fit in the context length."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice

from chatmill.errors import RecordError
from chatmill.fit import turns_that_fit
from chatmill.format import TurnRenderer, transcript_turns
from chatmill.format.messages import messages_of
from chatmill.ledger import Ledger
from chatmill.records import Message, Record

CHUNK = 1024
WEIGHTS_LEFT_OUT = "weights_left_out"
"""The ledger reason for conversations with weights that cannot be stored in a transcript."""


def transcript_lines(
    records: Iterable[Record], renderer: TurnRenderer, context_length: int, ledger: Ledger
) -> Iterator[str]:
    """Yield one line for each conversation whose first exchange fits in the context length.

    Records with weight 0 are dropped. Transcripts cannot store weights, so all their answers have weight 1.
    """
    stream = iter(records)
    while chunk := list(islice(stream, CHUNK)):
        rows = renderer.render(chunk)
        ledger.add("rendered", rows=len(rows), tokens=len(rows.ids))
        fitting = (column.tolist() for column in (*turns_that_fit(rows, context_length), rows.lengths))
        for record, count, stored, length in zip(chunk, *fitting, strict=True):
            try:
                turns = transcript_turns(record, renderer.format)
            except RecordError as fault:
                ledger.add("dropped", fault.kind, rows=1, tokens=length)
                continue
            if not record.weight:
                ledger.add("dropped", "no_trained_tokens", rows=1, tokens=length)
                continue
            if not count:
                answered = any(message.role == "assistant" for message in record.messages)
                ledger.add("dropped", "first_pair_over_context" if answered else "no_pair", rows=1, tokens=length)
                continue
            ledger.add("stored", rows=1, tokens=stored)
            if stored < length:
                ledger.add("truncated", "pair_over_context", tokens=length - stored)
            if any(_has_weight(message, record) for message in messages_of(record, renderer.format)[:count]):
                ledger.add("noted", WEIGHTS_LEFT_OUT, rows=1, tokens=stored)
            # End each line with EOS, so that reading the file as lines or as a stream gives the same records.
            text = "".join(turns[:count]) + renderer.format.end
            plain = text.isprintable() and text == text.strip() and all(message.complete for message in record.messages)
            yield text if plain else json.dumps(text, ensure_ascii=False)


def _has_weight(message: Message, record: Record) -> bool:
    """Whether a message, or a range of its text, has a weight other than its role's default: 1 for answers, else 0.

    All weights are multiplied by the weight of the record.
    """
    by_role = float(message.role == "assistant")
    own = by_role if message.weight is None else message.weight
    return any(weight * record.weight != by_role for weight in (own, *(each for _, _, each in message.train_ranges)))
