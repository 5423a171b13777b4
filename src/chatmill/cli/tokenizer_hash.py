"""Compute the tokenizer hash that caches store, for the training commands."""

from __future__ import annotations

import warnings


def tokenizer_sha256(path: str) -> str | None:
    """Return the hash that caches store for this tokenizer, or None if its packages are not installed."""
    try:
        from chatmill.format import load_format
        from chatmill.tokenizer import open_tokenizer
    except ModuleNotFoundError:
        return None
    with warnings.catch_warnings():
        # Ignore warnings: they were shown when the cache was built.
        warnings.simplefilter("ignore")
        # A cache needs all control tokens, so building the cache added any missing tokens.
        return open_tokenizer(path, control=load_format("primer").tokens, add_tokens=True).sha256
