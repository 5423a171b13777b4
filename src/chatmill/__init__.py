"""Conversations in, exact training batches out.

The main API, from a list of messages to a trained model:

    records       Record, Message, ToolCall, read_records
    formats       ChatFormat, load_format, Renderer, open_renderer, open_tokenizer
    rows          Rows
    datasets      Job, InputSource, prepare_dataset, Dataset, open_dataset
    batches       EpisodeLoader, LoadConfig, Batch, collate
    training      TrainConfig, train_model
    rollouts      build_target
    functions     serialize_chat_to_ids, sft_loss_mask_for_ids, pack_sft_ids_and_mask, collate_sft_batch,
                  render_chat_sft, pack_chat_blocks, and their types and constants

Packages such as `chatmill.fit`, `chatmill.load`, `chatmill.store` and `chatmill.rollout` export more functions and
classes. Names are imported on first use, so `import chatmill` is fast and needs neither torch nor a tokenizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

from chatmill._exports import lazy_exports as _lazy_exports

if _TYPE_CHECKING:
    from chatmill.errors import ChatmillError as ChatmillError
    from chatmill.format import (
        ChatFormat as ChatFormat,
    )
    from chatmill.format import (
        Renderer as Renderer,
    )
    from chatmill.format import (
        load_format as load_format,
    )
    from chatmill.format import (
        open_renderer as open_renderer,
    )
    from chatmill.load import (
        Batch as Batch,
    )
    from chatmill.load import (
        EpisodeLoader as EpisodeLoader,
    )
    from chatmill.load import (
        LoadConfig as LoadConfig,
    )
    from chatmill.load import (
        collate as collate,
    )
    from chatmill.prepare import InputSource as InputSource
    from chatmill.prepare import Job as Job
    from chatmill.prepare import prepare_dataset as prepare_dataset
    from chatmill.records import (
        Message as Message,
    )
    from chatmill.records import (
        Record as Record,
    )
    from chatmill.records import (
        ToolCall as ToolCall,
    )
    from chatmill.records import (
        read_records as read_records,
    )
    from chatmill.rollout import build_target as build_target
    from chatmill.rows import Rows as Rows
    from chatmill.sft import (
        DEFAULT_SYSTEM_TEXT as DEFAULT_SYSTEM_TEXT,
    )
    from chatmill.sft import (
        IGNORE_INDEX as IGNORE_INDEX,
    )
    from chatmill.sft import (
        ChatExample as ChatExample,
    )
    from chatmill.sft import (
        ChatMsg as ChatMsg,
    )
    from chatmill.sft import (
        collate_sft_batch as collate_sft_batch,
    )
    from chatmill.sft import (
        pack_chat_blocks as pack_chat_blocks,
    )
    from chatmill.sft import (
        pack_sft_ids_and_mask as pack_sft_ids_and_mask,
    )
    from chatmill.sft import (
        render_chat_sft as render_chat_sft,
    )
    from chatmill.sft import (
        serialize_chat_to_ids as serialize_chat_to_ids,
    )
    from chatmill.sft import (
        sft_loss_mask_for_ids as sft_loss_mask_for_ids,
    )
    from chatmill.store import Dataset as Dataset
    from chatmill.store import open_dataset as open_dataset
    from chatmill.tokenizer import open_tokenizer as open_tokenizer
    from chatmill.train import TrainConfig as TrainConfig
    from chatmill.train import train_model as train_model

__version__ = "0.1.0"

__all__, __getattr__, __dir__ = _lazy_exports(__name__)
