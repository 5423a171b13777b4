"""Fit rows into a model's context: truncate, pack, split into blocks, and filter by length.

    truncate, truncate_with_sources  cut rows to a maximum number of tokens, by one of `RULES`
    pack, pack_lengths               combine several rows into one by best-fit decreasing
    cut_blocks, stream_blocks        cut a stream of conversations into blocks of one exact size
    turns_that_fit                   the first turns of a conversation that fit in a context
    gather, GatherPlan               make new rows from pieces of existing rows

`truncate` and the block functions record in a ledger how many tokens they remove, repeat or add.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

from chatmill._exports import lazy_exports as _lazy_exports

if _TYPE_CHECKING:
    from chatmill.fit.blocks import cut_blocks as cut_blocks
    from chatmill.fit.blocks import pack_chat_blocks as pack_chat_blocks
    from chatmill.fit.blocks import stream_blocks as stream_blocks
    from chatmill.fit.gather_plan import GatherPlan as GatherPlan
    from chatmill.fit.gather_plan import gather as gather
    from chatmill.fit.length_filter import turns_that_fit as turns_that_fit
    from chatmill.fit.packing import Bins as Bins
    from chatmill.fit.packing import pack as pack
    from chatmill.fit.packing import pack_lengths as pack_lengths
    from chatmill.fit.truncation import RULES as RULES
    from chatmill.fit.truncation import FitRule as FitRule
    from chatmill.fit.truncation import truncate as truncate
    from chatmill.fit.truncation import truncate_with_sources as truncate_with_sources

__all__, __getattr__, __dir__ = _lazy_exports(__name__)
