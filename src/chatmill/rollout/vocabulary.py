"""Vocabulary: a tokenizer as bytes a token, and texts as ids that say exactly those bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError, UsageError, one_line
from chatmill.rows import Ids, Index, offsets

COORDINATES = tuple(f"<|coord_{k}|>" for k in range(1000))
"""The tokens of the places 0 to 999 along an axis."""
REMEMBERED = 1 << 16
"""Texts whose ids are remembered."""
COORDINATE = {token: k for k, token in enumerate(COORDINATES)}


class RolloutTokenizer(Protocol):
    """What rollouts need of a tokenizer; `chatmill.tokenizer.Tokenizer` has it."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, NDArray[np.int64]]: ...

    def piece(self, id: int) -> bytes: ...

    def token_id(self, token: str) -> int | None: ...

    def special_token_ids(self) -> Mapping[str, int]: ...

    def __hash__(self) -> int: ...


class Vocabulary:
    def __init__(self, tokenizer: RolloutTokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, bytes | None] = {}
        self._exact: dict[str, list[int]] = {}

    def pieces(self, ids: Sequence[int]) -> list[bytes | None]:
        """The bytes of each id; None for an id that the tokenizer does not have."""
        known = self._pieces
        for id in set(ids).difference(known):
            try:
                known[id] = self._tokenizer.piece(id) if 0 <= id < self._tokenizer.vocab_size else None
            except DataError:
                # A hole in the vocabulary.
                known[id] = None
        return [known[id] for id in ids]

    def text(self, ids: Sequence[int]) -> bytes:
        """The bytes of ids that the tokenizer has."""
        return b"".join([piece or b"" for piece in self.pieces(ids)])

    def exact(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, which say just its bytes, whatever the tokenizer does to texts of its own accord.

        `DataError` for a text that no tokens of the vocabulary say. Answers repeat themselves, so that most texts
        were encoded before.
        """
        if new := [text for text in dict.fromkeys(texts) if text not in self._exact]:
            if len(self._exact) > REMEMBERED:
                self._exact.clear()
                new = list(dict.fromkeys(texts))
            self._exact |= zip(new, self._encode(new), strict=True)
        return [self._exact[text] for text in texts]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        flat, first = self._tokenizer.encode_batch(texts)
        ids = flat.tolist()
        found = [ids[start:stop] for start, stop in pairwise(first.tolist())]
        # Nearly always all of them are exact, which is quicker to see at once.
        raw = [text.encode() for text in texts]
        if self.text(ids) == b"".join(raw) and np.array_equal(self.starts(ids)[first], sizes_to_starts(raw)):
            return found
        return [self._mended(of_text, text) for of_text, text in zip(found, texts, strict=True)]

    def starts(self, ids: Sequence[int]) -> Index:
        """Where each token begins in the bytes they all say, and their end."""
        return sizes_to_starts([piece or b"" for piece in self.pieces(ids)])

    def cut(self, kept: bytes) -> list[int] | None:
        """Ids that say the first bytes of a token; None if there are none."""
        try:
            return self.exact([kept.decode()])[0]
        except (UnicodeDecodeError, DataError):
            # Half a character can still be said by tokens for single bytes.
            return self._segment(kept)

    @cached_property
    def coordinate_ids(self) -> list[int]:
        """The ids of `<|coord_0|>` to `<|coord_999|>`."""
        found = [self._tokenizer.token_id(token) for token in COORDINATES]
        ids = [id for id in found if id is not None]
        if len(ids) < len(found):
            missing = COORDINATES[found.index(None)]
            raise UsageError(f"{self._tokenizer.name}: the vocabulary lacks {missing}; add the coordinate tokens to it")
        return ids

    def _mended(self, ids: list[int], text: str) -> list[int]:
        said, wanted = self.text(ids), text.encode()
        if said == wanted:
            return ids
        if said == b" " + wanted:
            # SentencePiece puts a space before a text; only the first token has to do with it.
            first = next(at for at, piece in enumerate(self.pieces(ids)) if piece)
            head = self._segment((self.pieces(ids)[first] or b"")[1:])
            if head is not None:
                return head + ids[first + 1 :]
        if (segmented := self._segment(wanted)) is not None:
            return segmented
        raise DataError(
            f'{self._tokenizer.name}: cannot write "{one_line(text)}" exactly; use a tokenizer that loses nothing'
        )

    def _segment(self, wanted: bytes) -> list[int] | None:
        """The fewest ids that say these bytes, the longer ones first where there is a choice; None if none do."""
        ids, longest = self._by_bytes
        best: list[tuple[int, int] | None] = [None] * len(wanted) + [(0, 0)]
        for start in range(len(wanted) - 1, -1, -1):
            for stop in range(min(len(wanted), start + longest), start, -1):
                rest = best[stop]
                if rest is not None and wanted[start:stop] in ids:
                    known = best[start]
                    if known is None or rest[0] + 1 < known[0]:
                        best[start] = (rest[0] + 1, stop)
        out, at = [], 0
        while at < len(wanted):
            step = best[at]
            if step is None:
                return None
            out.append(ids[wanted[at : step[1]]])
            at = step[1]
        return out

    @cached_property
    def _by_bytes(self) -> tuple[dict[bytes, int], int]:
        """The first id of every text that a token says, control tokens left out, and the length of the longest."""
        ids: dict[bytes, int] = {}
        for id, piece in enumerate(self.pieces(range(self._tokenizer.vocab_size))):
            if piece and self._tokenizer.token_id(piece.decode("utf-8", "replace")) != id:
                ids.setdefault(piece, id)
        return ids, max(map(len, ids), default=0)


def sizes_to_starts(pieces: Sequence[bytes]) -> Index:
    """Where each of several pieces begins if they stand one after the other, and their end."""
    return offsets(np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces)))


@lru_cache(maxsize=8)
def vocabulary_of(tokenizer: RolloutTokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer, made once: its tables are worth keeping."""
    return Vocabulary(tokenizer)
