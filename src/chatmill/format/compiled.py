"""Plates: a format cast into the ids of one tokenizer, ready to print messages with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from chatmill.errors import DataError
from chatmill.format.chat_format import TRAINABLE, ChatFormat
from chatmill.records import ROLES
from chatmill.rows import Ids, Index, Part, Rule, offsets

BEGIN, OPEN, CLOSE, REST, END = range(5)
"""The pieces of a message that a format fixes; columns of the tables below."""
PARTS = np.array([Part.OPEN, Part.OPEN, Part.CLOSE, Part.CLOSE, Part.EOS], dtype=np.uint8)
CODE: dict[str, int] = {role: code for code, role in enumerate(ROLES)}

Pieces = list[tuple[str | None, str]]


class RenderTokenizer(Protocol):
    """What rendering needs of a tokenizer."""

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Index]: ...

    def special_token_ids(self) -> Mapping[str, int]: ...

    def piece(self, id: int) -> bytes: ...


class CompiledFormat:
    """The fixed pieces of every role as ids in `literals`, and the text that joins the bodies."""

    def __init__(self, format: ChatFormat, tokenizer: RenderTokenizer) -> None:
        opened_for = getattr(tokenizer, "control", None)
        if opened_for is not None and dict(opened_for) != dict(format.tokens):
            raise DataError(
                f"the tokenizer was opened for other control tokens ({', '.join(opened_for.values()) or 'none'}); "
                f"open it for those of the format {format.name}"
            )
        ids = tokenizer.special_token_ids()
        control = {key: int(ids[key]) for key in format.tokens}
        self.prefix: list[str] = []
        self.suffix: list[str] = []
        fixed: list[Pieces] = []
        for role in ROLES:
            turn = format.turns.get(role)
            opening = format.split(turn.open) if turn else []
            closing = format.split(turn.close) if turn else []
            # An assistant's header stays apart from its body: in serving it belongs to the prompt.
            joins = role != "assistant" and opening and opening[-1][0] is None
            self.prefix.append(opening.pop()[1] if joins else "")
            self.suffix.append(closing.pop(0)[1] if closing and closing[0][0] is None else "")
            last = max((at for at, (key, _) in enumerate(closing) if key is not None), default=-1)
            close, rest = closing[: last + 1], closing[last + 1 :]
            fixed += [format.split(format.begin), opening, close, rest, format.split(format.end)]

        cast = _cast(fixed, control, tokenizer)
        self.lengths = np.array([len(piece) for piece in cast], dtype=np.int64).reshape(len(ROLES), 5)
        self.starts = offsets(self.lengths.ravel())[:-1].reshape(len(ROLES), 5)
        # Control tokens that stand inside bodies follow the fixed pieces, one each.
        self.control_start = {key: int(self.lengths.sum()) + at for at, key in enumerate(control)}
        self.literals = np.array([i for piece in cast for i in piece] + list(control.values()), dtype=np.uint32)

        opening_rule, self.body_rule, closing_rule = (
            Rule.ROLE if part in format.trained else Rule.HEADER for part in TRAINABLE
        )
        self.rules = np.array([Rule.HEADER, opening_rule, closing_rule, Rule.HEADER, Rule.HEADER], dtype=np.uint8)

    def fixed(self, role: str, column: int) -> list[int]:
        """The ids of one fixed piece."""
        start, length = int(self.starts[CODE[role], column]), int(self.lengths[CODE[role], column])
        ids: list[int] = self.literals[start : start + length].tolist()
        return ids


def _cast(fixed: Sequence[Pieces], control: Mapping[str, int], tokenizer: RenderTokenizer) -> list[list[int]]:
    texts = [text for pieces in fixed for key, text in pieces if key is None]
    flat, starts = tokenizer.encode_batch(texts)
    encoded = (flat[start:stop].tolist() for start, stop in pairwise(starts))
    return [[i for key, _ in pieces for i in (next(encoded) if key is None else [control[key]])] for pieces in fixed]
