"""Expand names, globs and folders to local and remote files, and open plain and compressed files."""

from __future__ import annotations

import glob
import io
import os
import warnings
from codecs import getincrementaldecoder
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chatmill.errors import DataError, RecordError, UsageError, one_line
from chatmill.records.compressed import LOOK, NAMES, decompressed, form_of
from chatmill.records.raw_files import open_raw
from chatmill.records.read_log import ReadLog
from chatmill.records.standard_input import NAME, is_standard_input, standard_input
from chatmill.remote import objects
from chatmill.remote.urls import EXTRAS, Place, Url, place

TABLES = (".parquet", ".arrow")
KINDS = (".jsonl", ".json", ".txt", *TABLES)
SUFFIXES = tuple(kind + compression for compression in ("", *NAMES) for kind in KINDS)
EXPECTED = f"{', '.join(KINDS)}, each also with {', '.join(NAMES)}"
WITHOUT_RECORDS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files without records that Hugging Face datasets writes next to its tables."""
METADATA = "dataset_metadata.json"
"""Metadata file of a chatmill dataset."""
SHOWN_NAMES = 3
Units = Generator[tuple[int, bytes], None, None]
"""The line or table row where each record starts, counted from 1, and the bytes of the record."""

_BOM = b"\xef\xbb\xbf"
_BUFFER = 1 << 18


def expand(inputs: Sequence[str | Place]) -> list[Place]:
    """Expand names, globs and folders to a list of distinct files; the files of a glob or folder are sorted."""
    given = [inputs] if isinstance(inputs, str | Path | Url) else inputs
    refuse_repeated(given)
    files: dict[Any, Place] = {}
    for name in given:
        for path in _matches(name):
            suffix(path)
            files.setdefault(identity(path), path)
    return list(files.values())


def refuse_repeated(names: Iterable[str | Place]) -> None:
    """Raise `UsageError` if standard input is given more than once."""
    if sum(str(name) == NAME for name in names) > 1:
        raise UsageError(f"{NAME}: is given twice, but standard input can be read only once; remove one")


def local_files(inputs: Sequence[str | Place]) -> list[Path]:
    """Return the local files in `inputs`, which a command must not overwrite."""
    here = [path for name in inputs if isinstance(path := place(name), Path)]
    return [path for path in expand(here) if isinstance(path, Path)]


def identity(path: Place) -> Path | Url:
    """Return the resolved path of a local file, or the URL of a remote file, to detect files that are given twice."""
    return path.resolve() if isinstance(path, Path) else path


def suffix(path: Place) -> str:
    """Return the suffix of a file, such as `.jsonl.gz`; raise `DataError` if the suffix is not supported."""
    for known in reversed(SUFFIXES):
        if path.name.lower().endswith(known):
            return known
    advice = "; docs/reference/records.md shows how to convert it" if ".csv" in path.name.lower() else ""
    raise DataError(f"{shown(path)}: unsupported file type; expected {EXPECTED}{advice}")


def compression(path: Place) -> str:
    """Return the compression suffix of a file, such as `.gz`, or an empty string."""
    return next((ending for ending in NAMES if path.name.lower().endswith(ending)), "")


def kind(path: Place) -> str:
    """Return the suffix of a file without its compression suffix, such as `.jsonl`."""
    return suffix(path).removesuffix(compression(path))


def source_name(path: Place) -> str:
    """Return the file name without its suffix: `conversations` for `data/conversations.jsonl.gz`."""
    return path.name[: -len(suffix(path))]


def label(path: Place) -> str:
    """Return the name of a file as the user gave it, without credentials in a URL."""
    return NAME if is_standard_input(path) else str(path)


def shown(path: Place) -> str:
    """Return the label of a file, escaped for printing on one line."""
    return one_line(label(path), 1000)


@contextmanager
def open_bytes(
    path: Place, *, log: ReadLog | None = None, start: int = 0, stop: int | None = None
) -> Iterator[io.BufferedReader]:
    """Open a file at `start`, skip a byte order mark, and decompress the file according to its suffix.

    `log` records the raw bytes that are read. The caller reads only bytes before `stop`.
    """
    try:
        raw = open_raw(path, log, stop=stop)
    except OSError as error:
        raise DataError(f"{shown(path)}: cannot be opened; {error.strerror or error}") from None
    with raw:
        file: Any = decompressed(raw, compression(path), shown(path)) if compression(path) else raw
        if start or path.name.lower().endswith(TABLES):
            file.seek(start)
        else:
            begin = file.read(LOOK)
            if kind(path) not in TABLES:
                _check_form(path, begin)
            file.seek(len(_BOM) if begin.startswith(_BOM) else 0)
        # The buffer reads from `raw`, so `log` records all bytes that are read into the buffer.
        yield io.BufferedReader(raw, _BUFFER) if file is raw else file


def _check_form(path: Place, start: bytes) -> None:
    """Raise `RecordError` if a text file starts with the magic bytes of another format."""
    if form := form_of(start):
        what = "the decompressed content" if compression(path) else "the file"
        raise RecordError(f"{what} is {form.name}, not {kind(path)} text", form.right, kind="file_type")


def check_text(path: Place) -> None:
    """Raise `DataError` if the start of a file is not UTF-8 text."""
    with open_bytes(path) as file:
        try:
            getincrementaldecoder("utf-8")().decode(file.read(_BUFFER))
        except UnicodeDecodeError:
            raise DataError(f"{shown(path)}: is not UTF-8 text; expected conversations in UTF-8") from None


# Expand names to files.


def _matches(name: str | Place) -> list[Place]:
    if str(name) == NAME:
        return [standard_input()]
    path = place(name)
    if isinstance(path, Url):
        return _remote_matches(path)
    if path.is_dir():
        return _files_in(path, _walk(path))
    if path.exists():
        return [path]
    if not glob.has_magic(str(path)):
        raise DataError(f"{shown(path)}: no such file; expected a file, a folder or a glob")
    # Use glob.glob instead of Path.glob, because * in Path.glob also matches hidden files.
    names = glob.glob(str(path), recursive=True)  # noqa: PTH207
    matches = sorted(match for name in names if (match := Path(name)).is_file())
    if not matches:
        raise DataError(f"{shown(path)}: the glob matches no file; expected at least one")
    return [*matches]


def _remote_matches(url: Url) -> list[Place]:
    pattern = str(url).partition("://")[2]
    # An object name may contain brackets, so look for this exact name before expanding a glob.
    if "*" not in pattern and not url.is_folder and objects.find(url) is not None:
        return [url]
    if glob.has_magic(pattern):
        hidden = any(part.startswith(".") for part in pattern.split("/"))
        matches = [match for match in objects.matches(url) if hidden or not _is_hidden(match)]
        if not matches:
            raise DataError(f"{shown(url)}: the glob matches no object; expected at least one")
        return [*sorted(matches, key=_parts)]
    if not url.is_folder and EXTRAS[url.scheme] == "http":
        # Web servers cannot list folders.
        raise objects.missing(url)
    if not (below := [each for each in objects.names_below(url) if not each.is_folder]):
        raise objects.missing(url)
    return _files_in(url, [each for each in below if not _is_hidden(each, len(_parts(url)))])


def _parts(url: Url) -> list[str]:
    """Return the components of a URL, as a sort key that orders objects like the files in a folder."""
    return str(url).rstrip("/").split("/")


def _is_hidden(url: Url, known: int = 3) -> bool:
    return any(part.startswith(".") for part in _parts(url)[known:])


def _walk(folder: Path) -> list[Path]:
    """Return all files in a folder and its subfolders; follow symbolic links, and skip hidden files."""
    files, seen = [], set()
    for above, folders, names in os.walk(folder, followlinks=True, onerror=_raise):
        # Following a link to a parent folder would never end.
        if (real := Path(above).resolve()) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(above, name) for name in names if not name.startswith(".")]
    return [path for path in files if path.is_file()]


def _raise(error: OSError) -> None:
    raise error


def _files_in(folder: Place, files: Sequence[Place]) -> list[Place]:
    """Return the sorted record files of a folder; warn about other files."""
    if datasets := [path.parent for path in files if path.name == METADATA]:
        what = "is a dataset" if datasets[0] == folder else f"contains the dataset {shown(datasets[0])}"
        raise DataError(f"{shown(folder)}: {what}; expected a folder with only conversations, or a glob")
    read: list[Place] = []
    others: list[str] = []
    for path in files:
        if path.name.lower().endswith(SUFFIXES) and path.name not in WITHOUT_RECORDS:
            read.append(path)
        else:
            others.append(path.name)
    if not read:
        raise DataError(f"{shown(folder)}: the folder has no record files; expected {EXPECTED}")
    if others:
        names = ", ".join(map(one_line, sorted(others)[:SHOWN_NAMES])) + (", …" if len(others) > SHOWN_NAMES else "")
        noun = "file" if len(others) == 1 else "files"
        warnings.warn(f"{shown(folder)}: skipped {len(others):,} {noun} with other extensions: {names}", stacklevel=2)
    return sorted(read, key=lambda path: _parts(path) if isinstance(path, Url) else list(path.parts))
