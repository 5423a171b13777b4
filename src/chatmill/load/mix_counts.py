"""What each source of a mixture really gave to a batch, to be held against what was requested."""

from __future__ import annotations

import numpy as np

from chatmill.load.batch import Batch
from chatmill.load.plan import LoadPlan, Window
from chatmill.rows import Index, offsets


def tally(plan: LoadPlan, rows: Window, batch: Batch) -> Index | None:
    """Rows, tokens or trained tokens that each source has in a batch of these rows; None where nothing is mixed."""
    if plan.config.mix_sft is None:
        return None
    count = len(plan.sources)
    first = offsets(np.array([len(source.episodes(plan.split)) for source in plan.sources], dtype=np.int64))
    source = np.searchsorted(first, rows.episodes, side="right") - 1
    if plan.config.mix_by == "rows":
        return np.bincount(source, minlength=count)
    if plan.config.mix_by == "tokens":
        kept = np.minimum(plan.reader.locate(rows.episodes).length, plan.capacity)
        return np.bincount(source, weights=kept, minlength=count).astype(np.int64)
    # Segments of a batch to sources, with a column more than there are: the padding of a full row is of none.
    of_segment = np.full((len(batch.x), batch.episode_ids.shape[1] + 1), count, dtype=np.int64)
    of_segment[:, :-1] = np.where(
        batch.episode_ids < 0, count, np.searchsorted(first, batch.episode_ids, side="right") - 1
    )
    of_token = np.take_along_axis(of_segment, batch.segments.astype(np.int64), axis=1)
    return np.bincount(of_token[batch.loss_mask], minlength=count + 1)[:count]
