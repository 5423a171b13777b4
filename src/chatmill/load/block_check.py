"""Check that a dataset was built with `--fit blocks`, as post-training requires.

In post-training, the model is trained on an answer only if a complete user turn precedes it in the same row. The loader
would truncate rows of more than block_size + 1 tokens, and rows that are not blocks may start in the middle of a turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatmill.store.primer_cache import PrimerCache
from chatmill.store.read import Dataset


def block_fault(dataset: Dataset, block_size: int) -> str | None:
    """Return an error that contains the command to build a suitable dataset, or None if the dataset is suitable."""
    if (what := _other_rows(dataset, block_size)) is None:
        return None
    size = block_size + 1
    return (
        f"{dataset.path}: {what}, but post_training requires blocks of block_size + 1 = {size:,} tokens; "
        f"build them with chatmill prepare … --format post-training --fit blocks --max-tokens {size}"
    )


def _other_rows(dataset: Dataset, block_size: int) -> str | None:
    """Return why post-training cannot read a dataset, or None if it can."""
    if isinstance(dataset, PrimerCache):
        return "is a cache with one conversation per row"
    if dataset.metadata is None:
        return "does not record how its rows were made (it has no dataset_metadata.json)"
    config = dataset.metadata.config
    if (fit := config.get("fit")) != "blocks":
        packed = f" --pack {config['pack']}" if config.get("pack") else ""
        return f"was made with --fit {fit}{packed}" if isinstance(fit, str) else "is not made of blocks"
    if (size := config.get("max_tokens")) != block_size + 1:
        if not isinstance(size, int):
            return "does not record max_tokens"
        return f"is made of blocks of {size} tokens (block_size {size - 1})"
    return "its loss mask includes more than answers (--train-on all)" if "all" in _trained_on(config) else None


def _trained_on(config: Mapping[str, Any]) -> set[Any]:
    """Return all values of `train_on` in a dataset's config. For a reweighed dataset, ignore the values of its
    sources.
    """
    chosen = {config.get("train_on")}
    if "reweighed_from" not in config:
        sources = config.get("sources")
        chosen |= {each.get("train_on") for each in sources if isinstance(each, dict)} if sources else set()
    return chosen
