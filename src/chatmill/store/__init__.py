"""Datasets and primer caches on disk: published atomically, read through memory maps, verified byte by byte.

    datasets   open_dataset, is_dataset -> Dataset of Episodes per split, with its Metadata
    writing    SplitWriter, write_metadata, into the folder staging_for(target), until `publish`
    checking   verify_dataset; diff_datasets compares two
    deriving   reweigh_dataset (another mask from the same tokens), export_parquet
    caches     write_cache, open_cache, is_cache, verify_cache -> PrimerCache

Reading a dataset requires only numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

from chatmill._exports import lazy_exports as _lazy_exports

if _TYPE_CHECKING:
    from chatmill.store.diff import Diff as Diff
    from chatmill.store.diff import diff_datasets as diff_datasets
    from chatmill.store.episodes import Episodes as Episodes
    from chatmill.store.metadata import Metadata as Metadata
    from chatmill.store.metadata import write_metadata as write_metadata
    from chatmill.store.parquet import export_parquet as export_parquet
    from chatmill.store.primer_cache import CacheMeta as CacheMeta
    from chatmill.store.primer_cache import PrimerCache as PrimerCache
    from chatmill.store.primer_cache import is_cache as is_cache
    from chatmill.store.primer_cache import open_cache as open_cache
    from chatmill.store.primer_cache import verify_cache as verify_cache
    from chatmill.store.primer_cache import write_cache as write_cache
    from chatmill.store.publish import staging_for as staging_for
    from chatmill.store.read import Dataset as Dataset
    from chatmill.store.read import is_dataset as is_dataset
    from chatmill.store.read import open_dataset as open_dataset
    from chatmill.store.reweigh import reweigh_dataset as reweigh_dataset
    from chatmill.store.verify import Verified as Verified
    from chatmill.store.verify import verify_dataset as verify_dataset
    from chatmill.store.write import SplitWriter as SplitWriter

__all__, __getattr__, __dir__ = _lazy_exports(__name__)
