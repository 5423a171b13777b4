"""`Tokenizer` adds the control tokens of a chat format to a tokenizer backend.

`token_positions` converts byte offsets in a text to token positions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError
from chatmill.rows import offsets
from chatmill.tokenizer.backend import Backend, Ids, Offsets, faults_of

try:
    from chatmill._native import _positions
except ImportError:  # pragma: no cover
    _positions = None  # type: ignore[assignment]

NEAR = 16
"""Number of tokens at the start of a text that are searched first, because they contain most boundaries."""


class Tokenizer:
    """Converts text to token ids and back. Text is never encoded as a control token.

    `control` maps the keys of a chat format, such as `eot`, to its control tokens. `added` maps control tokens that the
    backend does not have to ids above the backend's vocabulary.
    """

    def __init__(
        self, backend: Backend, *, name: str, control: Mapping[str, str], added: Mapping[str, int] | None = None
    ) -> None:
        added = added or {}
        ids = {**backend.control, **added}
        self.name = name
        self.engine = backend.engine
        self.control = dict(control)
        self.vocab_size = max([backend.vocab_size, *(id + 1 for id in added.values())])
        self.sha256 = _with_tokens(backend.sha256, added)
        self._backend = backend
        self.control_ids: Mapping[str, int] = ids
        """The ids of all control tokens in the vocabulary, including tokens that the format does not use."""
        self._added = list(added)
        self._special = {key: ids[token] for key, token in control.items()}
        self._tokens = {id: token for token, id in ids.items()}
        self._is_control = np.zeros(self.vocab_size, dtype=np.bool_)
        self._is_control[list(self._tokens)] = True
        self._ranges = _ranges(sorted(self._tokens))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Return the concatenated token ids of all texts, and offsets: text i is `ids[offsets[i]:offsets[i + 1]]`.

        The returned arrays can be read-only.
        """
        try:
            with faults_of(self.name, "a text could not be encoded", "remove the text"):
                ids, offsets = self._backend.encode_batch(texts)
        except DataError:
            _check_unicode(texts)
            raise
        # Check the ids again, in case a faulty backend produces a control token from text.
        if self._holds_control(ids):
            first = int(self._is_control[ids].argmax())
            token = self._tokens[int(ids[first])]
            index = int(np.searchsorted(offsets, first, side="right")) - 1
            raise DataError(
                f"{self.name}: text {index} of the batch was encoded as the control token {token}; remove the text"
            )
        return ids, offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence of token ids.

        Control tokens are decoded to their names, and the backend decodes the ids between control tokens. If the
        tokenizer is lossless, text that was encoded in one call is restored exactly.
        """
        array = np.asarray(ids, dtype=np.int64)
        self._check_ids(array)
        parts = []
        start = 0
        for stop in [*np.flatnonzero(self._is_control[array]).tolist(), len(array)]:
            if start < stop:
                with faults_of(self.name, "cannot decode these ids", "expected ids of this tokenizer"):
                    parts.append(self._backend.decode(array[start:stop].tolist()))
            if stop < len(array):
                parts.append(self._tokens[int(array[stop])])
            start = stop + 1
        return "".join(parts)

    def piece(self, id: int) -> bytes:
        """Return the bytes of a token, or the name of a control token as bytes."""
        self._check_ids(np.asarray([id], dtype=np.int64))
        if id in self._tokens:
            return self._tokens[id].encode()
        with faults_of(self.name, f"no token has id {id}", f"expected an id in use, from 0 to {self.vocab_size - 1}"):
            return self._backend.piece(id)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; the bytes are cached."""
        known = self._pieces
        for id in set(ids) - known.keys():
            known[id] = self.piece(id)
        return [known[id] for id in ids]

    @cached_property
    def _pieces(self) -> dict[int, bytes]:
        return {}

    def byte_lengths(self, ids: Ids) -> NDArray[np.int32]:
        """Return the length of each token in bytes."""
        lengths = self._byte_lengths.take(ids)
        if len(lengths) and lengths.min() < 0:
            new = np.unique(ids[lengths < 0])
            self._byte_lengths[new] = [len(self.piece(id)) for id in new.tolist()]
            lengths = self._byte_lengths.take(ids)
        return lengths

    @cached_property
    def _byte_lengths(self) -> NDArray[np.int32]:
        """For each id, the length of its token in bytes, or -1 if the length has not been computed yet."""
        lengths = np.full(self.vocab_size, -1, dtype=np.int32)
        if hasattr(self._backend, "byte_lengths"):
            ids, known = self._backend.byte_lengths()
            lengths[ids] = known
        return lengths

    def positions(
        self, ids: Ids, start: Offsets, stop: Offsets, *, size: Offsets, offset: Offsets
    ) -> tuple[Offsets, NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the `token_positions` of byte offsets in encoded texts; each text has the tokens ids[start:stop]."""
        if _positions is not None and ids.dtype == np.uint32:
            position, inside, exact = np.empty_like(start), np.empty(len(start), bool), np.empty(len(start), bool)
            begin, end, size, offset = (np.ascontiguousarray(each, np.int64) for each in (start, stop, size, offset))
            texts = np.ascontiguousarray(ids), self._byte_lengths, begin, end, size, offset
            if _positions.positions(*texts, position, inside, exact):
                return position, inside, exact
        return token_positions(self.byte_lengths(ids), start, stop, size=size, offset=offset)

    def token_id(self, token: str) -> int | None:
        """Return the id of a control token, or None if the vocabulary does not contain the token."""
        return self.control_ids.get(token)

    def opened_for(self, control: Mapping[str, str]) -> Tokenizer:
        """Return a tokenizer with the same vocabulary, but with the control tokens of another chat format."""
        added = {token: self.control_ids[token] for token in self._added}
        return Tokenizer(self._backend, name=self.name, control=control, added=added)

    def special_token_ids(self) -> dict[str, int]:
        """Return a dict from the format's key for each control token, such as `eot`, to its id."""
        return dict(self._special)

    def state(self, *, added_tokens: bool) -> dict[str, Any]:
        """Return the metadata that a dataset stores about its tokenizer.

        The key `besides` lists the added tokens that the format does not use.
        """
        besides = [token for token in self._added if token not in self.control.values()]
        return {
            "name": self.name,
            "sha256": self.sha256,
            "vocab_size": self.vocab_size,
            "special_token_ids": self.special_token_ids(),
            "control": dict(self.control),
            "added_tokens": added_tokens,
            **({"besides": besides} if besides else {}),
        }

    def _holds_control(self, ids: Ids) -> bool:
        if len(self._ranges) > 8:
            return bool(self._is_control.take(ids).any())
        if not len(ids):
            return False
        # Control tokens often have the smallest or the largest ids, so most texts have only ids outside all ranges.
        smallest, largest = int(ids.min()), int(ids.max())
        near = [(first, count) for first, count in self._ranges if first <= largest and smallest < first + count]
        # Comparing with a few ranges is faster than a lookup table. For ids below a range, the unsigned difference
        # wraps around to a large number, so one comparison tests both bounds.
        return any(bool(((ids - np.uint32(first)) < np.uint32(count)).any()) for first, count in near)

    def _check_ids(self, ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise DataError(f"{self.name}: no token has id {outside[0]}; expected 0 to {self.vocab_size - 1}")


def _with_tokens(sha256: str, added: Mapping[str, int]) -> str:
    """Return a hash of the backend and of the tokens that were added to it."""
    if not added:
        return sha256
    return hashlib.sha256(f"{sha256}\n{json.dumps(added, sort_keys=True)}".encode()).hexdigest()


def _ranges(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return each run of consecutive ids as (first id, number of ids)."""
    runs = np.split(np.array(ids, dtype=np.int64), np.flatnonzero(np.diff(ids) != 1) + 1)
    return [(int(run[0]), len(run)) for run in runs if len(run)]


def _check_unicode(texts: Sequence[str]) -> None:
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"text {index} of the batch contains a lone surrogate U+{ord(text[error.start]):04X}"
            raise DataError(f"{what} at character {error.start}; expected valid Unicode") from error


def token_positions(
    byte_lengths: NDArray[np.integer], start: Offsets, stop: Offsets, *, size: Offsets, offset: Offsets
) -> tuple[Offsets, NDArray[np.bool_], NDArray[np.bool_]]:
    """Convert a byte `offset` in each text to a token position; a text has `size` bytes and the tokens [start, stop).

    The position is the first token that starts at or after the offset. Also return whether the previous token extends
    past the offset, and whether the position is exact. If the tokens do not decode to the text, the position is only an
    estimate.

        text     Hello|world      offset 5
        tokens   Hel lo wor ld    position 2
        tokens   Hel low or ld    position 2, inside a token

    A token that extends past the offset belongs to the text before the offset. Offsets are counted from the end of the
    text, because some tokenizers add a space before the first token. `byte_lengths` contains the length of every token
    in bytes.
    """
    total = _range_sums(byte_lengths, start, stop)
    added = total - size
    target = offset + added
    position, begin = start.copy(), np.zeros(len(start), dtype=np.int64)
    ahead = np.flatnonzero((begin < target) & (position < stop))
    for _ in range(NEAR):
        # Search token by token first, because nearly all boundaries are a few tokens after the start of a text.
        if not len(ahead):
            break
        begin[ahead] += byte_lengths[position[ahead]]
        position[ahead] += 1
        ahead = ahead[(begin[ahead] < target[ahead]) & (position[ahead] < stop[ahead])]
    if len(ahead):
        begins = offsets(byte_lengths)
        from_start = begins[start[ahead]]
        position[ahead] = np.clip(np.searchsorted(begins, from_start + target[ahead]), start[ahead], stop[ahead])
        begin[ahead] = begins[position[ahead]] - from_start
    return position, begin != target, (added == 0) | (added == 1)


def _range_sums(values: NDArray[Any], start: Offsets, stop: Offsets) -> Offsets:
    edges = np.stack([start, stop], axis=1).ravel()
    # Append one value, because a range may start after the last value. Empty ranges are set to 0 below, because
    # `reduceat` does not support them.
    sums = np.add.reduceat(np.append(values, values.dtype.type(0)), edges, dtype=np.int64)[::2]
    return np.where(start < stop, sums, 0)
