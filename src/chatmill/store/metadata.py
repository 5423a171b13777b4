"""`dataset_metadata.json`: what a dataset is, how it was made, and the size and hash of all it holds.

Nothing in it is believed when it is read: it must be, byte for byte, what `write_metadata` writes, hash to
the hash it names, and agree with itself.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.errors import ChatmillError, DataError, one_line
from chatmill.ledger import Ledger
from chatmill.rows import File
from chatmill.store.files import create
from chatmill.store.layout import (
    INDEX,
    MASK,
    METADATA,
    ORIGINS,
    SPANS,
    SPLITS,
    TARGETS,
    TOKENIZER_STATE,
    TOKENS,
    WIDE,
    record_dtypes,
    shard_name,
    token_dtype,
)

SCHEMA = "chatmill-episodes"
SCHEMA_VERSION = 1
MOST = 2**62
"""No count on disk is larger; sums of a few of them fit 64 bits."""


@dataclass(frozen=True)
class FileInfo:
    size: int
    sha256: str


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


@dataclass(frozen=True)
class SplitInfo:
    shards: tuple[ShardInfo, ...]
    files: tuple[File, ...]
    """What the file numbers of origins mean, in order of first use."""

    @property
    def num_episodes(self) -> int:
        return sum(shard.num_episodes for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_trained_tokens(self) -> int:
        return sum(shard.num_trained_tokens for shard in self.shards)


@dataclass(frozen=True)
class Metadata:
    vocab_size: int
    format: Any
    tokenizer: Mapping[str, str]
    """Its `name` and `sha256`."""
    special_token_ids: Mapping[str, int]
    pad_token_id: int | None
    splits: Mapping[str, SplitInfo]
    ledger: Ledger
    config: Mapping[str, Any]
    """Everything else that determined the bytes."""
    tokenizer_state: FileInfo

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        return token_dtype(self.vocab_size)

    @cached_property
    def sha256(self) -> str:
        """The hash of the dataset: two datasets that share it hold the same bytes."""
        return self_hash(_to_json(self))


def write_metadata(
    folder: Path,
    *,
    vocab_size: int,
    format: Any,
    tokenizer: Mapping[str, str],
    tokenizer_state: Any,
    special_token_ids: Mapping[str, int],
    pad_token_id: int | None,
    splits: Mapping[str, SplitInfo],
    ledger: Ledger,
    config: Mapping[str, Any],
) -> Metadata:
    """Finish a dataset: write `tokenizer_state.json`, and then, last of all, `dataset_metadata.json`.

    `format`, `tokenizer_state` and `config` are any JSON values.
    """
    state = (json.dumps(tokenizer_state, sort_keys=True, indent=1) + "\n").encode()
    metadata = Metadata(
        vocab_size=vocab_size,
        format=format,
        tokenizer=dict(tokenizer),
        special_token_ids=dict(special_token_ids),
        pad_token_id=pad_token_id,
        splits=dict(splits),
        ledger=ledger,
        config=dict(config),
        tokenizer_state=FileInfo(len(state), hashlib.sha256(state).hexdigest()),
    )
    data = _to_json(metadata)
    text = text_of({**data, "sha256": self_hash(data)})
    # What cannot be read back is a fault of the caller, better found now than by the reader.
    parsed = parse_metadata(text, place=str(folder / METADATA))
    with create(folder / TOKENIZER_STATE) as file:
        file.write(state)
    # Written last: its presence means that every shard is complete.
    with create(folder / METADATA) as file:
        file.write(text)
    return parsed


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a dataset, or `DataError` if it is not exactly what was written."""
    path = folder / METADATA
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; a dataset has one, and an unfinished build has none yet") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); rebuild the dataset or copy it again") from None
    return parse_metadata(raw, place=str(path))


def is_ours(raw: bytes) -> bool:
    """Whether this metadata is, or once was, written by `write_metadata` rather than by another program.

    Two keys are looked at, so that one flipped bit cannot pass a damaged dataset off as a stranger's.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return True
    return not isinstance(value, dict) or "schema" in value or "sha256" in value


def parse_metadata(raw: bytes, *, place: str) -> Metadata:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({one_line(str(error))}); the file is damaged") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise DataError(f'{place}: "schema" is not "{SCHEMA}"; the file is damaged or not of chatmill')
    if data.get("schema_version") != SCHEMA_VERSION:
        raise DataError(
            f"{place}: schema version {one_line(str(data.get('schema_version')))}; this chatmill reads {SCHEMA_VERSION}"
        )
    named = data.pop("sha256", None)
    if named != self_hash(data) or text_of({**data, "sha256": named}) != raw:
        raise DataError(f"{place}: does not have the hash it names; it was changed or damaged, rebuild the dataset")
    return _MetadataParser(place).metadata(data)


# To JSON.


def _to_json(metadata: Metadata) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "dtype": metadata.dtype.name,
        "vocab_size": metadata.vocab_size,
        "format": metadata.format,
        "tokenizer": metadata.tokenizer,
        "tokenizer_state": vars(metadata.tokenizer_state),
        "special_token_ids": metadata.special_token_ids,
        "pad_token_id": metadata.pad_token_id,
        "splits": {name: _split_to_json(split) for name, split in metadata.splits.items()},
        "ledger": metadata.ledger.to_json(),
        "config": metadata.config,
    }


def _split_to_json(split: SplitInfo) -> dict[str, Any]:
    return {
        "num_episodes": split.num_episodes,
        "num_tokens": split.num_tokens,
        "num_trained_tokens": split.num_trained_tokens,
        "files": [list(file) for file in split.files],
        "shards": [
            {
                "name": shard_name(number),
                **vars(shard),
                "files": {name: vars(info) for name, info in shard.files.items()},
            }
            for number, shard in enumerate(split.shards)
        ],
    }


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def text_of(value: Mapping[str, Any]) -> bytes:
    """One line a key, in canonical order: as quick to write and check as a single line, and readable."""
    lines = [f"{json.dumps(key)}: {_canonical(value[key])}" for key in sorted(value)]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def self_hash(data: Mapping[str, Any]) -> str:
    """The hash of the metadata without the key that holds it."""
    return hashlib.sha256(_canonical(data).encode()).hexdigest()


# From JSON.


class _MetadataParser:
    """Turns parsed JSON into `Metadata`, and every lie in it into one line that says where."""

    def __init__(self, place: str) -> None:
        self._place = place

    def _fault(self, key: str, found: Any, right: str) -> DataError:
        return DataError(f"{self._place}: {key} is {one_line(json.dumps(found))}; expected {right}")

    def _table(self, value: Any, key: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._fault(key, value, "an object")
        return value

    def _list(self, value: Any, key: str) -> list[Any]:
        if not isinstance(value, list):
            raise self._fault(key, value, "a list")
        return value

    def _count(self, value: Any, key: str, *, least: int = 0, most: int = MOST) -> int:
        if type(value) is not int or not least <= value <= most:
            raise self._fault(key, value, f"a whole number from {least} to {most}")
        return value

    def _hash(self, value: Any, key: str) -> str:
        if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
            raise self._fault(key, value, "a sha256 in hexadecimal digits")
        return value

    def _equal(self, value: Any, key: str, right: Any) -> None:
        if type(value) is not type(right) or value != right:
            raise self._fault(key, value, json.dumps(right))

    def metadata(self, data: dict[str, Any]) -> Metadata:
        vocab_size = self._count(data.get("vocab_size"), "vocab_size", least=1, most=WIDE)
        self._equal(data.get("dtype"), "dtype", token_dtype(vocab_size).name)
        tokenizer = self._table(data.get("tokenizer"), "tokenizer")
        if not isinstance(tokenizer.get("name"), str):
            raise self._fault("tokenizer.name", tokenizer.get("name"), "a text")
        self._hash(tokenizer.get("sha256"), "tokenizer.sha256")
        special = self._table(data.get("special_token_ids"), "special_token_ids")
        for name, id in special.items():
            self._count(id, f"special_token_ids.{one_line(name)}", most=vocab_size - 1)
        if (pad := data.get("pad_token_id")) is not None:
            self._count(pad, "pad_token_id", most=vocab_size - 1)
        splits = self._table(data.get("splits"), "splits")
        for name in splits:
            if name not in SPLITS:
                raise self._fault("the name of a split", name, " or ".join(SPLITS))
        return Metadata(
            vocab_size=vocab_size,
            format=data.get("format"),
            tokenizer=tokenizer,
            special_token_ids=special,
            pad_token_id=pad,
            splits={
                name: self._split(splits[name], f"splits.{name}", token_dtype(vocab_size))
                for name in SPLITS
                if name in splits
            },
            ledger=self._ledger(data.get("ledger")),
            config=self._table(data.get("config"), "config"),
            tokenizer_state=self._file(data.get("tokenizer_state"), "tokenizer_state"),
        )

    def _split(self, value: Any, key: str, dtype: np.dtype[Any]) -> SplitInfo:
        data = self._table(value, key)
        files = []
        for number, file in enumerate(self._list(data.get("files"), f"{key}.files")):
            if not (isinstance(file, list) and len(file) == 2 and all(isinstance(part, str) for part in file)):
                raise self._fault(f"{key}.files[{number}]", file, "a source and a path")
            files.append(File(*file))
        shards = self._list(data.get("shards"), f"{key}.shards")
        split = SplitInfo(
            tuple(
                self._shard(shard, f"{key}.shards[{number}]", shard_name(number), dtype)
                for number, shard in enumerate(shards)
            ),
            tuple(files),
        )
        for count in ("num_episodes", "num_tokens", "num_trained_tokens"):
            self._equal(data.get(count), f"{key}.{count}", self._count(getattr(split, count), f"{key}.{count}"))
        return split

    def _shard(self, value: Any, key: str, name: str, dtype: np.dtype[Any]) -> ShardInfo:
        data = self._table(value, key)
        # The name is never joined to a path: a shard lies where its number says.
        self._equal(data.get("name"), f"{key}.name", name)
        counts = {
            count: self._count(data.get(count), f"{key}.{count}")
            for count in (
                "num_episodes",
                "num_tokens",
                "num_trained_tokens",
                "num_spans",
                "num_segments",
                "shortest",
                "longest",
            )
        }
        records = {
            TOKENS: counts["num_tokens"],
            MASK: counts["num_tokens"],
            INDEX: counts["num_episodes"],
            SPANS: counts["num_spans"],
            ORIGINS: counts["num_segments"],
        }
        listed = self._table(data.get("files"), f"{key}.files")
        if listed.keys() - {TARGETS} != records.keys():
            raise self._fault(f"{key}.files", sorted(listed), f"{', '.join(records)} and perhaps {TARGETS}")
        files = {file: self._file(info, f"{key}.files.{file}") for file, info in listed.items()}
        sizes = record_dtypes(dtype)
        for file, count in records.items():
            if files[file].size != count * sizes[file].itemsize:
                right = f"{count * sizes[file].itemsize}, as its counts say"
                raise self._fault(f"{key}.files.{file}.size", files[file].size, right)
        if TARGETS in files and files[TARGETS].size % sizes[TARGETS].itemsize:
            raise self._fault(f"{key}.files.{TARGETS}.size", files[TARGETS].size, "whole records")
        return ShardInfo(**counts, files=files)

    def _file(self, value: Any, key: str) -> FileInfo:
        data = self._table(value, key)
        return FileInfo(self._count(data.get("size"), f"{key}.size"), self._hash(data.get("sha256"), f"{key}.sha256"))

    def _ledger(self, value: Any) -> Ledger:
        try:
            return Ledger.from_json(value)
        except (ChatmillError, AttributeError, TypeError, ValueError) as error:
            raise DataError(f"{self._place}: the ledger cannot be read ({one_line(str(error))})") from None


def listed_files(folder: Path, metadata: Metadata) -> Iterator[tuple[Path, FileInfo]]:
    """Every file that the metadata answers for, with what it says of it."""
    yield folder / TOKENIZER_STATE, metadata.tokenizer_state
    for name, split in metadata.splits.items():
        for number, shard in enumerate(split.shards):
            for file, info in shard.files.items():
                yield folder / name / shard_name(number) / file, info


def size_faults(folder: Path, metadata: Metadata) -> Iterator[str]:
    """One line for every file that is missing or has not the size it was written with."""
    for path, info in listed_files(folder, metadata):
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            yield f"{path}: missing; rebuild the dataset or copy it again"
            continue
        if not stat.S_ISREG(status.st_mode):
            yield f"{path}: not a file; rebuild the dataset or copy it again"
        elif (size := status.st_size) != info.size:
            yield f"{path}: {size} bytes; the metadata says {info.size}; rebuild the dataset or copy it again"
