"""The cache of the primer specification: one folder a source, one file a shard, read as episodes are.

OUT/SOURCE/meta.json              written last: counts, the ledger, size and sha256 of every shard and of itself
OUT/SOURCE/train|val/shard_00000.bin
    header   40 bytes   magic, version, bytes a token, examples, tokens, label tokens
    index    EPISODE    start and length of each example, in tokens
    tokens   uint16, or uint32 if the vocabulary needs it
    mask     uint8      the label of a token is its id where the mask is 1, and -100 where it is 0

All numbers are little-endian. Like the reader of datasets this needs no more than numpy.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.ledger import Ledger
from chatmill.rows import OWN_ID, Rows, Table, concat, offsets
from chatmill.store.files import create, make_folder
from chatmill.store.layout import EPISODE, INDEX, MASK, MASKS, SPLITS, TOKENS, shard_name, token_dtype
from chatmill.store.metadata import self_hash, text_of
from chatmill.store.publish import building, check_target, recover
from chatmill.store.read import Dataset, Episodes
from chatmill.store.shard import Shard
from chatmill.store.verify import SplitCounts, Verified

META = "meta.json"
SCHEMA, SCHEMA_VERSION = "chatmill-cache", 1
HEADER = struct.Struct("<8sIIQQQ")
MAGIC, VERSION = b"cm-cache", 1
SHARD_TOKENS = 1 << 24
PIECE = 1 << 22


@dataclass(frozen=True)
class CacheShard:
    num_examples: int
    num_tokens: int
    num_label_tokens: int
    sha256: str

    def header(self, dtype: np.dtype[np.unsignedinteger]) -> bytes:
        counts = (self.num_examples, self.num_tokens, self.num_label_tokens)
        return HEADER.pack(MAGIC, VERSION, dtype.itemsize, *counts)

    def size(self, dtype: np.dtype[np.unsignedinteger]) -> int:
        """Bytes of the whole file."""
        *_, (start, last, count) = _parts(dtype, self.num_examples, self.num_tokens).values()
        return start + count * last.itemsize


@dataclass(frozen=True)
class CacheSplit:
    shard_size: int
    """Tokens that a shard holds at most; an example longer than that has a shard of its own."""
    shards: tuple[CacheShard, ...]

    @property
    def num_examples(self) -> int:
        return sum(shard.num_examples for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_label_tokens(self) -> int:
        return sum(shard.num_label_tokens for shard in self.shards)


@dataclass(frozen=True)
class CacheMeta:
    """What `meta.json` says; the documented names, `T_max` among them, are kept."""

    source: str
    format: str
    tokenizer_sha256: str
    vocab_size: int
    special_token_ids: Mapping[str, int]
    splits: Mapping[str, CacheSplit]
    val_frac: float
    seed: int
    T_max: int
    ledger: Ledger

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        return token_dtype(self.vocab_size)

    @property
    def sha256(self) -> str:
        """The hash of the cache: two caches that share it hold the same bytes."""
        return self_hash(self._data())

    def to_bytes(self) -> bytes:
        """The file, byte for byte."""
        return text_of({**self._data(), "sha256": self.sha256})

    def _data(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "dtype": self.dtype.name,
            **vars(self),
            "splits": {
                name: {
                    "num_examples": split.num_examples,
                    "num_tokens": split.num_tokens,
                    "num_label_tokens": split.num_label_tokens,
                    "num_shards": len(split.shards),
                    "shard_size": split.shard_size,
                    "shards": [
                        {"name": _file_name(number), "size": shard.size(self.dtype), **vars(shard)}
                        for number, shard in enumerate(split.shards)
                    ],
                }
                for name, split in self.splits.items()
            },
            "ledger": self.ledger.to_json(),
        }


def cache_folder(out: Path, source: str) -> Path:
    """Where the cache of a source lies; a name that would lead elsewhere is an error."""
    if source in ("", ".", "..") or source.startswith(".") or not set(source).isdisjoint("/\\") or "\0" in source:
        raise UsageError(f'"{one_line(source)}" is no name of a source; expected a plain one such as primer, no path')
    return out / source


# Writing.


def write_cache(
    out: Path,
    source: str,
    splits: Mapping[str, Iterable[Rows]],
    *,
    format: str,
    tokenizer_sha256: str,
    vocab_size: int,
    special_token_ids: Mapping[str, int],
    val_frac: float,
    seed: int,
    t_max: int,
    ledger: Ledger,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
) -> CacheMeta:
    """Build the cache of a source aside and publish it by one rename, or leave nothing.

    The rows of a split come in any number of parts, on which the bytes do not depend. The ledger may be filled
    while they are made; it must hold them all, and balance, when the last one is written.
    """
    target = cache_folder(out, source)
    with building(target, "building", overwrite=overwrite, marker=META) as staging:
        written = {
            name: _write_split(staging / name, splits.get(name, ()), vocab_size=vocab_size, shard_tokens=shard_tokens)
            for name in SPLITS
        }
        meta = CacheMeta(
            source=source,
            format=format,
            tokenizer_sha256=tokenizer_sha256,
            vocab_size=vocab_size,
            special_token_ids=dict(special_token_ids),
            splits=written,
            val_frac=val_frac,
            seed=seed,
            T_max=t_max,
            ledger=ledger,
        )
        # What does not add up or cannot be read back is a fault of the caller, better found now than by the reader.
        for fault in _ledger_faults(staging, meta):
            raise ChatmillError(fault)
        parse_meta(meta.to_bytes(), place=str(staging / META))
        # Written last: its presence means that every shard is complete.
        with create(staging / META) as file:
            file.write(meta.to_bytes())
    return meta


def check_place(out: Path, source: str, *, overwrite: bool) -> Path:
    """The folder of a cache that is to be written; raises before any work is done if it may not be."""
    target = cache_folder(out, source)
    recover(target)
    check_target(target, overwrite=overwrite, marker=META)
    return target


def _write_split(folder: Path, parts: Iterable[Rows], *, vocab_size: int, shard_tokens: int) -> CacheSplit:
    make_folder(folder)
    shards = tuple(
        _write_shard(folder / _file_name(number), rows, vocab_size=vocab_size)
        for number, rows in enumerate(_by_shard(parts, shard_tokens))
    )
    return CacheSplit(shard_tokens, shards)


def _by_shard(parts: Iterable[Rows], shard_tokens: int) -> Iterator[Rows]:
    """The same rows, together as long as they hold at most `shard_tokens`: one shard's are in memory at a time."""
    if shard_tokens < 1:
        raise ValueError(f"shards of {shard_tokens} tokens cannot be; at least 1")
    held: list[Rows] = []
    tokens = 0
    for rows in parts:
        start, at = rows.row_start, 0
        while at < len(rows):
            stop = int(np.searchsorted(start, start[at] + shard_tokens - tokens, side="right")) - 1
            if stop <= at and not held:
                stop = at + 1
            if stop > at:
                held.append(rows[at:stop])
                tokens += int(start[stop] - start[at])
                at = stop
            if at < len(rows):
                yield concat(held)
                held, tokens = [], 0
    if held:
        yield concat(held)


def _write_shard(path: Path, rows: Rows, *, vocab_size: int) -> CacheShard:
    rows.check()
    if len(rows.ids) and (largest := int(rows.ids.max())) >= vocab_size:
        raise DataError(f"{path}: token id {largest}; the vocabulary has {vocab_size}")
    if np.any(rows.spans["target"] != OWN_ID):
        raise DataError(f"{path}: a token is trained as another id; a cache has no place for that, a dataset has")
    dtype, mask = token_dtype(vocab_size), rows.mask()
    index = np.empty(len(rows), dtype=EPISODE)
    index["start"], index["length"] = rows.row_start[:-1], rows.lengths
    counts = len(rows), len(rows.ids), int(np.count_nonzero(mask))
    header = CacheShard(*counts, sha256="").header(dtype)
    digest = hashlib.sha256()
    with create(path) as file:
        for piece in (np.frombuffer(header, dtype=np.uint8), index, rows.ids.astype(dtype), mask):
            data = piece.view(np.uint8).data
            digest.update(data)
            file.write(data)
    return CacheShard(*counts, sha256=digest.hexdigest())


def _file_name(number: int) -> str:
    return f"{shard_name(number)}.bin"


# Reading.


@dataclass(frozen=True)
class PrimerCache(Dataset):
    """An open cache: `cache["train"]` are the episodes of a split, of which no more is known than their mask."""

    meta: CacheMeta

    @property
    def sha256(self) -> str:
        return self.meta.sha256


def is_cache(path: str | Path) -> bool:
    """Whether a folder holds the cache of a source, rather than a dataset."""
    return (Path(path) / META).is_file()


def open_cache(path: str | Path) -> PrimerCache:
    """The cache of one source, OUT/SOURCE; `DataError` if a shard is missing or is not as long as it was written."""
    folder = Path(path)
    meta = read_meta(folder)
    for fault in _shard_faults(folder, meta):
        raise DataError(fault)
    splits = {name: _episodes(folder, name, meta) for name in SPLITS}
    return PrimerCache(folder, None, splits, meta)


def read_meta(folder: Path) -> CacheMeta:
    """What `meta.json` says, or `DataError` if it is not exactly what was written."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected the cache of a source")
    path = folder / META
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; a cache has one, and an unfinished build has none yet") from None
    return parse_meta(raw, place=str(path))


def parse_meta(raw: bytes, *, place: str) -> CacheMeta:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({one_line(str(error))}); the file is damaged") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise DataError(f'{place}: "schema" is not "{SCHEMA}"; the file is damaged or not of chatmill')
    if data.get("schema_version") != SCHEMA_VERSION:
        version = one_line(str(data.get("schema_version")))
        raise DataError(f"{place}: schema version {version}; this chatmill reads {SCHEMA_VERSION}")
    try:
        meta = _meta(data)
        # Sums, sizes and the hash are not read but computed: what disagrees with itself is not what was written.
        unchanged = meta.to_bytes() == raw
    except (ChatmillError, AttributeError, KeyError, TypeError, ValueError, struct.error):
        unchanged = False
    if not unchanged:
        raise DataError(f"{place}: is not what was written; it was changed or damaged, rebuild the cache")
    return meta


def _meta(data: dict[str, Any]) -> CacheMeta:
    def plain(value: dict[str, Any], *names: str) -> dict[str, Any]:
        return {name: value[name] for name in names}

    splits = {
        name: CacheSplit(
            split["shard_size"],
            tuple(
                CacheShard(**plain(shard, "num_examples", "num_tokens", "num_label_tokens", "sha256"))
                for shard in split["shards"]
            ),
        )
        for name, split in plain(data["splits"], *SPLITS).items()
    }
    given = plain(
        data, "source", "format", "tokenizer_sha256", "vocab_size", "special_token_ids", "val_frac", "seed", "T_max"
    )
    meta = CacheMeta(**given, splits=splits, ledger=Ledger.from_json(data["ledger"]))
    for id in meta.special_token_ids.values():
        if not 0 <= id < meta.vocab_size:
            raise ValueError(f"control token {id} of {meta.vocab_size}")
    for split in splits.values():
        for shard in split.shards:
            # Packing the header holds the counts to numbers that are there on disk.
            shard.header(meta.dtype)
    return meta


def _shards(folder: Path, meta: CacheMeta) -> Iterator[tuple[Path, CacheShard]]:
    for name, split in meta.splits.items():
        for number, shard in enumerate(split.shards):
            yield folder / name / _file_name(number), shard


def _shard_faults(folder: Path, meta: CacheMeta) -> Iterator[str]:
    """One line for every shard that is missing, has another size than it was written with, or another header."""
    for path, shard in _shards(folder, meta):
        try:
            with path.open("rb") as file:
                size, header = os.fstat(file.fileno()).st_size, file.read(HEADER.size)
        except (FileNotFoundError, NotADirectoryError):
            yield f"{path}: missing; rebuild the cache or copy it again"
            continue
        if size != (right := shard.size(meta.dtype)):
            yield f"{path}: {size} bytes; {META} says {right}; rebuild the cache or copy it again"
        elif header != shard.header(meta.dtype):
            yield f"{path}: its header is not the one that {META} describes; rebuild the cache or copy it again"


def _episodes(folder: Path, split: str, meta: CacheMeta) -> CachedEpisodes:
    shards = []
    for number, shard in enumerate(meta.splits[split].shards):
        records = {
            name: count for name, (_, _, count) in _parts(meta.dtype, shard.num_examples, shard.num_tokens).items()
        }
        path = folder / split / _file_name(number)
        shards.append(Shard(path, shard.num_examples, shard.num_tokens, meta.dtype, records))
    return CachedEpisodes(folder, shards)


def _parts(
    dtype: np.dtype[np.unsignedinteger], examples: int, tokens: int
) -> dict[str, tuple[int, np.dtype[Any], int]]:
    """The parts of a shard under the names that a dataset gives its files: first byte, type and count of each."""
    index = HEADER.size
    ids = index + examples * EPISODE.itemsize
    mask = ids + tokens * dtype.itemsize
    return {INDEX: (index, EPISODE, examples), TOKENS: (ids, dtype, tokens), MASK: (mask, MASKS, tokens)}


class CachedEpisodes(Episodes):
    """The examples of one split; the `folder` of a shard is here the one file that holds all its parts."""

    def __init__(self, root: Path, shards: list[Shard]) -> None:
        super().__init__(root, shards, ())
        self._inodes = [_inode(os.stat(shard.folder)) for shard in shards]  # noqa: PTH116

    def _map(self, number: int, name: str) -> NDArray[Any]:
        shard = self.shards[number]
        start, dtype, count = _parts(shard.dtype, shard.num_episodes, shard.num_tokens)[name]
        with shard.folder.open("rb") as file:
            if _inode(os.fstat(file.fileno())) != self._inodes[number]:
                raise DataError(f"{shard.folder}: was replaced while it was read; open the cache again")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(data, dtype=dtype, count=count, offset=start)


def _inode(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_dev, found.st_ino, found.st_size


# Verifying.


def verify_cache(path: str | Path, *, full: bool) -> Verified:
    """Read a cache and name every fault in one line each; with `full` every byte is held against its hash."""
    folder = Path(path)
    try:
        meta = read_meta(folder)
    except DataError as error:
        return Verified((str(error),), {}, None)
    faults = [*_shard_faults(folder, meta), *_unlisted(folder, meta)]
    if not faults:
        cache = open_cache(folder)
        for name in SPLITS:
            for number, shard in enumerate(meta.splits[name].shards):
                faults += _table_faults(cache[name], number, shard, meta.vocab_size)
        faults += _ledger_faults(folder, meta)
    if full:
        faults += _hash_faults(folder, meta)
    counts = {
        name: SplitCounts(split.num_examples, split.num_tokens, split.num_label_tokens, len(split.shards))
        for name, split in meta.splits.items()
    }
    return Verified(tuple(faults), counts, meta.sha256)


def _unlisted(folder: Path, meta: CacheMeta) -> Iterator[str]:
    listed = {path for path, _ in _shards(folder, meta)}
    for path in sorted(path for name in SPLITS for path in (folder / name).glob("*")):
        if path not in listed:
            yield f"{path}: {META} does not list it; remove it or rebuild the cache"


def _table_faults(episodes: Episodes, number: int, shard: CacheShard, vocab_size: int) -> Iterator[str]:
    """What a reader of the shard would stumble over; the first fault of a shard is enough."""
    place = episodes.shards[number].folder
    index: Table = episodes.array(number, INDEX)
    length = index["length"].astype(np.int64)
    if np.any(index["length"] > shard.num_tokens) or np.any(offsets(length)[:-1] != index["start"]):
        yield f"{place}: the examples do not follow one another; rebuild the cache"
    elif length.sum() != shard.num_tokens:
        yield f"{place}: the examples hold {length.sum()} of {shard.num_tokens} tokens; rebuild the cache"
    elif shard.num_tokens:
        mask, largest = episodes.array(number, MASK), int(episodes.array(number, TOKENS).max())
        if mask.max() > 1 or np.count_nonzero(mask) != shard.num_label_tokens:
            yield f"{place}: the mask is not 1 on {shard.num_label_tokens} tokens and 0 on all others"
        elif largest >= vocab_size:
            yield f"{place}: token id {largest}; the vocabulary has {vocab_size}"


def _ledger_faults(folder: Path, meta: CacheMeta) -> Iterator[str]:
    try:
        meta.ledger.check()
    except ChatmillError as error:
        yield f"{folder}: {error}"
    stored = meta.ledger.total("stored")
    for what, said, name in (
        ("examples", stored.rows, "num_examples"),
        ("tokens", stored.tokens, "num_tokens"),
        ("label tokens", stored.trained, "num_label_tokens"),
    ):
        if said != (found := sum(getattr(split, name) for split in meta.splits.values())):
            yield f"{folder}: the ledger says {said} {what} were stored; the shards hold {found}"


def _hash_faults(folder: Path, meta: CacheMeta) -> Iterator[str]:
    for path, shard in _shards(folder, meta):
        if path.is_file():
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while piece := file.read(PIECE):
                    digest.update(piece)
            if digest.hexdigest() != shard.sha256:
                yield f"{path}: sha256 {digest.hexdigest()[:12]}…; {META} says {shard.sha256[:12]}…; it was changed"
