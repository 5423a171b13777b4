"""Write the cache of a source: see `primer_cache` for its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from chatmill.errors import ChatmillError, DataError
from chatmill.rows import OWN_ID, Rows, concat
from chatmill.store.files import create, make_folder
from chatmill.store.hashed_files import HashedFile
from chatmill.store.layout import EPISODE, SPLITS, token_dtype
from chatmill.store.primer_cache import META, CacheMeta, CacheShard, CacheSplit, cache_folder, parse_meta, shard_file
from chatmill.store.publish import building
from chatmill.store.verify import ledger_faults

SHARD_TOKENS = 1 << 24


def write_cache(
    out: Path,
    meta: CacheMeta,
    splits: Mapping[str, Iterable[Rows]],
    *,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
) -> CacheMeta:
    """Build a cache in a staging folder and publish it as OUT/SOURCE with one rename, or leave nothing.

    Returns `meta` with the splits that were written. The rows of a split may come in any number of parts, without
    influence on the bytes. The ledger of `meta` may be filled while they are produced; it must count them all, and
    balance, when the last part is written.
    """
    target = cache_folder(out, meta.source)
    with building(target, "building", overwrite=overwrite, marker=META) as staging:
        written = {
            name: _write_split(staging / name, splits.get(name, ()), meta.vocab_size, shard_tokens) for name in SPLITS
        }
        meta = replace(meta, splits=written)
        # What is inconsistent or cannot be read back is an error of the caller, better found now than by the reader.
        for fault in ledger_faults(staging, meta.ledger, meta.stored_counts()):
            raise ChatmillError(fault)
        parse_meta(meta.to_bytes(), place=str(staging / META))
        # Written last: its presence means that every shard is complete.
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
    """The rows of each shard, of at most `shard_tokens` tokens; only one shard is in memory at a time."""
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
    with HashedFile(path) as file:
        file.write(CacheShard(*counts, sha256="").header(dtype))
        for part in (index, rows.ids.astype(dtype), mask):
            file.write(part.view(np.uint8).data)
    return CacheShard(*counts, sha256=file.info().sha256)
