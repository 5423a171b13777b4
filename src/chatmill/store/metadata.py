"""Read and write `dataset_metadata.json`, which records how a dataset was built, its numbers of episodes and tokens,
and the size and hash of every file.

Reading raises `DataError` if the file was changed or is inconsistent; see the module `hashed`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.errors import ChatmillError, DataError, one_line
from chatmill.ledger import Ledger
from chatmill.rows import File
from chatmill.store import layout
from chatmill.store.files import create
from chatmill.store.hashed import FileInfo, JsonObject, Manifest, hashed_text, parse_hashed, read_hashed, self_hash
from chatmill.store.layout import METADATA, REMOVED, SPLITS, TARGETS, TOKENIZER_STATE, shard_name, token_dtype

SCHEMA = "chatmill-episodes"
SCHEMA_VERSION = 1
NOT_WRITTEN = FileInfo(0, "")
NOT_COUNTS = ("files", "source")
"""Fields of a shard's metadata that are not counts."""
TOTALS = ("num_episodes", "num_tokens", "num_trained_tokens")
"""Counts for which the metadata of a split stores the sum over all shards."""


def total(name: str) -> Any:
    return property(lambda split: sum(getattr(shard, name) for shard in split.shards))


@dataclass(frozen=True)
class ShardInfo:
    num_episodes: int
    num_tokens: int
    num_trained_tokens: int
    num_spans: int
    num_segments: int
    shortest: int
    longest: int
    files: Mapping[str, FileInfo]
    source: str | None = None
    """The source of all rows in the shard, if the dataset has several sources."""


@dataclass(frozen=True)
class SplitInfo:
    shards: tuple[ShardInfo, ...]
    files: tuple[File, ...]
    """The input files in order of first use; origins refer to them by index."""

    num_episodes = total("num_episodes")
    num_tokens = total("num_tokens")
    num_trained_tokens = total("num_trained_tokens")


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The metadata of a dataset. `write_metadata` sets the field `tokenizer_state`."""

    vocab_size: int
    format: Any
    tokenizer: Mapping[str, str]
    """The `name` and `sha256` of the tokenizer."""
    special_token_ids: Mapping[str, int]
    pad_token_id: int | None
    splits: Mapping[str, SplitInfo]
    ledger: Ledger
    config: Mapping[str, Any]
    """The settings of the build that affect the bytes of the dataset."""
    tokenizer_state: FileInfo = NOT_WRITTEN
    removed: FileInfo | None = None
    """The file that lists removed records, or None if no file was written."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        return token_dtype(self.vocab_size)

    @cached_property
    def sha256(self) -> str:
        """The hash of the dataset: datasets with equal hashes have equal bytes."""
        return self_hash(_to_json(self))


def write_metadata(folder: Path, metadata: Metadata, *, tokenizer_state: Any) -> Metadata:
    """Complete a dataset: write `tokenizer_state.json` and, as the last file, `dataset_metadata.json`.

    `tokenizer_state`, and the `format` and `config` of the metadata, can be any JSON values. Return the metadata as
    read back from the written JSON.
    """
    state = (json.dumps(tokenizer_state, sort_keys=True, indent=1) + "\n").encode()
    metadata = replace(metadata, tokenizer_state=FileInfo(len(state), hashlib.sha256(state).hexdigest()))
    text = hashed_text(_to_json(metadata))
    # Read the metadata back, so that an error is raised while writing and not in the reader.
    parsed = parse_metadata(text, place=str(folder / METADATA))
    with create(folder / TOKENIZER_STATE) as file:
        file.write(state)
    # Write the metadata last, so that its presence means that every shard is complete.
    with create(folder / METADATA) as file:
        file.write(text)
    return parsed


def read_metadata(folder: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> Metadata:
    """Read the metadata of a dataset; raise `DataError` if the file differs from what chatmill wrote."""
    path = folder / METADATA
    return parse_metadata(read_hashed(path, "dataset", read), place=str(path))


def is_chatmill_metadata(raw: bytes) -> bool:
    """Return whether `write_metadata` wrote this metadata, which may have been damaged since then.

    Also return True for invalid JSON, and for a wrong schema if two other keys of chatmill's metadata exist.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return True
    return not isinstance(value, dict) or value.get("schema") == SCHEMA or {"sha256", "ledger"} <= value.keys()


def parse_metadata(raw: bytes, *, place: str) -> Metadata:
    data = parse_hashed(raw, place=place, schema=SCHEMA, version=SCHEMA_VERSION)
    data.pop("sha256", None)
    if hashed_text(data) != raw:
        raise DataError(f"{place}: does not match its own sha256, so it was changed or damaged; rebuild the dataset")
    return _from_json(JsonObject(data, place), place)


# To JSON.


def _to_json(metadata: Metadata) -> dict[str, Any]:
    data = asdict(metadata)
    for name, split in data["splits"].items():
        split |= {total: getattr(metadata.splits[name], total) for total in TOTALS}
        for number, shard in enumerate(split["shards"]):
            shard["name"] = shard_name(number)
            if shard["source"] is None:
                # Shards of a dataset with a single source do not have this key.
                del shard["source"]
    if metadata.removed is None:
        # Omit a null value, so that datasets without removed records have the same hash as before this key existed.
        del data["removed"]
    schema = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "dtype": metadata.dtype.name}
    return {**data, **schema, "ledger": metadata.ledger.to_json()}


# Parsing, with checks of every value and of the consistency between values.


def _from_json(data: JsonObject, place: str) -> Metadata:
    vocab_size = data.count("vocab_size", least=1, most=layout.WIDE)
    dtype = token_dtype(vocab_size)
    data.equal("dtype", dtype.name)
    tokenizer, special, splits = (data.table(name) for name in ("tokenizer", "special_token_ids", "splits"))
    tokenizer.check("name", isinstance(tokenizer.value.get("name"), str), "a text")
    tokenizer.sha256("sha256")
    for name in special.value:
        special.count(name, most=vocab_size - 1)
    pad = data.value.get("pad_token_id")
    for name in splits.value:
        if name not in SPLITS:
            raise data.fault("the name of a split", name, " or ".join(SPLITS))
    try:
        ledger = Ledger.from_json(data.value["ledger"])
    except (ChatmillError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{place}: cannot read the ledger ({one_line(str(error))})") from None
    return Metadata(
        vocab_size=vocab_size,
        format=data.value.get("format"),
        tokenizer=tokenizer.value,
        special_token_ids=special.value,
        pad_token_id=None if pad is None else data.count("pad_token_id", most=vocab_size - 1),
        splits={name: _split(splits.table(name), dtype) for name in SPLITS if name in splits.value},
        ledger=ledger,
        config=data.table("config").value,
        tokenizer_state=_file(data.table("tokenizer_state")),
        removed=_file(data.table("removed")) if "removed" in data.value else None,
    )


def _split(data: JsonObject, dtype: np.dtype[Any]) -> SplitInfo:
    for number, file in enumerate(data.items("files")):
        if not (isinstance(file, list) and len(file) == 2 and all(isinstance(part, str) for part in file)):
            raise data.fault(f"files[{number}]", file, "a source and a path")
    shards = tuple(_shard(shard, number, dtype) for number, shard in enumerate(data.tables("shards")))
    if len({shard.source is None for shard in shards}) > 1:
        expected = "a source for every shard, or for no shard"
        raise data.fault("shards", [shard.source for shard in shards], expected)
    split = SplitInfo(shards, tuple(File(*file) for file in data.items("files")))
    for name in TOTALS:
        data.count(name)
        data.equal(name, getattr(split, name))
    return split


def _shard(data: JsonObject, number: int, dtype: np.dtype[Any]) -> ShardInfo:
    # Never use the name as a path; derive the path of a shard from its number.
    data.equal("name", shard_name(number))
    counts = {field.name: data.count(field.name) for field in fields(ShardInfo) if field.name not in NOT_COUNTS}
    listed = data.table("files")
    if listed.value.keys() - {TARGETS} != layout.COUNTS.keys():
        raise data.fault("files", sorted(listed.value), f"{', '.join(layout.COUNTS)} and optionally {TARGETS}")
    files = {name: _file(listed.table(name)) for name in listed.value}
    dtypes = layout.record_dtypes(dtype)
    for name, count in layout.COUNTS.items():
        if files[name].size != (size := counts[count] * dtypes[name].itemsize):
            raise listed.table(name).fault("size", files[name].size, f"{size}, according to the counts of the shard")
    if TARGETS in files and files[TARGETS].size % dtypes[TARGETS].itemsize:
        raise listed.table(TARGETS).fault("size", files[TARGETS].size, "whole records")
    source = data.value.get("source")
    data.check(
        "source",
        source is None or (isinstance(source, str) and bool(source)),
        "a non-empty source name",
    )
    return ShardInfo(**counts, files=files, source=source)


def _file(data: JsonObject) -> FileInfo:
    return FileInfo(data.count("size"), data.sha256("sha256"))


def manifest(folder: Path, metadata: Metadata) -> Manifest:
    """Return a manifest of all files of a dataset, with their sizes and hashes from the metadata."""
    return Manifest([(folder / name, info) for name, info in listed_files(metadata)], "the metadata", "dataset")


def listed_files(metadata: Metadata) -> Iterator[tuple[str, FileInfo]]:
    """Yield the relative path, size and hash of every file of a dataset except the metadata."""
    yield TOKENIZER_STATE, metadata.tokenizer_state
    if metadata.removed is not None:
        yield REMOVED, metadata.removed
    for name, split in metadata.splits.items():
        for number, shard in enumerate(split.shards):
            for file, info in shard.files.items():
                yield f"{name}/{shard_name(number)}/{file}", info
