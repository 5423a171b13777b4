"""The built-in tokenizer `bytes`: ids 0 to 255 are UTF-8 bytes, followed by the control tokens of all presets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from chatmill.tokenizer.backend import Ids, Offsets, flat

_NGPT = "84a5023f67d74cf29cc4001becde983c"

# The order fixes the ids: new tokens go to the end.
CONTROL_TOKENS = (
    *(f"<|ngpt_{role}_{_NGPT}|>" for role in ("sys", "usr", "asst", "eot")),
    *("<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>"),
    *("<|SYSTEM|>", "<|USER|>", "<|ASSISTANT|>", "<|END|>", "<|EOS|>"),
    *("<|im_start|>", "<|im_end|>"),
)


class ByteLevel:
    """One id per byte; lossless for every text."""

    engine = "bytes"
    vocab_size = 256 + len(CONTROL_TOKENS)
    sha256 = hashlib.sha256("\n".join(["bytes", *CONTROL_TOKENS]).encode()).hexdigest()

    def __init__(self) -> None:
        self.control = {token: 256 + index for index, token in enumerate(CONTROL_TOKENS)}

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        return flat([np.frombuffer(text.encode(), dtype=np.uint8) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def piece(self, id: int) -> bytes:
        return bytes([id])
