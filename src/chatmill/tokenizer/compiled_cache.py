"""A cache of tokenizers compiled for the C engine, each from a tokenizer.json and its control tokens.

The cache also stores whether two encoding methods agree on the probe texts, because this check takes as long as
compiling.

    <cache folder>/tokenizers/<key>       the folder of `remote/cache_settings.py`

    SHA-256 of the following bytes | size of the header | header (JSON) | buffers

The key is a hash of everything that determines the content: the tokenizer.json, the control tokens, the code and the
library versions. The header also contains the key, so that a renamed file is never used. A file that is damaged,
belongs to another user, or is writable by other users is replaced.

System errors are ignored, because the cache affects only speed. $CHATMILL_TOKENIZER_CACHE=0 disables the cache.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers

from chatmill.errors import UsageError
from chatmill.remote.cache_settings import OTHERS_WRITE, cache_folder
from chatmill.tokenizer.byte_bpe import engine_file
from chatmill.tokenizer.tokenizer_json import Compiled

SWITCH = "CHATMILL_TOKENIZER_CACHE"
PART = "tokenizers"
LIMIT = 1 << 28
"""Maximum size of a file in bytes. The largest vocabularies in use need a twentieth of this size."""
MOST_FILES = 32
"""Maximum number of files. The least recently used files are removed first."""
_HASH, _SIZE = 32, 8


class _Header(msgspec.Struct):
    key: str
    control: dict[str, int]
    vocab_size: int
    nfc: bool
    byte_decoder: bool
    numbers: dict[str, int]
    buffers: dict[str, int]
    """Size of each buffer, in order."""


def cache_key(raw: bytes, *about: object) -> str | None:
    """Return the cache key for a tokenizer.json and the JSON values `about`, or None if the cache is disabled."""
    engine = engine_file()
    if engine is None or os.environ.get(SWITCH) == "0":
        return None
    try:
        code = _code(engine)
    except OSError:
        return None
    versions = [tokenizers.__version__, unicodedata.unidata_version, sys.byteorder]
    parts = [code, *versions, hashlib.sha256(raw).hexdigest(), *about]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


@cache
def _code(engine: Path) -> str:
    """Return a hash of the code that compiles tokenizers and of the compiled engine."""
    digest = hashlib.sha256()
    for path in [*sorted(Path(__file__).parent.glob("*.py")), engine]:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def read_compiled(key: str) -> Compiled | None:
    """Return the compiled tokenizer with this key, or None if the file is missing or damaged."""
    content = _read(key)
    return None if content is None else _decoded(key, content)


def write_compiled(key: str, compiled: Compiled) -> None:
    _write(key, _encoded(key, compiled))


def remembered(key: str | None, find: Callable[[], bool]) -> bool:
    """Return the cached result of `find`, or call `find` and cache its result. If `key` is None, nothing is cached."""
    answers = {} if key is None else {_answer(key, value): value for value in (False, True)}
    if key is not None and (content := _read(key)) is not None and bytes(content) in answers:
        return answers[bytes(content)]
    value = find()
    if key is not None:
        _write(key, _answer(key, value))
    return value


def _answer(key: str, value: bool) -> bytes:
    return msgspec.json.encode([key, value])


# Files.


def _read(key: str) -> memoryview | None:
    """Return the content of a cache file, or None if the file is missing or damaged."""
    with suppress(OSError, UsageError):
        path = _folder() / key
        data = _own_bytes(path)
        if data is not None and hashlib.sha256(content := memoryview(data)[_HASH:]).digest() == data[:_HASH]:
            with suppress(OSError):
                os.utime(path)
            return content
    return None


def _write(key: str, content: bytes) -> None:
    """Write a cache file atomically. If there are too many files, remove the least recently used."""
    with suppress(OSError, UsageError):
        folder = _folder()
        fd, name = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(fd, "wb") as file:
                file.writelines((hashlib.sha256(content).digest(), content))
            Path(name).replace(folder / key)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
        files = sorted(folder.iterdir(), key=lambda each: each.lstat().st_mtime_ns)
        for old in files[:-MOST_FILES]:
            old.unlink(missing_ok=True)


def _folder() -> Path:
    return cache_folder((PART,)) / PART


def _own_bytes(path: Path) -> bytes | None:
    """Return the bytes of a regular file that only the current user can write, or None for any other file."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        own = status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE
        if not (stat.S_ISREG(status.st_mode) and own and status.st_size <= LIMIT):
            return None
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


def _encoded(key: str, compiled: Compiled) -> bytes:
    numbers = {name: int(value) for name, value in compiled.columns.items() if isinstance(value, int)}
    buffers = {
        name: value.tobytes() if isinstance(value, np.ndarray) else bytes(value)
        for name, value in compiled.columns.items()
        if name not in numbers
    }
    sizes = {name: len(value) for name, value in buffers.items()}
    about = (compiled.control, compiled.vocab_size, compiled.nfc, compiled.byte_decoder)
    header = msgspec.json.encode(_Header(key, *about, numbers, sizes))
    return b"".join([len(header).to_bytes(_SIZE, "little"), header, *buffers.values()])


def _decoded(key: str, content: memoryview) -> Compiled | None:
    at = _SIZE + int.from_bytes(content[:_SIZE], "little")
    header = msgspec.json.decode(content[_SIZE:at], type=_Header)
    if header.key != key:
        return None
    columns: dict[str, Any] = dict(header.numbers)
    for name, size in header.buffers.items():
        columns[name] = content[at : at + size]
        at += size
    return Compiled(header.control, header.vocab_size, header.nfc, header.byte_decoder, columns)
