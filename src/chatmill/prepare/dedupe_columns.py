"""Columns for finding duplicates: computed for each record when it is rendered, and staged with its rows.

    exact      u64[R, 2]        hash of the normalized conversation
    bands      u32[BANDS, R]    hashes of groups of MinHash values: near-duplicates share at least one
    signature  u8[R, 128]       the low bytes of the MinHash values: the share of equal bytes estimates the similarity

The similarity of two conversations is the Jaccard index of their sets of 5-token sequences; system messages are
ignored. The column values of a record depend only on the record and the build settings.
"""

from __future__ import annotations

import hashlib
import importlib
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from chatmill.errors import UsageError
from chatmill.prepare.job import Job
from chatmill.records import ChatColumns, Record, Unrolled
from chatmill.records.part_hashes import part_hashes
from chatmill.records.record import NO_ROLE, ROLES, Message, is_layout, without_raw_arguments
from chatmill.rows import NO_MESSAGE, Index, Part, Role, Rows, copy_ranges, copy_tokens, offsets, ragged_index

SHINGLE = 5
"""Tokens per sequence. A conversation with fewer than `SHINGLE` tokens has a single, shorter sequence."""
VALUES = 128
"""MinHash values per conversation. At a similarity of 0.8, the standard error of the estimate is 0.035."""
RECALL = 0.99
"""Minimum probability that two conversations of exactly the requested similarity share a band."""
NOT_COMPARED = 0
"""Band key of a conversation without tokens."""

_SEED = 24
_ROWS = 2048
"""Conversations per MinHash call, to limit the memory for the Python integers that a call returns."""
_ENCODER = msgspec.msgpack.Encoder()
_FIRST_ROLE = 0xF8
"""Prefix byte of texts with the first role; each further role uses the next byte. The prefix bytes do not occur in
UTF-8.
"""
_WITH_FIELDS = b"\xff"
_IS_SPACE = np.zeros(256, dtype=bool)
_IS_SPACE[[ord(char) for char in map(chr, range(128)) if char.isspace()]] = True
_OTHER_SPACES = str.maketrans(dict.fromkeys("\x85\u1680\u2028\u2029", " "))
"""Whitespace that is neither ASCII nor mapped to a plain space by NFKC."""

Columns = Mapping[str, NDArray[Any]]


@cache
def _multipliers() -> NDArray[np.uint64]:
    return np.random.default_rng(_SEED).integers(0, 2**63, VALUES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def dedupe_identity(job: Job) -> dict[str, Any]:
    """Return the Unicode and MinHash versions, which must be the same in a resumed build."""
    if not job.removes_duplicates:
        return {}
    identity = {"unicode": unicodedata.unidata_version}
    if job.near_dedupe is not None:
        identity["rensa"] = _minhash().ALGORITHM_VERSION
    return {"dedupe": identity}


def dedupe_columns(batch: Sequence[Record] | Sequence[Unrolled], rows: Rows, record_of: Index, job: Job) -> Columns:
    """Return the deduplication columns for the records of a batch, or an empty dict if the job keeps duplicates."""
    if not job.removes_duplicates:
        return {}
    records = batch if isinstance(batch, ChatColumns) else [_record(each) for each in batch]
    columns: dict[str, NDArray[Any]] = {"exact": exact_keys(records)}
    if job.near_dedupe is not None:
        values = minhash(*shingles(rows, record_of, len(records)))
        columns["signature"] = values.astype(np.uint8)
        columns["bands"] = band_keys(values, job.near_dedupe)
    return columns


def joined_columns(batches: Sequence[Columns]) -> Columns:
    """Concatenate the columns of several batches; the result for `bands` has the shape (bands, records)."""
    names = batches[0] if batches else ()
    columns = {name: np.concatenate([batch[name] for batch in batches]) for name in names}
    return columns | {name: column.T for name, column in columns.items() if name == "bands"}


def _record(each: Record | Unrolled) -> Record:
    return each.record if isinstance(each, Unrolled) else each


# Exact duplicates.


def normalized(text: str) -> str:
    """Normalize text for comparison: NFKC, lower case, runs of whitespace as one space, stripped."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().split())


def exact_keys(records: Sequence[Record]) -> NDArray[np.uint64]:
    """Return a 16-byte key per record. Records that differ only in case and whitespace have the same key."""
    keys = _column_keys(records) if isinstance(records, ChatColumns) else None
    if keys is None:
        keys = b"".join(map(_key, records))
    return np.frombuffer(keys, dtype="<u8").reshape(-1, 2)


def _key(record: Record) -> bytes:
    messages = [
        msgspec.structs.replace(
            without_raw_arguments(message), content=normalized(message.content), reasoning=normalized(message.reasoning)
        )
        for message in record.messages
        if not is_layout(message)
    ]
    if record.tools or not all(map(_is_plain, messages)):
        data = _WITH_FIELDS + _ENCODER.encode((messages, record.tools))
    else:
        roles = (cast(Any, message.role) for message in messages)
        data = b"".join(
            bytes([_FIRST_ROLE + ROLES.index(role)]) + message.content.encode()
            for role, message in zip(roles, messages, strict=True)
        )
    return hashlib.sha256(data).digest()[:16]


def _is_plain(message: Message) -> bool:
    """Whether a message has no fields except its role and content."""
    others = (message.reasoning, message.tool_calls, message.train_ranges)
    named = (message.name, message.tool_call_id, message.weight)
    return message.role != NO_ROLE and message.complete and not any(others) and all(value is None for value in named)


def _column_keys(columns: ChatColumns) -> bytes | None:
    """Return the keys of all records, normalizing all texts at once, or None if a text contains NUL, the separator."""
    place = offsets(columns.stop - columns.start + 1)
    parted = np.zeros(place[-1], dtype=np.uint8)
    copy_ranges(np.frombuffer(columns.data, dtype=np.uint8), columns.start, columns.stop, parted, place[:-1] + 1)
    text = unicodedata.normalize("NFKC", parted.tobytes().decode()).lower()
    if not text.isascii():
        text = text.translate(_OTHER_SPACES)
    data = np.frombuffer(text.encode(), dtype=np.uint8)
    # Keep the first space of each run, unless it is at the start or end of a text.
    space = _IS_SPACE[data]
    data = np.where(space, np.uint8(ord(" ")), data)[~(space & np.append(True, (space | (data == 0))[:-1]))]
    data = data[~((data == ord(" ")) & np.append((data == 0)[1:], True))]
    begins = np.flatnonzero(data == 0)
    if len(begins) != len(columns.roles):
        return None
    data[begins] = columns.roles + _FIRST_ROLE
    return part_hashes(data.data, np.append(begins, len(data))[columns.first_message[1:]])


# Near-duplicates.


def shingles(rows: Rows, record_of: Index, count: int) -> tuple[NDArray[np.uint64], Index]:
    """Return the hashes of all 5-token sequences of `count` records, and the offset of each record's hashes.

    A record can have several consecutive rows; the sequences of a message that is in two rows are hashed twice.
    """
    spans = rows.spans
    compared = np.isin(spans["part"], (Part.CONTENT, Part.REASONING, Part.TOOL_CALL))
    compared &= (spans["role"] != Role.SYSTEM) & (spans["message"] != NO_MESSAGE)
    length = np.where(compared, spans["length"], 0).astype(np.int64)
    ids = copy_tokens(rows.ids, rows.span_start[:-1][compared], length[compared])
    row_tokens = np.diff(offsets(length)[rows.first_span[rows.first_segment]])
    start = offsets(row_tokens)
    windows = np.where(row_tokens > 0, np.maximum(row_tokens - SHINGLE + 1, 1), 0)
    # Add 1 to each id, because 0 marks positions past the end.
    padded = np.append(ids.astype(np.uint64) + np.uint64(1), np.zeros(SHINGLE, dtype=np.uint64))
    sums = np.zeros(len(ids), dtype=np.uint64)
    for place, multiplier in enumerate(_multipliers()[:SHINGLE]):
        sums += padded[place : place + len(ids)] * multiplier
    short = np.flatnonzero((row_tokens > 0) & (row_tokens < SHINGLE))
    sums[start[short]] = 0
    for place, multiplier in enumerate(_multipliers()[:SHINGLE]):
        token = np.where(row_tokens[short] > place, padded[start[short] + place], np.uint64(0))
        sums[start[short]] += token * multiplier
    hashes = _mixed(sums)[ragged_index(start[:-1], windows)]
    return hashes, offsets(np.bincount(record_of, weights=windows, minlength=count).astype(np.int64))


def minhash(hashes: NDArray[np.uint64], start: Index) -> NDArray[np.uint32]:
    """Return `VALUES` MinHash values for each set of hashes; for an empty set, every value is the largest integer."""
    library = _minhash()
    values = np.empty((len(start) - 1, VALUES), dtype=np.uint32)
    for at in range(0, len(values), _ROWS):
        own = start[at : at + _ROWS + 1]
        part = np.ascontiguousarray(hashes[own[0] : own[-1]])
        matrix = library.digest_matrix_from_flat_token_hashes(part, own - own[0], VALUES, _SEED)
        values[at : at + _ROWS] = matrix.to_rows()
    return values


def band_size(threshold: float) -> int:
    """Return the largest band size for which near-duplicates share a band with probability at least `RECALL`.

    >>> band_size(0.8), band_size(0.5)
    (6, 3)
    """
    return max(
        [size for size in range(1, VALUES + 1) if 1 - (1 - threshold**size) ** (VALUES // size) >= RECALL], default=1
    )


def band_keys(values: NDArray[np.uint32], threshold: float) -> NDArray[np.uint32]:
    """Return a hash of each band of MinHash values; `NOT_COMPARED` for a record without tokens."""
    size = band_size(threshold)
    count = VALUES // size
    bands = values[:, : count * size].reshape(-1, count, size)
    sums = np.zeros(bands.shape[:2], dtype=np.uint64)
    for place, multiplier in enumerate(_multipliers()[:size]):
        sums += bands[:, :, place] * multiplier
    keys = np.maximum((_mixed(sums) >> np.uint64(32)).astype(np.uint32), NOT_COMPARED + 1)
    keys[(values == np.iinfo(np.uint32).max).all(axis=1)] = NOT_COMPARED
    return keys


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each number with the SplitMix64 finalizer."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _minhash() -> Any:
    try:
        return importlib.import_module("rensa").RMinHash
    except ImportError:
        raise UsageError("near_dedupe needs rensa; pip install 'chatmill[recipe]'") from None
