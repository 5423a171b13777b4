"""A chat format compiled to token ids for one tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.format.chat_format import TRAINABLE, ChatFormat
from chatmill.records import ROLES
from chatmill.rows import Ids, Index, Part, Rule, offsets

BEGIN, OPEN, BODY, CLOSE, AFTER, END = range(6)
"""The pieces of a message, columns of the tables below. All but the body are the same for every message of a role."""
PARTS = (Part.OPEN, Part.OPEN, Part.CONTENT, Part.CLOSE, Part.CLOSE, Part.EOS)
ROLE_CODES: dict[str, int] = {role: code for code, role in enumerate(ROLES)}


class RenderTokenizer(Protocol):
    """The methods of a tokenizer that rendering uses."""

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Index]: ...

    def special_token_ids(self) -> Mapping[str, int]: ...

    def byte_lengths(self, ids: Ids) -> NDArray[np.int64]: ...


class CompiledFormat:
    """The ids of the fixed pieces of every role, concatenated in `literals`, and the text around each body."""

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
        """By role: text of the opener and the closer that is encoded together with the body."""
        fixed: list[list[tuple[str | None, str]]] = []
        for role in ROLES:
            turn = format.turns.get(role)
            opening = format.split(turn.open) if turn else []
            closing = format.split(turn.close) if turn else []
            # An assistant's header is encoded apart from its body: in inference it is the end of the prompt.
            joins = role != "assistant" and opening and opening[-1][0] is None
            self.prefix.append(opening.pop()[1] if joins else "")
            self.suffix.append(closing.pop(0)[1] if closing and closing[0][0] is None else "")
            last = max((at for at, (key, _) in enumerate(closing) if key is not None), default=-1)
            close, after = closing[: last + 1], closing[last + 1 :]
            fixed += [format.split(format.begin), opening, [], close, after, format.split(format.end)]

        flat, start = tokenizer.encode_batch([text for pieces in fixed for key, text in pieces if key is None])
        texts = (flat[first:stop].tolist() for first, stop in pairwise(start))
        encoded = [
            [i for key, _ in pieces for i in (next(texts) if key is None else [control[key]])] for pieces in fixed
        ]
        self.lengths = np.array([len(ids) for ids in encoded], dtype=np.int64).reshape(len(ROLES), len(PARTS))
        self.starts = offsets(self.lengths.ravel())[:-1].reshape(self.lengths.shape)
        # Control tokens for use inside of bodies follow the fixed pieces, one each.
        self.control_start = {key: int(self.lengths.sum()) + at for at, key in enumerate(control)}
        self.literals = np.array([i for ids in encoded for i in ids] + list(control.values()), dtype=np.uint32)

        opening_rule, body_rule, closing_rule = (
            Rule.ROLE if part in format.trained else Rule.HEADER for part in TRAINABLE
        )
        self.rules = (Rule.HEADER, opening_rule, body_rule, closing_rule, Rule.HEADER, Rule.HEADER)

    def fixed(self, role: str, piece: int) -> list[int]:
        """The ids of one fixed piece."""
        start, length = int(self.starts[ROLE_CODES[role], piece]), int(self.lengths[ROLE_CODES[role], piece])
        ids: list[int] = self.literals[start : start + length].tolist()
        return ids
