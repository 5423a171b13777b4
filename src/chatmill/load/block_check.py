"""Check that a dataset consists of stream blocks, as post-training requires.

In post-training an answer is trained only after a complete user turn in the same row. Rows of a different size are
refused because the loader would truncate them, and rows that are not blocks are refused because they may start
anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatmill.store.primer_cache import PrimerCache
from chatmill.store.read import Dataset


def block_fault(dataset: Dataset, block_size: int) -> str | None:
    """Return an error with the command that builds a suitable dataset, or None if post-training accepts the dataset."""
    if (what := _other_rows(dataset, block_size)) is None:
        return None
    size = block_size + 1
    return (
        f"{dataset.path}: {what}, but post_training reads stream blocks of block_size + 1 = {size:,} tokens; "
        f"build them with chatmill prepare … --format post-training --fit blocks --max-tokens {size}"
    )


def _other_rows(dataset: Dataset, block_size: int) -> str | None:
    """Return why a dataset does not consist of blocks of this size that train only answers, or None if it does."""
    if isinstance(dataset, PrimerCache):
        return "is a cache with one conversation per row"
    if dataset.metadata is None:
        return "does not record how its rows were made (it has no dataset_metadata.json)"
    config = dataset.metadata.config
    if (fit := config.get("fit")) != "blocks":
        packed = f" --pack {config['pack']}" if config.get("pack") else ""
        return f"was made with --fit {fit}{packed}" if isinstance(fit, str) else "is not made of blocks"
    if (size := config.get("max_tokens")) != block_size + 1:
        return f"is made of blocks of {size} tokens (block_size {size - 1})" if isinstance(size, int) else "has no size"
    return "trains more than answers (--train-on all)" if "all" in _trained_on(config) else None


def _trained_on(config: Mapping[str, Any]) -> set[Any]:
    """Return all values of `train_on` in a dataset's config; after reweighing, values of sources are ignored."""
    chosen = {config.get("train_on")}
    if "reweighed_from" not in config:
        sources = config.get("sources")
        chosen |= {each.get("train_on") for each in sources if isinstance(each, dict)} if sources else set()
    return chosen
