"""Conversations in, exact training batches out.

The documented functions are importable from here. They are loaded when they are first asked for, so
that training code can import `chatmill.train` in an image that has little more than torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chatmill.sft import (
        DEFAULT_SYSTEM_TEXT,
        IGNORE_INDEX,
        ChatExample,
        ChatMsg,
        collate_sft_batch,
        pack_chat_blocks,
        pack_sft_ids_and_mask,
        render_chat_sft,
        serialize_chat_to_ids,
        sft_loss_mask_for_ids,
    )

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_SYSTEM_TEXT",
    "IGNORE_INDEX",
    "ChatExample",
    "ChatMsg",
    "collate_sft_batch",
    "pack_chat_blocks",
    "pack_sft_ids_and_mask",
    "render_chat_sft",
    "serialize_chat_to_ids",
    "sft_loss_mask_for_ids",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("chatmill.sft"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
