"""Map token ids to bytes, and encode strings to token ids that decode to exactly the same string."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from chatmill.errors import DataError, UsageError, one_line
from chatmill.rows import Index, copy_ranges, offsets
from chatmill.tokenizer import Tokenizer

COORDINATES = tuple(f"<|coord_{k}|>" for k in range(1000))
"""The coordinate tokens `<|coord_0|>` to `<|coord_999|>`."""
CACHED = 1 << 16
"""Maximum number of strings whose token ids are cached."""
UNSEEN, MISSING = -1, -2
"""Values in place of a token's size in bytes: not known yet (UNSEEN), or the vocabulary has no such token (MISSING)."""
COORDINATE = {token: k for k, token in enumerate(COORDINATES)}


class _TokenBytes(dict[int, bytes | None]):
    """Maps each token id to its bytes, or to None if the vocabulary does not contain the id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, id: int) -> bytes | None:
        try:
            self[id] = self._tokenizer.piece(id) if 0 <= id < self._tokenizer.vocab_size else None
        except DataError:
            # The vocabulary has a gap at this id.
            self[id] = None
        return self[id]


class Vocabulary:
    """Maps token ids to bytes, and strings to token ids that decode to exactly the same string."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = _TokenBytes(tokenizer)
        # The bytes of all tokens seen so far, and the start and size of each token. The first and last entry are for
        # ids outside the vocabulary.
        self._bytes = np.empty(0, dtype=np.uint8)
        self._start = np.zeros(2, dtype=np.int64)
        self._size = np.full(2, MISSING, dtype=np.int64)
        self._exact: dict[str, list[int]] = {}
        self.stretches: dict[Any, Any] = {}
        """Cached `EncodedStretch` objects."""

    def pieces(self, ids: Sequence[int]) -> list[bytes | None]:
        """Return the bytes of each token, or None for ids that the vocabulary does not contain."""
        return list(map(self._pieces.__getitem__, ids))

    def decode(self, ids: Index) -> tuple[bytes, Index]:
        """Decode the ids before the first unknown id; return the bytes, and the byte offset of each token followed by
        the total number of bytes.
        """
        places = ids + 1
        size = self._size.take(places, mode="clip")
        if size.min(initial=0) < 0:
            self._look_up(ids)
            size = self._size.take(places, mode="clip")
            known = np.append(size, MISSING) >= 0
            size = size[: known.argmin()]
        start, to = self._start.take(places[: len(size)]), offsets(size)
        data = np.empty(to[-1], dtype=np.uint8)
        copy_ranges(self._bytes, start, start + size, data, to[:-1])
        return data.tobytes(), to

    def _look_up(self, ids: Index) -> None:
        if (count := self._tokenizer.vocab_size + 2) > len(self._size):
            more = count - len(self._size)
            self._size = np.concatenate([self._size[:-1], np.full(more, UNSEEN), [MISSING]])
            self._start = np.append(self._start, np.zeros(more, dtype=np.int64))
        within = np.unique(ids[(ids >= 0) & (ids < count - 2)])
        new = within[self._size[within + 1] == UNSEEN]
        pieces = self.pieces(new.tolist())
        self._size[new + 1] = [MISSING if piece is None else len(piece) for piece in pieces]
        self._start[new + 1] = len(self._bytes) + sizes_to_starts([piece or b"" for piece in pieces])[:-1]
        data = b"".join([piece or b"" for piece in pieces])
        self._bytes = np.append(self._bytes, np.frombuffer(data, dtype=np.uint8))

    def is_control(self, id: int) -> bool:
        """Return whether an id is a control token, which the encoding of ordinary text never contains."""
        piece = self._pieces[id]
        return piece is not None and self._tokenizer.token_id(piece.decode("utf-8", "replace")) == id

    def text(self, ids: Sequence[int]) -> bytes:
        """Decode token ids to bytes; unknown ids are skipped."""
        return b"".join([piece or b"" for piece in self.pieces(ids)])

    def exact(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each string to token ids that decode to exactly the same bytes, even if the tokenizer normalizes text.

        Raises `DataError` if the vocabulary cannot represent a string. Results are cached.
        """
        if new := [text for text in dict.fromkeys(texts) if text not in self._exact]:
            if len(self._exact) > CACHED:
                self._exact.clear()
                new = list(dict.fromkeys(texts))
            self._exact |= zip(new, self.encode(new), strict=True)
        return [self._exact[text] for text in texts]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode strings as `exact` does, but without the cache."""
        flat, first = self._tokenizer.encode_batch(texts)
        ids = flat.tolist()
        encoded = [ids[start:stop] for start, stop in pairwise(first.tolist())]
        # Fast path: usually, all texts are encoded exactly.
        raw = [text.encode() for text in texts]
        if self.text(ids) == b"".join(raw) and np.array_equal(self.starts(ids)[first], sizes_to_starts(raw)):
            return encoded
        return [self._made_exact(of_text, text) for of_text, text in zip(encoded, texts, strict=True)]

    def starts(self, ids: Sequence[int]) -> Index:
        """Return the byte offset of each token, followed by the total number of bytes."""
        return sizes_to_starts([piece or b"" for piece in self.pieces(ids)])

    def cut(self, kept: bytes) -> list[int] | None:
        """Return token ids that decode to `kept`, the first bytes of a token that is cut in two, or None if that is
        impossible.
        """
        try:
            return self.exact([kept.decode()])[0]
        except (UnicodeDecodeError, DataError):
            # Single-byte tokens can represent part of a character.
            return self._segment(kept)

    @cached_property
    def coordinate_ids(self) -> list[int]:
        """Return the ids of `<|coord_0|>` to `<|coord_999|>`."""
        ids = [id for token in COORDINATES if (id := self._tokenizer.token_id(token)) is not None]
        if len(ids) < len(COORDINATES):
            missing = next(token for token in COORDINATES if self._tokenizer.token_id(token) is None)
            raise UsageError(f"{self._tokenizer.name}: the vocabulary lacks {missing}; add the coordinate tokens")
        return ids

    @cached_property
    def coordinate_array(self) -> Index:
        return np.array(self.coordinate_ids, dtype=np.int64)

    def _made_exact(self, ids: list[int], text: str) -> list[int]:
        spelled, wanted = self.text(ids), text.encode()
        if spelled == wanted:
            return ids
        if spelled == b" " + wanted:
            # SentencePiece may add a space to the first token. In that case, replace only the first token.
            first = next(at for at, piece in enumerate(self.pieces(ids)) if piece)
            head = self._segment((self.pieces(ids)[first] or b"")[1:])
            if head is not None:
                return head + ids[first + 1 :]
        if (segmented := self._segment(wanted)) is not None:
            return segmented
        raise DataError(f'{self._tokenizer.name}: cannot encode "{one_line(text)}" exactly; use a lossless tokenizer')

    def _segment(self, wanted: bytes) -> list[int] | None:
        """Return the shortest sequence of token ids that decodes to `wanted`, or None if there is none. Among equally
        short sequences, return one that starts with the longest token.
        """
        ids, longest = self._by_bytes
        best: list[tuple[int, int] | None] = [None] * len(wanted) + [(0, 0)]
        for start in range(len(wanted) - 1, -1, -1):
            for stop in range(min(len(wanted), start + longest), start, -1):
                tail = best[stop]
                if tail is not None and wanted[start:stop] in ids:
                    known = best[start]
                    if known is None or tail[0] + 1 < known[0]:
                        best[start] = (tail[0] + 1, stop)
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
        """Return a dict from token bytes to ids, without control tokens, and the length of the longest token."""
        ids: dict[bytes, int] = {}
        for id, piece in enumerate(self.pieces(range(self._tokenizer.vocab_size))):
            if piece and self._tokenizer.token_id(piece.decode("utf-8", "replace")) != id:
                ids.setdefault(piece, id)
        return ids, max(map(len, ids), default=0)


def id_array(ids: Sequence[int] | Index) -> Index:
    """Return token ids as an int64 array, with -1 in place of ids that are out of range."""
    if isinstance(ids, np.ndarray):
        return ids.astype(np.int64)
    try:
        return np.fromiter(ids, np.int64, len(ids))
    except OverflowError:
        return np.array([id if -1 <= id < 1 << 62 else -1 for id in map(int, ids)], dtype=np.int64)


def sizes_to_starts(pieces: Sequence[bytes]) -> Index:
    """Return the start offset of each piece in the concatenated bytes, followed by the total number of bytes."""
    return offsets(np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces)))


@lru_cache(maxsize=8)
def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return the cached `Vocabulary` of a tokenizer."""
    return Vocabulary(tokenizer)
