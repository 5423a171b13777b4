"""Load the batches of a dataset in a reproducible order.

    EpisodeLoader, LoadConfig         loads the batches of one rank; its settings
    Batch, BatchCounts, collate       the arrays of a batch; collating rows that are in memory
    LoadPlan, PlannedStep, Cursor     which episodes are in which batch
    Order, make_order                 which episode is at which position
    MixSchedule, shares, row_weights  which source each position is drawn from
    DataSource, open_sources          the datasets that a run reads

`order` and `mix` determine the sequence of episodes, and `plan` arranges them into rows and steps. `read` locates the
tokens and spans of the episodes, `batch` fills the arrays, and `loader` returns the batch. Names are imported lazily,
because the loader imports torch if it is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

from chatmill._exports import lazy_exports as _lazy_exports

if _TYPE_CHECKING:
    from chatmill.load.batch import IGNORE_INDEX as IGNORE_INDEX
    from chatmill.load.batch import Batch as Batch
    from chatmill.load.batch import BatchCounts as BatchCounts
    from chatmill.load.batch import collate as collate
    from chatmill.load.config import LoadConfig as LoadConfig
    from chatmill.load.loader import EpisodeLoader as EpisodeLoader
    from chatmill.load.mix import MIX_SFT as MIX_SFT
    from chatmill.load.mix import MixSchedule as MixSchedule
    from chatmill.load.mix import row_weights as row_weights
    from chatmill.load.mix import shares as shares
    from chatmill.load.order import Order as Order
    from chatmill.load.order import make_order as make_order
    from chatmill.load.plan import Cursor as Cursor
    from chatmill.load.plan import LoadPlan as LoadPlan
    from chatmill.load.plan import PlannedStep as PlannedStep
    from chatmill.load.source import DataSource as DataSource
    from chatmill.load.source import open_sources as open_sources

__all__, __getattr__, __dir__ = _lazy_exports(__name__)
