"""Datasets written by other programs: tokens.bin, episodes.idx and optionally mask.bin, in split or shard folders.

tokens.bin does not record the number of bytes per token, and a wrong number gives wrong ids without an error.
If the caller passes `token_dtype`, tokens are read as this type.
If mask.bin exists, the file sizes give the number of bytes per token, because mask.bin has one byte per token.
Without mask.bin, the type or the token counts in dataset_metadata.json give the number of bytes per token.
Without mask.bin and metadata, tokens are read as uint16 if tokens.bin is too small to contain the episodes as uint32.
If the number of bytes per token is ambiguous, opening the dataset raises an error unless `token_dtype` is set.
The mask, the metadata and `token_dtype` must not contradict each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.errors import DataError, UsageError, one_line
from chatmill.rows import Index, Table
from chatmill.store.end_token import names_tokens
from chatmill.store.folder import OpenFolder
from chatmill.store.layout import (
    EPISODE,
    INDEX,
    MASK,
    METADATA,
    ORIGINS,
    SHARD_NAME,
    SPANS,
    SPLITS,
    TARGETS,
    TOKEN_DTYPES,
    TOKENIZER_STATE,
    TOKENS,
    Shard,
    as_records,
    shard_name,
)
from chatmill.store.mapped import reading

OURS = (SPANS, ORIGINS, TARGETS)
"""Shard files that only chatmill writes."""
STATE_KEYS = {"name", "sha256", "vocab_size", "control", "special_token_ids", "added_tokens"}
"""Keys of chatmill's `tokenizer_state.json`."""
DTYPE_KEYS = {"dtype", "datatype", "tokendtype", "tokensdtype", "npdtype", "numpydtype", "iddtype", "idsdtype"}
DTYPE_KEYS |= {"tokeniddtype", "tokenidsdtype", "tokentype", "tokens", "tokensbin", "storagedtype"}
WIDTH_KEYS = {"bytespertoken", "tokenbytes", "tokensize", "tokenitemsize"}
OTHER_TABLES = ("mask", "index", "idx", "episode", "label", "segment", "model", "weight", "position")
"""A metadata key that contains one of these words does not describe tokens."""
DTYPE_NAME = re.compile(r"(?:.*[^a-z])?u?int(8|16|32|64)\b.*|([<>|=]?)[ui]([1248])", re.ASCII | re.DOTALL)
NAMES = {2: "uint16", 4: "uint32"}
CHUNK = 1 << 22


def split_folders(folder: OpenFolder) -> Iterator[Path]:
    """Yield the folders of all splits and of their shards."""
    for split in (folder.path / name for name in SPLITS):
        yield split
        for name in folder.names(split):
            if name.startswith("shard_"):
                yield split / name


def trace_of_chatmill(folder: OpenFolder) -> Path | None:
    """Return the path of a file that only chatmill writes, or None if the dataset contains no such file."""
    state = folder.path / TOKENIZER_STATE
    is_alone = folder.status(folder.path / METADATA) is None and folder.status(state) is not None
    if is_alone and not _is_foreign_state(folder, state):
        return state
    paths = (place / name for place in split_folders(folder) for name in OURS)
    return next((path for path in paths if folder.status(path) is not None), None)


def _is_foreign_state(folder: OpenFolder, path: Path) -> bool:
    """Whether another program wrote this tokenizer_state.json; False if the file is not recognized."""
    try:
        state = json.loads(folder.read(path))
    except (OSError, ValueError, RecursionError):
        return False
    # If only one of chatmill's keys is missing, assume that chatmill wrote the file, because a flipped bit damages at
    # most one key.
    return isinstance(state, dict) and len(state.keys() & STATE_KEYS) < len(STATE_KEYS) - 1 and names_tokens(state)


def token_width(token_dtype: str | None) -> int | None:
    """Return the number of bytes per token for a token type; raise `UsageError` if the type is not supported."""
    if token_dtype is None:
        return None
    if token_dtype not in TOKEN_DTYPES:
        raise UsageError(f"token_dtype is {one_line(str(token_dtype))}; expected {' or '.join(TOKEN_DTYPES)}")
    return TOKEN_DTYPES[token_dtype].itemsize


@dataclass(frozen=True)
class _ShardFiles:
    """The sizes of a shard's files in bytes, and the end of its last episode in tokens."""

    folder: Path
    num_episodes: int
    end: int
    tokens: int
    mask: int | None

    @property
    def widths(self) -> tuple[int, ...]:
        """The possible numbers of bytes per token, given the file sizes."""
        if self.mask is not None:
            return tuple(width for width in NAMES if self.tokens == width * self.mask)
        return tuple(width for width in NAMES if self.tokens % width == 0 and width * self.end <= self.tokens)

    def fault(self) -> str | None:
        """Return an error message if the sizes of the shard's files contradict each other, otherwise None."""
        if self.widths and (self.mask is None or self.end <= self.mask):
            return None
        if self.mask is not None and self.tokens in (2 * self.end, 4 * self.end):
            return f"{self.folder / MASK}: is {self.mask} bytes; expected {self.end}, one per token"
        place = f"{self.folder / TOKENS}: is {self.tokens} bytes"
        if self.mask is None:
            return f"{place}, but {INDEX} ends at token {self.end}; expected an even size of at least {2 * self.end}"
        if self.end <= self.mask:
            return f"{place}, but {MASK} is {self.mask} bytes; expected {2 * self.mask} or {4 * self.mask}"
        return f"{place} and {MASK} is {self.mask} bytes, but {INDEX} ends at token {self.end}; copy the dataset again"

    def shard(self, width: int) -> Shard:
        count = self.tokens // width
        records = {INDEX: self.num_episodes, TOKENS: count} | ({} if self.mask is None else {MASK: count})
        return Shard(self.folder, self.num_episodes, count, TOKEN_DTYPES[NAMES[width]], records)


def foreign_splits(folder: OpenFolder, token_dtype: str | None = None) -> dict[str, list[Shard]]:
    """Return the shards of every split of a dataset that another program wrote."""
    folders = {split: shards for split in SPLITS if (shards := _folders(folder, folder.path / split))}
    if "train" not in folders:
        raise DataError(f"{folder.path}: not a dataset; expected train/{INDEX} or train/{shard_name(0)}/{INDEX}")
    splits = {split: [_shard_files(folder, path) for path in shards] for split, shards in folders.items()}
    every = [files for shards in splits.values() for files in shards]
    masked = [files for files in every if files.mask is not None]
    for files in every:
        if masked and files.mask is None:
            raise DataError(
                f"{files.folder / MASK}: missing, but {masked[0].folder / MASK} exists; copy the dataset again"
            )
        if fault := files.fault():
            raise DataError(fault)
    path = folder.path / METADATA
    metadata = json.loads(folder.read(path)) if folder.status(path) is not None else {}
    width = _width(folder.path, splits, metadata, token_width(token_dtype))
    for split in SPLITS:
        there = sum(files.num_episodes for files in splits.get(split, ()))
        expected = metadata.get(f"num_{split}_episodes")
        if type(expected) is int and expected != there:
            raise DataError(
                f"{folder.path / split}: has {there} episodes, but {path} records {expected}; copy the dataset again"
            )
    return {split: [files.shard(width) for files in shards] for split, shards in splits.items()}


def _width(path: Path, splits: Mapping[str, list[_ShardFiles]], metadata: Mapping[str, Any], given: int | None) -> int:
    """Return the number of bytes per token, by the rules in the module docstring."""
    named = metadata_width(metadata, place=str(path / METADATA))
    if given is not None and named is not None and given != named:
        raise DataError(
            f"{path}: token_dtype is {NAMES[given]}, but {METADATA} records {NAMES[named]}; remove token_dtype"
        )
    stated, by = (given, "token_dtype") if given is not None else (named, METADATA)
    filled = [files for shards in splits.values() for files in shards if files.tokens]
    if stated is not None:
        for files in filled:
            if stated not in files.widths:
                why = (
                    f"{MASK} is {files.mask} bytes" if files.mask is not None else f"{INDEX} ends at token {files.end}"
                )
                raise DataError(
                    f"{files.folder / TOKENS}: the token type is {NAMES[stated]} according to {by}, but this file is "
                    f"{files.tokens} bytes and {why}; expected {NAMES[files.widths[0]]}"
                )
        return stated
    widths = [width for width in NAMES if all(width in files.widths for files in filled)]
    if not widths:
        raise DataError(f"{path}: some shards have 2-byte tokens and some have 4-byte tokens; expected one size")
    if len(widths) == 1 or not filled:
        return widths[0]
    if (counted := _counted_width(splits, metadata)) is not None:
        return counted
    raise DataError(
        f"{path}: its tokens may be uint16 or uint32: there is no {MASK}, {METADATA} records no type, and {INDEX} fits "
        "both types; set token_dtype in the config, or pass --token-dtype"
    )


def metadata_width(metadata: Any, *, place: str) -> int | None:
    """Return the number of bytes per token that another program's metadata records, or None.

    >>> from chatmill.store.foreign import metadata_width
    >>> metadata_width({"tokens": {"dtype": "np.uint32"}, "mask": {"dtype": "uint8"}}, place="metadata")
    4
    """
    types = dict(_types(metadata))
    for name, width in types.items():
        if width not in NAMES:
            raise DataError(f"{place}: {name} is an unsupported type; expected uint16 or uint32, little-endian")
    if len(set(types.values())) > 1:
        raise DataError(f"{place}: records several token types ({', '.join(types)}); expected one")
    return next(iter(types.values()), None)


def _types(node: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, int | None]]:
    """Yield each token type in the metadata with its size in bytes; the size is None if the type is big-endian."""
    if not isinstance(node, dict) or depth > 3:
        return
    for name, value in node.items():
        compact = "".join(re.findall(r"[a-z0-9]+", name.lower()))
        if any(part in compact for part in OTHER_TABLES):
            continue
        shown = f"{prefix}{one_line(name)}: {one_line(str(value))}"
        if compact in DTYPE_KEYS and isinstance(value, str) and (match := DTYPE_NAME.fullmatch(value.strip().lower())):
            bits, order, size = match.groups()
            yield shown, None if order == ">" else int(bits) // 8 if bits else int(size)
        elif compact in WIDTH_KEYS and type(value) is int:
            yield shown, value
        else:
            yield from _types(value, f"{prefix}{one_line(name)}.", depth + 1)


def _counted_width(splits: Mapping[str, list[_ShardFiles]], metadata: Mapping[str, Any]) -> int | None:
    """Compute the number of bytes per token from the token counts in the metadata."""
    widths = set()
    for split, shards in splits.items():
        count, size = metadata.get(f"num_{split}_tokens"), sum(files.tokens for files in shards)
        if type(count) is int and size:
            widths.add(next((width for width in NAMES if width * count == size), None))
    return widths.pop() if len(widths) == 1 else None


def _folders(folder: OpenFolder, split: Path) -> list[Path]:
    """Return the shard folders of a split in order, or the split folder itself if it has no shards."""
    names = folder.names(split)
    shards = [split / name for name in names if name.startswith("shard_")]
    flat = INDEX in names
    if flat and shards:
        raise DataError(f"{split}: has both {INDEX} and shard folders; expected only one of them")
    for path in shards:
        if not SHARD_NAME.fullmatch(path.name):
            raise DataError(f"{path}: expected a name like {shard_name(0)}")
    shards.sort(key=lambda path: int(path.name.partition("_")[2]))
    for number, path in enumerate(shards):
        if path.name != shard_name(number):
            raise DataError(f"{split}: {shard_name(number)} is missing; expected shards numbered from 0 without gaps")
    return [split] if flat else shards


def _shard_files(folder: OpenFolder, place: Path) -> _ShardFiles:
    index, tokens, mask = (place / name for name in (INDEX, TOKENS, MASK))
    for name in folder.names(place):
        if name not in (INDEX, TOKENS, MASK) and any(own in name for own in (INDEX, TOKENS, MASK)):
            raise DataError(f"{place / name}: is an incomplete copy; copy the dataset again")
    for path in (index, tokens, mask):
        if folder.status(path) is not None and not folder.is_file(path):
            raise DataError(f"{path}: is not a file; copy the dataset again")
    if not folder.is_file(index):
        raise DataError(f"{index}: no such file, but every shard must have this file; copy the dataset again")
    if (size := folder.stamps[index].size) % EPISODE.itemsize:
        raise DataError(f"{index}: is {size} bytes; expected a multiple of {EPISODE.itemsize}")
    if not folder.is_file(tokens):
        raise DataError(f"{tokens}: no such file, but every shard must have this file; copy the dataset again")
    tokens_size = folder.stamps[tokens].size
    mask_size = folder.stamps[mask].size if folder.is_file(mask) else None
    with reading():
        entries = as_records(folder.map(index), EPISODE, size // EPISODE.itemsize)
        # If the last episode ends at the end of the shard, no other entry has to be read.
        end = _end(entries[-1:])
        if (2 * end != tokens_size) if mask_size is None else (end != mask_size):
            end = _end(entries)
    return _ShardFiles(place, len(entries), end, tokens_size, mask_size)


def unread_files(folder: OpenFolder) -> list[str]:
    """Return the files in split and shard folders that chatmill does not read."""
    known = {INDEX, TOKENS, MASK}
    return [
        str((place / name).relative_to(folder.path))
        for place in split_folders(folder)
        for name in folder.names(place)
        if name not in known and not name.startswith(".") and folder.is_file(place / name)
    ]


def _end(entries: Table) -> int:
    """Return the largest end position of all episodes, in tokens."""
    if not len(entries):
        return 0
    ends = entries["start"] + entries["length"]
    # An end position that overflows 64 bits is larger than all others. The sum below uses Python integers, which do not
    # overflow.
    overflows = ends < entries["start"]
    furthest = int(overflows.argmax() if overflows.any() else ends.argmax())
    start, length = entries[furthest].item()
    return int(start + length)


def coverage(start: Index, stop: Index, size: int) -> Iterator[tuple[slice, Index]]:
    """For each position below `size`, count the ranges [start, stop) that contain it; yield the counts in chunks.

    [0, 3) [2, 4), size 5  ->  1 1 2 1 0
    """
    starts, stops = np.sort(start), np.sort(stop)
    for at in range(0, size, CHUNK):
        end = min(at + CHUNK, size)
        (a, b), (c, d) = (np.searchsorted(edges, [at, end]) for edges in (starts, stops))
        change = np.bincount(starts[a:b] - at, minlength=end - at) - np.bincount(stops[c:d] - at, minlength=end - at)
        change[0] += a - c
        yield slice(at, end), np.cumsum(change)
