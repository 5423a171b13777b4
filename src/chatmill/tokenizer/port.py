"""The tokenizer port: text to ids and back, with control tokens kept apart from text.

A backend knows text only. `Tokenizer` adds the control tokens of one format beside it, so that the rule
"text never becomes a control token" is held in one place for every backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]
Offsets = NDArray[np.int64]


class TextTokenizer(Protocol):
    """All that the documented functions need of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def special_token_ids(self) -> Mapping[str, int]: ...


class Backend(Protocol):
    """What one kind of tokenizer file can do. Text in, ids out; no control token is ever produced from text."""

    vocab_size: int
    sha256: str

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """All texts at once: flat ids, and len(texts)+1 offsets into them."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids that hold no control token."""

    def piece(self, id: int) -> bytes:
        """The bytes one id stands for."""

    def control_id(self, token: str) -> int | None:
        """The id of a control token this vocabulary carries, else None."""

    def control_ids(self) -> NDArray[np.uint32]:
        """Every id that must never come from text."""
