"""The tokenizer port: what a tokenizer file must be able to do, and what others may ask of a tokenizer.

A backend knows text only. `Tokenizer` adds the control tokens of one format beside it, so that the rule
"text never becomes a control token" is held in one place for every backend.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ChatmillError, DataError, one_line

Ids = NDArray[np.uint32]
Offsets = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TextColumns(Sequence[str]):
    """Texts that lie in one buffer: before[kind] + data[start:stop] + after[kind], in UTF-8.

    An engine that knows them needs no string for each; to any other they are a sequence of strings.
    """

    data: bytes
    start: Offsets
    stop: Offsets
    kind: NDArray[np.uint8]
    before: list[bytes]
    after: list[bytes]

    def __len__(self) -> int:
        return len(self.kind)

    def __iter__(self) -> Iterator[str]:
        data, before, after = self.data, self.before, self.after
        for kind, start, stop in zip(self.kind.tolist(), self.start.tolist(), self.stop.tolist(), strict=True):
            yield (before[kind] + data[start:stop] + after[kind]).decode()

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        kind, start, stop = int(self.kind[index]), int(self.start[index]), int(self.stop[index])
        return (self.before[kind] + self.data[start:stop] + self.after[kind]).decode()


class TextTokenizer(Protocol):
    """All that the documented functions need of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def special_token_ids(self) -> Mapping[str, int]: ...


class Backend(Protocol):
    """What one kind of tokenizer file can do. Text in, ids out; no control token is ever produced from text."""

    @property
    def engine(self) -> str:
        """What encodes."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def sha256(self) -> str: ...

    @property
    def control(self) -> Mapping[str, int]:
        """Every token that is kept out of text, with its id."""

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """All texts at once: flat ids, and len(texts)+1 offsets into them."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids that hold no control token."""

    def piece(self, id: int) -> bytes:
        """The bytes one id stands for; a `KeyError` where the vocabulary has a hole."""


def is_markup(token: str) -> bool:
    """Whether a token reads as a marker: `<think>`, `[INST]`.

    Some vocabularies list such tokens as plain ones, yet no author of a message means them as control.
    """
    return len(token) > 2 and token[0] in "<[" and token[-1] in ">]"


def aliases(control: Mapping[str, int]) -> dict[str, str]:
    """For each control token a name for its place in the model that no text can hold.

    Taking the token out would renumber what follows it; under another name its id stays and text never meets it.
    The secret is new in every process, so nobody can write the name into a message; no id depends on it.
    """
    secret = secrets.token_hex(16)
    return {token: f"\U0010ffff{secret}:{id}" for token, id in control.items()}


def flat(arrays: Sequence[NDArray[np.generic]]) -> tuple[Ids, Offsets]:
    """One array of ids a text, joined.

    [7 8] [] [9]  ->  [7 8 9], [0 2 2 3]
    """
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    ids = np.concatenate(arrays) if arrays else np.empty(0)
    return ids.astype(np.uint32), offsets


@contextmanager
def faults_of(place: str, what: str, right: str) -> Iterator[None]:
    """Whatever a library raises inside becomes one line: `place: what (its own words); right`."""
    try:
        yield
    except (ChatmillError, MemoryError):
        raise
    except BaseException as error:
        # A panic in Rust is a BaseException of a type that cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        words = one_line(f"{type(error).__name__}: {error}", 160)
        raise DataError(f"{place}: {what} ({words}); {right}") from error
