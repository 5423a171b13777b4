"""The files of a dataset; all numbers are little-endian.

DIR/dataset_metadata.json         written last: counts, size and sha256 of every file and of itself
DIR/tokenizer_state.json
DIR/train|val/shard_00000/
    tokens.bin     uint16, or uint32 if the vocabulary needs it
    mask.bin       uint8       1 where the weight of the span is over 0: a copy for other readers
    episodes.idx   EPISODE     start and length of each row, within the shard
    spans.bin      STORED_SPAN the span table, without targets
    origins.bin    SEGMENT     one per conversation: its row, its first span, its file and line
    targets.bin    TARGET      only if a span has a target other than its own tokens
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import DTypeLike

METADATA = "dataset_metadata.json"
TOKENIZER_STATE = "tokenizer_state.json"
SPLITS = ("train", "val")

TOKENS = "tokens.bin"
MASK = "mask.bin"
INDEX = "episodes.idx"
SPANS = "spans.bin"
ORIGINS = "origins.bin"
TARGETS = "targets.bin"

EPISODE = np.dtype([("start", "<u8"), ("length", "<u8")])
STORED_SPAN = np.dtype(
    [("length", "<u4"), ("message", "<u4"), ("weight", "<f4"), ("role", "u1"), ("part", "u1"), ("rule", "u1")]
)
SEGMENT = np.dtype([("first_span", "<u8"), ("row", "<u8"), ("file", "<u4"), ("line", "<u8"), ("key", "<u8", (2,))])
TARGET = np.dtype([("span", "<u8"), ("target", "<u4")])
"""Spans that are trained to predict another id, in order of their number within the shard."""
MASKS = np.dtype("u1")

NARROW = 2**16
WIDE = 2**32
SHARD_NAME = re.compile(r"shard_\d{5,}", re.ASCII)


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The narrowest type that holds every id below `vocab_size`."""
    if not 0 < vocab_size <= WIDE:
        raise ValueError(f"a vocabulary of {vocab_size} ids cannot be stored; 1 to {WIDE} can")
    return np.dtype("<u2" if vocab_size <= NARROW else "<u4")


def shard_name(number: int) -> str:
    return f"shard_{number:05d}"


def record_dtypes(tokens: DTypeLike) -> dict[str, np.dtype[np.generic]]:
    """The type of one record of every file of a shard."""
    return {
        TOKENS: np.dtype(tokens),
        MASK: MASKS,
        INDEX: EPISODE,
        SPANS: STORED_SPAN,
        ORIGINS: SEGMENT,
        TARGETS: TARGET,
    }
