"""Read and write datasets in the primer cache format: one folder per source, and one file per shard.

OUT/SOURCE/meta.json              written last: counts, the ledger, size and sha256 of every shard and of itself
OUT/SOURCE/train|val/shard_00000.bin
    header   40 bytes   magic, version, bytes per token, examples, tokens, label tokens
    index    EPISODE    start and length of each example, in tokens
    tokens   uint16, or uint32 if the vocabulary needs it
    mask     uint8      the label of a token is its id where the mask is 1, and -100 where it is 0

All numbers are little-endian. Reading a cache requires only numpy.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np

from chatmill.errors import ChatmillError, DataError, UsageError, one_line
from chatmill.ledger import Ledger
from chatmill.plain_file import local_path
from chatmill.remote.urls import Place, Url, place
from chatmill.rows import OWN_ID, Rows, Table, concat, offsets
from chatmill.store.episodes import Episodes
from chatmill.store.files import create, make_folder
from chatmill.store.folder import OpenFolder, StoredFiles, in_folder
from chatmill.store.hashed import FileInfo, HashedFile, Manifest, hashed_text, parse_hashed, read_hashed, self_hash
from chatmill.store.layout import EPISODE, INDEX, MASK, MASKS, SPLITS, TOKENS, Shard, shard_name, token_dtype
from chatmill.store.mapped import reading
from chatmill.store.metadata import total
from chatmill.store.publish import FolderKind, building, check_target, recover
from chatmill.store.read import Dataset
from chatmill.store.verify import SplitCounts, Verified, ledger_faults

P = TypeVar("P", Path, Url)
META = "meta.json"
CACHES = "data/cache/sft"
"""Default folder for caches."""
EXPECTED = "the cache of a source"
SCHEMA, SCHEMA_VERSION = "chatmill-cache", 1
TOTALS = ("num_examples", "num_tokens", "num_label_tokens")
"""Keys in `meta.json` for the totals over all shards of a split."""
HEADER = struct.Struct("<8sIIQQQ")
MAGIC, VERSION = b"cm-cache", 1
SHARD_TOKENS = 1 << 24


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
        *_, (start, last, count) = _parts(dtype, self.num_examples, self.num_tokens).values()
        return start + count * last.itemsize


@dataclass(frozen=True)
class CacheSplit:
    shard_size: int
    """Maximum number of tokens per shard; a longer example gets its own shard."""
    shards: tuple[CacheShard, ...]

    num_examples = total("num_examples")
    num_tokens = total("num_tokens")
    num_label_tokens = total("num_label_tokens")


@dataclass(frozen=True, kw_only=True)
class CacheMeta:
    """The content of a cache's `meta.json`; each field has the name of its JSON key."""

    source: str
    format: str
    tokenizer_sha256: str
    vocab_size: int
    special_token_ids: Mapping[str, int]
    splits: Mapping[str, CacheSplit] = field(default_factory=dict)
    val_frac: float
    seed: int
    T_max: int
    ledger: Ledger

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        return token_dtype(self.vocab_size)

    @property
    def sha256(self) -> str:
        """The hash of the cache; two caches with equal hashes have identical files."""
        return self_hash(self._data())

    def to_bytes(self) -> bytes:
        return hashed_text(self._data())

    def stored_counts(self) -> dict[str, int]:
        """Return the numbers of examples, tokens and label tokens over all splits."""
        sums = [sum(getattr(split, total) for split in self.splits.values()) for total in TOTALS]
        return dict(zip(("examples", "tokens", "label tokens"), sums, strict=True))

    def _data(self) -> dict[str, Any]:
        data = asdict(self)
        for name, split in data["splits"].items():
            split |= {total: getattr(self.splits[name], total) for total in TOTALS}
            split["num_shards"] = len(split["shards"])
            for number, shard in enumerate(self.splits[name].shards):
                split["shards"][number].update(name=shard_file(number), size=shard.size(self.dtype))
        schema = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "dtype": self.dtype.name}
        return {**data, **schema, "ledger": self.ledger.to_json()}


def cache_folder(out: P, source: str) -> P:
    """Return the cache folder of a source; raise `UsageError` if the source name is not a plain folder name."""
    if source in ("", ".", "..") or source.startswith(".") or not set(source).isdisjoint("/\\") or "\0" in source:
        raise UsageError(f'"{one_line(source)}" is not a source name; expected a name such as primer, not a path')
    return out / source


def check_place(out: Path, source: str, *, overwrite: bool) -> Path:
    """Return the folder for a new cache; raise an error if a cache cannot be published there. Commands call this
    function before they do any work.
    """
    target = cache_folder(out, source)
    recover(target, CACHE)
    check_target(target, overwrite=overwrite, kind=CACHE)
    return target


def shard_file(number: int) -> str:
    return f"{shard_name(number)}.bin"


def _listed(folder: Path) -> list[str]:
    meta = parse_meta(read_hashed(folder / META, "cache", Path.read_bytes), place=str(folder / META))
    return [f"{split}/" for split in SPLITS] + [path.as_posix() for path, _ in _shards(Path(), meta)]


CACHE = FolderKind(
    "cache", META, re.compile(rf"{re.escape(META)}|({'|'.join(SPLITS)})/(shard_\d{{5,}}\.bin)?"), _listed
)


# Writing.


def write_cache(
    out: Path,
    meta: CacheMeta,
    splits: Mapping[str, Iterable[Rows]],
    *,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
) -> CacheMeta:
    """Build a cache in a temporary folder and publish it as OUT/SOURCE with one rename. A failed build leaves no files
    behind.

    Return `meta` with the splits that were written. The written bytes depend only on the rows of each split, not on how
    the rows are divided into `Rows` objects. The caller can fill the ledger of `meta` while it produces rows; the
    totals of the ledger are checked after the last row.
    """
    target = cache_folder(out, meta.source)
    with building(target, "building", overwrite=overwrite, kind=CACHE) as staging:
        written = {
            name: _write_split(staging / name, splits.get(name, ()), meta.vocab_size, shard_tokens) for name in SPLITS
        }
        meta = replace(meta, splits=written)
        # Parse the contents of `meta.json` before writing it, so that an error is raised here and not in the reader.
        for fault in ledger_faults(staging, meta.ledger, meta.stored_counts()):
            raise ChatmillError(fault)
        parse_meta(meta.to_bytes(), place=str(staging / META))
        # Write `meta.json` last, so that its presence means that every shard is complete.
        with create(staging / META) as file:
            file.write(meta.to_bytes())
    return meta


def _write_split(folder: Path, parts: Iterable[Rows], vocab_size: int, shard_tokens: int) -> CacheSplit:
    make_folder(folder)
    shards = tuple(
        _write_shard(folder / shard_file(number), rows, vocab_size=vocab_size)
        for number, rows in enumerate(_by_shard(parts, shard_tokens))
    )
    return CacheSplit(shard_tokens, shards)


def _by_shard(parts: Iterable[Rows], shard_tokens: int) -> Iterator[Rows]:
    """Regroup the rows into one `Rows` object per shard; only one shard is in memory at a time."""
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens is {shard_tokens}; expected at least 1")
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
        raise DataError(f"{path}: token id {largest}; expected an id below {vocab_size}")
    if np.any(rows.spans["target"] != OWN_ID):
        raise DataError(
            f"{path}: a token has a target other than its own id, which a cache cannot store; prepare a dataset instead"
        )
    dtype, mask = token_dtype(vocab_size), rows.mask()
    index = np.empty(len(rows), dtype=EPISODE)
    index["start"], index["length"] = rows.row_start[:-1], rows.lengths
    counts = len(rows), len(rows.ids), int(np.count_nonzero(mask))
    with HashedFile(path) as file:
        file.write(CacheShard(*counts, sha256="").header(dtype))
        for part in (index, rows.ids.astype(dtype), mask):
            file.write(part.view(np.uint8).data)
    return CacheShard(*counts, sha256=file.info().sha256)


# Reading.


@dataclass(frozen=True)
class PrimerCache(Dataset):
    """An open cache. `cache["train"]` returns the episodes of the train split, which have a loss mask but no spans and
    no origins.
    """

    meta: CacheMeta

    @property
    def sha256(self) -> str:
        return self.meta.sha256


def is_cache(path: str | Place) -> TypeGuard[str | Path]:
    """Return whether a path is the local folder of a cache. The result is False for every URL."""
    where = place(path)
    return isinstance(where, Path) and (where / META).is_file()


def open_cache(path: str | Path) -> PrimerCache:
    """Open the cache of one source in the folder OUT/SOURCE; raise `DataError` if a shard is missing or has the wrong
    size.
    """
    return in_folder(local_path(path), EXPECTED, _cache_in)


def _cache_in(folder: OpenFolder) -> PrimerCache:
    meta = _read_meta(folder)
    for fault in _shard_faults(folder, meta):
        raise DataError(fault)
    stored = StoredFiles(folder, folder.path / META)
    return PrimerCache(stored, None, {name: _episodes(stored, name, meta) for name in SPLITS}, meta)


def _read_meta(folder: OpenFolder) -> CacheMeta:
    """Read `meta.json`; raise `DataError` if the file was changed after chatmill wrote it."""
    path = folder.path / META
    return parse_meta(read_hashed(path, "cache", folder.read), place=str(path))


def parse_meta(raw: bytes, *, place: str) -> CacheMeta:
    data = parse_hashed(raw, place=place, schema=SCHEMA, version=SCHEMA_VERSION)
    try:
        meta = _meta(data)
        # Recompute sums, sizes and the hash, to detect a file that was changed after it was written.
        unchanged = meta.to_bytes() == raw
    except (ChatmillError, AttributeError, KeyError, TypeError, ValueError, struct.error):
        unchanged = False
    if not unchanged:
        raise DataError(f"{place}: was changed or damaged; rebuild the cache")
    return meta


def _meta(data: dict[str, Any]) -> CacheMeta:
    def make(kind: type[Any], value: dict[str, Any], **parsed: Any) -> Any:
        return kind(**{each.name: value[each.name] for each in fields(kind) if each.name not in parsed}, **parsed)

    splits = {
        name: make(CacheSplit, split, shards=tuple(make(CacheShard, shard) for shard in split["shards"]))
        for name, split in data["splits"].items()
    }
    meta: CacheMeta = make(CacheMeta, data, splits=splits, ledger=Ledger.from_json(data["ledger"]))
    if tuple(splits) != SPLITS:
        raise ValueError(f"splits {', '.join(splits)}")
    for id in meta.special_token_ids.values():
        if not 0 <= id < meta.vocab_size:
            raise ValueError(f"control token {id}; expected an id below {meta.vocab_size}")
    for split in splits.values():
        for shard in split.shards:
            # Pack the header to detect counts that are too large for its fields.
            shard.header(meta.dtype)
    return meta


def _shards(folder: Path, meta: CacheMeta) -> Iterator[tuple[Path, CacheShard]]:
    for name, split in meta.splits.items():
        for number, shard in enumerate(split.shards):
            yield folder / name / shard_file(number), shard


def cache_manifest(folder: Path, meta: CacheMeta) -> Manifest:
    """Return the path of every shard of a cache, with the size and hash that `meta.json` records."""
    shards = [(path, FileInfo(shard.size(meta.dtype), shard.sha256)) for path, shard in _shards(folder, meta)]
    return Manifest(shards, META, "cache")


def _shard_faults(folder: OpenFolder, meta: CacheMeta) -> Iterator[str]:
    """Yield an error message for each shard that is missing or has the wrong size or header."""
    wrong_sizes = list(cache_manifest(folder.path, meta).size_faults(folder))
    yield from wrong_sizes
    for path, shard in _shards(folder.path, meta) if not wrong_sizes else ():
        with os.fdopen(folder.open(path), "rb") as file:
            if file.read(HEADER.size) != shard.header(meta.dtype):
                yield f"{path}: its header does not match {META}; rebuild the cache or copy it again"


def _episodes(stored: StoredFiles, split: str, meta: CacheMeta) -> CachedEpisodes:
    shards = []
    for number, shard in enumerate(meta.splits[split].shards):
        parts = _parts(meta.dtype, shard.num_examples, shard.num_tokens)
        records = {name: count for name, (_, _, count) in parts.items()}
        path = stored.path / split / shard_file(number)
        shards.append(Shard(path, shard.num_examples, shard.num_tokens, meta.dtype, records))
    return CachedEpisodes(stored, shards, ())


def _parts(
    dtype: np.dtype[np.unsignedinteger], examples: int, tokens: int
) -> dict[str, tuple[int, np.dtype[Any], int]]:
    """Return the byte offset, dtype and length of each array in a shard file: index, tokens and mask."""
    index = HEADER.size
    ids = index + examples * EPISODE.itemsize
    mask = ids + tokens * dtype.itemsize
    return {INDEX: (index, EPISODE, examples), TOKENS: (ids, dtype, tokens), MASK: (mask, MASKS, tokens)}


class CachedEpisodes(Episodes):
    """The examples of one split of a cache. The attribute `folder` of each shard is the path of the shard's file."""

    def _place(self, number: int, name: str) -> tuple[Place, np.dtype[Any], int]:
        shard = self.shards[number]
        start, dtype, _ = _parts(shard.dtype, shard.num_episodes, shard.num_tokens)[name]
        return shard.folder, dtype, start


# Verifying.


def verify_cache(path: str | Path, *, full: bool) -> Verified:
    """Check a cache and return all errors, one line each. With `full`, also hash every shard."""
    try:
        return in_folder(local_path(path), EXPECTED, lambda folder: _verified(folder, full=full))
    except DataError as error:
        return Verified((str(error),), {}, None)


def _verified(folder: OpenFolder, *, full: bool) -> Verified:
    meta = _read_meta(folder)
    listed = cache_manifest(folder.path, meta)
    faults = [*_shard_faults(folder, meta), *listed.unlisted_faults(folder, SPLITS)]
    if not faults:
        cache = _cache_in(folder)
        for name in SPLITS:
            for number, shard in enumerate(meta.splits[name].shards):
                with reading():
                    faults += _table_faults(cache[name], number, shard, meta.vocab_size)
                    cache[name].check([number])
        faults += ledger_faults(folder.path, meta.ledger, meta.stored_counts())
    if full:
        faults += listed.hash_faults(folder)
    counts = {
        name: SplitCounts(split.num_examples, split.num_tokens, split.num_label_tokens, len(split.shards))
        for name, split in meta.splits.items()
    }
    return Verified(tuple(faults), counts, meta.sha256)


def _table_faults(episodes: Episodes, number: int, shard: CacheShard, vocab_size: int) -> Iterator[str]:
    """Yield an error message for the first error in the index, mask or token ids of a shard, if any."""
    place = episodes.shards[number].folder
    index: Table = episodes.array(number, INDEX)
    length = index["length"].astype(np.int64)
    if np.any(index["length"] > shard.num_tokens) or np.any(offsets(length)[:-1] != index["start"]):
        yield f"{place}: the examples are not contiguous; rebuild the cache"
    elif length.sum() != shard.num_tokens:
        yield f"{place}: the examples cover {length.sum()} of {shard.num_tokens} tokens; rebuild the cache"
    elif shard.num_tokens:
        mask, largest = episodes.array(number, MASK), int(episodes.array(number, TOKENS).max())
        if mask.max() > 1 or np.count_nonzero(mask) != shard.num_label_tokens:
            yield f"{place}: the mask is wrong; expected {shard.num_label_tokens} ones, and zeros elsewhere"
        elif largest >= vocab_size:
            yield f"{place}: token id {largest}; expected an id below {vocab_size}"
