"""The hash of a tokenizer as caches keep it, for the training commands."""

from __future__ import annotations

import warnings


def tokenizer_sha256(path: str) -> str | None:
    """The hash that a cache built with this tokenizer has; None where the packages to open it are not installed."""
    try:
        from chatmill.format import load_format
        from chatmill.tokenizer import open_tokenizer
    except ModuleNotFoundError:
        return None
    with warnings.catch_warnings():
        # Warnings were shown when the cache was built.
        warnings.simplefilter("ignore")
        # A cache has the control tokens, so those that the tokenizer lacks were added.
        return open_tokenizer(path, control=load_format("primer").tokens, add_tokens=True).sha256
