"""Datasets and primer caches on disk: written whole or not at all, read memory-mapped, verified to the last byte.

    datasets   open_dataset, is_dataset -> Dataset of Episodes per split, with its Metadata
    writing    SplitWriter, write_metadata, then publish from staging_for(target): one rename
    checking   verify_dataset; diff_datasets compares two
    deriving   reweigh_dataset (another mask from the same tokens), export_parquet
    caches     write_cache, open_cache, is_cache, verify_cache -> PrimerCache

Reading needs only numpy. Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from chatmill.store.diff import Diff as Diff
    from chatmill.store.diff import diff_datasets as diff_datasets
    from chatmill.store.metadata import Metadata as Metadata
    from chatmill.store.metadata import write_metadata as write_metadata
    from chatmill.store.parquet import export_parquet as export_parquet
    from chatmill.store.primer_cache import PrimerCache as PrimerCache
    from chatmill.store.primer_cache import is_cache as is_cache
    from chatmill.store.primer_cache import open_cache as open_cache
    from chatmill.store.primer_cache import verify_cache as verify_cache
    from chatmill.store.primer_cache import write_cache as write_cache
    from chatmill.store.publish import staging_for as staging_for
    from chatmill.store.read import Dataset as Dataset
    from chatmill.store.read import Episodes as Episodes
    from chatmill.store.read import is_dataset as is_dataset
    from chatmill.store.read import open_dataset as open_dataset
    from chatmill.store.reweigh import reweigh_dataset as reweigh_dataset
    from chatmill.store.verify import Verified as Verified
    from chatmill.store.verify import verify_dataset as verify_dataset
    from chatmill.store.write import SplitWriter as SplitWriter

_MODULES = {
    "diff": "Diff diff_datasets",
    "metadata": "Metadata write_metadata",
    "parquet": "export_parquet",
    "primer_cache": "PrimerCache is_cache open_cache verify_cache write_cache",
    "publish": "staging_for",
    "read": "Dataset Episodes is_dataset open_dataset",
    "reweigh": "reweigh_dataset",
    "verify": "Verified verify_dataset",
    "write": "SplitWriter",
}
_HOME = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
