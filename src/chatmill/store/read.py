"""Open datasets, and read their metadata and the episodes of their splits.

The time needed to open a dataset depends on the number of shards, not on the number of episodes. This module requires
only numpy, so that a container image for training can read datasets that were prepared elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from chatmill.errors import DataError, one_line
from chatmill.remote import objects
from chatmill.remote.urls import Place, Url, place
from chatmill.store import foreign, layout
from chatmill.store.end_token import end_token
from chatmill.store.episodes import Episodes
from chatmill.store.folder import OpenFolder, StoredFiles, in_folder
from chatmill.store.hashed import read_hashed
from chatmill.store.layout import INDEX, METADATA, TOKENIZER_STATE, Shard, shard_name
from chatmill.store.metadata import Metadata, is_chatmill_metadata, manifest, read_metadata
from chatmill.store.publish import set_aside
from chatmill.store.remote_files import RemoteFiles, remote_files, remote_metadata

T = TypeVar("T")
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files of a Hugging Face tokenizer that contain the name of its end token."""
VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "added_tokens.json")
"""Files of a Hugging Face tokenizer that map tokens to ids."""


def open_dataset(path: str | Place, *, token_dtype: str | None = None) -> Dataset:
    """Open a dataset; raise `DataError` if a file is missing or has the wrong size.

    >>> job = chatmill.Job((chatmill.InputSource(("data/conversations.jsonl",)),))
    >>> built = chatmill.prepare_dataset(job, "v1")
    >>> rows = chatmill.open_dataset("v1")["train"].rows([0, 7])
    >>> rows.lengths.tolist()
    [266, 85]

    Datasets that other programs wrote can also be opened, but have no spans or origins. If another program wrote the
    dataset and its token type cannot be inferred, set `token_dtype` to uint16 or uint32. If the dataset is replaced
    during this call, the result is the old or the new dataset, never a mixture.

    Files of a dataset at a URL are downloaded when they are read, and missing files are detected only then.
    """
    where = place(path)
    if isinstance(where, Url):
        return remote_dataset(where, token_dtype)
    return in_dataset_folder(where, lambda folder: dataset_in(folder, token_dtype))


def remote_dataset(url: Url, token_dtype: str | None = None) -> Dataset:
    """Open a dataset that chatmill wrote to a URL; raise `DataError` like `open_dataset`."""
    metadata = remote_metadata(url)
    _check_width(url, metadata, token_dtype)
    return _dataset(remote_files(url, metadata), metadata)


def in_dataset_folder(path: Path, work: Callable[[OpenFolder], T]) -> T:
    """Call `in_folder` for a dataset; raise `DataError` if a killed process left the dataset under a temporary name."""
    if not path.is_dir() and set_aside(path).is_dir():
        raise DataError(
            f"{path}: a process was killed while it replaced this dataset; to restore the old dataset, rename "
            f"{set_aside(path)} to {path}"
        )
    return in_folder(path, "a dataset", work)


def dataset_in(folder: OpenFolder, token_dtype: str | None = None) -> Dataset:
    """Open the dataset in a folder; raise `DataError` like `open_dataset`."""
    metadata = stored_metadata(folder)
    if metadata is None:
        splits = foreign.foreign_splits(folder, token_dtype)
        for name in (TOKENIZER_STATE, *TOKENIZER_FILES, *VOCABULARY_FILES):
            folder.status(folder.path / name)
        stored = StoredFiles(folder, splits["train"][0].folder / INDEX)
        return Dataset(stored, None, {name: Episodes(stored, shards, ()) for name, shards in splits.items()})
    _check_width(folder.path, metadata, token_dtype)
    for fault in manifest(folder.path, metadata).size_faults(folder):
        raise DataError(fault)
    return _dataset(StoredFiles(folder, folder.path / METADATA), metadata)


def _check_width(path: Place, metadata: Metadata, token_dtype: str | None) -> None:
    if foreign.token_width(token_dtype) not in (None, metadata.dtype.itemsize):
        raise DataError(f"{path}: token_dtype is {token_dtype}; expected {metadata.dtype.name}, as in the metadata")


def _dataset(stored: StoredFiles | RemoteFiles, metadata: Metadata) -> Dataset:
    return Dataset(stored, metadata, {name: _episodes(stored, metadata, name) for name in metadata.splits})


def is_dataset(path: str | Place) -> bool:
    """Return whether a path is a dataset: a folder with an index of training episodes, or a URL with metadata."""
    where = place(path)
    if isinstance(where, Url):
        return objects.find(where / METADATA) is not None
    train = where / "train"
    return (train / INDEX).is_file() or any(train.glob(f"shard_*/{INDEX}"))


def stored_metadata(folder: OpenFolder) -> Metadata | None:
    """Return the metadata, or None if another program wrote the dataset; raise `DataError` if the metadata cannot be
    read.
    """
    path, trace = folder.path / METADATA, foreign.trace_of_chatmill(folder)
    if folder.status(path) is not None:
        if trace is not None or is_chatmill_metadata(read_hashed(path, "dataset", folder.read)):
            return read_metadata(folder.path, folder.read)
    elif trace is not None:
        raise DataError(
            f"{path}: no such file, but {trace} exists; the build or the copy is incomplete; "
            "build the dataset or copy it again"
        )
    return None


def _episodes(stored: StoredFiles | RemoteFiles, metadata: Metadata, split: str, source: str | None = None) -> Episodes:
    info = metadata.splits[split]
    sizes = layout.record_dtypes(metadata.dtype)
    shards = [
        Shard(
            stored.path / split / shard_name(number),
            shard.num_episodes,
            shard.num_tokens,
            metadata.dtype,
            {name: file.size // sizes[name].itemsize for name, file in shard.files.items()},
        )
        for number, shard in enumerate(info.shards)
        if source is None or shard.source == source
    ]
    return Episodes(stored, shards, info.files)


@dataclass(frozen=True)
class Dataset:
    """An open dataset: `dataset["train"]` returns the episodes of a split.

    >>> built = chatmill.prepare_dataset(chatmill.Job((chatmill.InputSource(("data/primer.jsonl",)),)), "v1")
    >>> dataset = chatmill.open_dataset("v1")
    >>> dataset.splits, len(dataset["train"])
    (('train',), 120)
    """

    stored: StoredFiles | RemoteFiles
    metadata: Metadata | None
    """The metadata of the dataset, or None if another program wrote it."""
    _splits: Mapping[str, Episodes]
    whole: Dataset | None = field(default=None, kw_only=True)
    """The dataset with all sources if this object was returned by `of_source`, otherwise None."""

    @property
    def path(self) -> Place:
        return self.stored.path

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._splits)

    @property
    def token_dtype(self) -> str:
        """The type of the stored token ids: uint16 or uint32."""
        if self.metadata is not None:
            return self.metadata.dtype.name
        widths = [shard.dtype.itemsize for episodes in self._splits.values() for shard in episodes.shards]
        return "uint32" if max(widths, default=2) > 2 else "uint16"

    @property
    def sha256(self) -> str | None:
        """A hash of all bytes of the dataset, or None if another program wrote the dataset."""
        if self.whole is not None:
            return self.whole.sha256
        return None if self.metadata is None else self.metadata.sha256

    def __getitem__(self, split: str) -> Episodes:
        if split not in self._splits:
            raise DataError(f"{self.path}: has no split {split}; expected {', '.join(self._splits) or 'none'}")
        return self._splits[split]

    def __contains__(self, split: str) -> bool:
        return split in self._splits

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the dataset's sources in the order of the recipe; empty if the dataset has only one source."""
        infos = [] if self.metadata is None else self.metadata.splits.values()
        return tuple(dict.fromkeys(shard.source for info in infos for shard in info.shards if shard.source is not None))

    def of_source(self, name: str) -> Dataset:
        """Return a `Dataset` with the same path that contains only the shards of one source."""
        if self.metadata is None or name not in self.sources:
            raise DataError(f"{self.path}: has no source {one_line(name)}; {sources_text(self)}")
        splits = {
            split: replace(info, shards=tuple(shard for shard in info.shards if shard.source == name))
            for split, info in self.metadata.splits.items()
        }
        episodes = {split: _episodes(self.stored, self.metadata, split, name) for split in splits}
        return Dataset(self.stored, replace(self.metadata, splits=splits), episodes, whole=self)

    def foreign_end_token(self) -> int | None:
        """Return the id of the end token according to another program's tokenizer files, or None if it is not found."""
        states = [self._json(TOKENIZER_STATE)]
        if (id := end_token(states)) is not None:
            return id
        states += map(self._json, TOKENIZER_FILES)
        return end_token(states, [self._json(name) for name in VOCABULARY_FILES])

    def _json(self, name: str) -> Any:
        """Return the value of a JSON file in the dataset folder, or None if the file is missing or is not JSON."""
        if (path := self.path / name) not in self.stored:
            return None
        data = self.stored.read(path)
        with suppress(ValueError, RecursionError):
            return json.loads(data)
        return None

    def tokenizer_state(self) -> Any:
        """Return the content of `tokenizer_state.json`, with control tokens in the order of their ids."""
        path = self.path / TOKENIZER_STATE
        data = self.stored.read(path)
        try:
            state = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: cannot be read ({error}); the tokenizer of this dataset is unknown") from None
        if isinstance(state, dict):
            control, ids = state.get("control"), state.get("special_token_ids")
            both = isinstance(control, dict) and isinstance(ids, dict)
            if control and ids and both and all(type(ids.get(key)) is int for key in control):
                # The file is sorted by key, but added tokens have ids in the order in which the format lists them.
                state["control"] = {key: control[key] for key in sorted(control, key=ids.__getitem__)}
        return state


def sources_text(dataset: Dataset) -> str:
    names = ", ".join(map(one_line, dataset.sources))
    none = "only datasets made from a recipe with several sources have named sources"
    return f"the dataset has {names}" if names else none
