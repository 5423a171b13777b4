"""Simple functions for SFT data: convert chats to token ids, loss masks, fixed-length rows and tensors.

    ids   = serialize_chat_to_ids(example, tokenizer=tok, default_system_text=DEFAULT_SYSTEM_TEXT)
    mask  = sft_loss_mask_for_ids(ids, **special)
    pair  = pack_sft_ids_and_mask(ids, mask, S=T + 1, pad_id=eot, **special)
    x, y, loss_mask = collate_sft_batch([pair, …], T=T, device="cpu")

The tokenizer can be a chatmill tokenizer, or a `tokenizers.Tokenizer` or transformers tokenizer whose vocabulary
contains the control tokens. Any other object works if it has the methods `encode(text)` and `special_token_ids()`; the
latter returns a mapping with the keys sys, usr, asst and eot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np

from chatmill.errors import DataError, one_line
from chatmill.fit import pack_chat_blocks as pack_chat_blocks
from chatmill.fit import truncate
from chatmill.fit.turns import assistant_mask, rows_from_ids, with_mask
from chatmill.format import ChatFormat, TurnRenderer, load_format
from chatmill.ledger import Ledger
from chatmill.load import IGNORE_INDEX as IGNORE_INDEX
from chatmill.load import collate
from chatmill.records import Message, Record
from chatmill.rows import Ids, Index, Role, Rows, offsets, rows_from_mask
from chatmill.tokenizer import TextTokenizer
from chatmill.tokenizer.adapt import text_tokenizer

if TYPE_CHECKING:
    import torch

DEFAULT_SYSTEM_TEXT = "you are a helpful assistant."

KEYS = ("sys", "usr", "asst", "eot")

# Load each format once, because the functions in this module are called for every conversation.
_preset = cache(load_format)


class ChatMsg(TypedDict):
    """One message of a `ChatExample`.

    >>> ChatMsg(role="user", content="hi")
    {'role': 'user', 'content': 'hi'}
    """

    role: Literal["system", "user", "assistant"]
    content: str


class ChatExample(TypedDict):
    """A conversation for `serialize_chat_to_ids`.

    >>> ChatExample(messages=[ChatMsg(role="user", content="hi")])
    {'messages': [{'role': 'user', 'content': 'hi'}]}
    """

    messages: list[ChatMsg]


def serialize_chat_to_ids(ex: ChatExample, *, tokenizer: TextTokenizer | Any, default_system_text: str) -> list[int]:
    """Encode a chat as token ids. A chat without a system message starts with the default system text.

    A `tokenizers` or transformers tokenizer must contain the control tokens of the format `ngpt` or `primer`; if it
    contains both, those of `ngpt` are used.

    >>> tokenizer = open_tokenizer("bytes", control=load_format("ngpt").tokens)
    >>> chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    >>> serialize_chat_to_ids(chat, tokenizer=tokenizer, default_system_text="s")
    [256, 115, 259, 257, 113, 259, 258, 97, 259]
    """
    messages = _messages(ex.get("messages") if isinstance(ex, Mapping) else None)
    for number, message in enumerate(messages):
        if number and message.role == "system":
            raise DataError(f"message {number} has role system; only the first message may be a system message")
    format = replace(_preset("ngpt"), default_system=default_system_text)
    ids: list[int] = _rendered(messages, format, tokenizer).ids.tolist()
    return ids


def sft_loss_mask_for_ids(ids: list[int], *, sys_id: int, usr_id: int, asst_id: int, eot_id: int) -> list[bool]:
    """Return the loss mask: True on assistant content and its end-of-turn token, False elsewhere.

    >>> sft_loss_mask_for_ids([257, 113, 259, 258, 97, 259], sys_id=256, usr_id=257, asst_id=258, eot_id=259)
    [False, False, False, False, True, True]
    """
    mask: list[bool] = assistant_mask(ids, assistant=asst_id, close=eot_id).tolist()
    return mask


def pack_sft_ids_and_mask(
    ids: list[int], mask: list[bool], *, S: int, sys_id: int, usr_id: int, asst_id: int, eot_id: int, pad_id: int
) -> tuple[list[int], list[bool]]:
    """Truncate or pad ids and mask to exactly S tokens. If a chat has more than S tokens, its oldest exchanges are
    removed. If it is still too long, tokens are removed from the left. A chat with fewer than S tokens is padded on the
    right.

    The mask is truncated but not recomputed, so the remaining tokens of a truncated answer are still trained on.

    >>> ids, mask = [257, 113, 259, 258, 97, 259], [False, False, False, False, True, True]
    >>> special = {"sys_id": 256, "usr_id": 257, "asst_id": 258, "eot_id": 259}
    >>> pack_sft_ids_and_mask(ids, mask, S=8, pad_id=0, **special)[0]
    [257, 113, 259, 258, 97, 259, 0, 0]
    """
    if len(ids) != len(mask):
        raise DataError(f"ids has {len(ids)} entries, but mask has {len(mask)}; expected equal lengths")
    if S < 1:
        raise DataError(f"S is {S}; expected at least 1")
    openers = {Role.SYSTEM: sys_id, Role.USER: usr_id, Role.ASSISTANT: asst_id}
    row = with_mask(rows_from_ids([ids], openers=openers, close=eot_id), mask)
    if len(ids) > S:
        row = truncate(row, S, "turns", ledger=Ledger(), drop_untrained=False, min_tokens=0)
    padding = S - len(row.ids)
    return row.ids.tolist() + [pad_id] * padding, row.mask().tolist() + [False] * padding


def collate_sft_batch(
    packed: list[tuple[list[int], list[bool]]], *, T: int, device: str, ignore_index: int = IGNORE_INDEX
) -> tuple[torch.LongTensor, torch.LongTensor, torch.BoolTensor]:
    """Return x, y and the loss mask, each of shape (B, T); y is `ignore_index` where no loss is computed.

    >>> x, y, loss_mask = collate_sft_batch([([258, 97, 259], [False, True, True])], T=2, device="cpu")
    >>> x.tolist(), y.tolist()
    ([[258, 97]], [[97, 259]])
    """
    import torch

    for number, (ids, mask) in enumerate(packed):
        if len(ids) != T + 1 or len(mask) != T + 1:
            raise DataError(
                f"item {number} has {len(ids)} ids and {len(mask)} mask values; T={T} requires {T + 1} of each"
            )
    tokens = np.array([ids for ids, _ in packed], dtype=np.uint32).ravel()
    trained = np.array([mask for _, mask in packed], dtype=bool).ravel()
    rows = rows_from_mask(tokens, trained, np.full(len(packed), T + 1))
    batch = collate(rows, pad_token_id=0, length=T + 1)
    y = np.where(batch.loss_mask, batch.y, ignore_index)
    x, y, loss_mask = (torch.from_numpy(array).to(device) for array in (batch.x, y, batch.loss_mask))
    return x, y, loss_mask


def render_chat_sft(
    tokenizer: TextTokenizer | Any, messages: list[dict[str, Any]], *, add_final_eot: bool = True
) -> tuple[list[int], list[int]]:
    """Return the token ids and labels of a chat. Labels are -100 except on assistant content and its end-of-turn
    tokens.

    A `tokenizers` or transformers tokenizer must contain the control tokens of the format `primer` or `ngpt`; if it
    contains both, those of `primer` are used.

    >>> tokenizer = open_tokenizer("bytes", control=load_format("primer").tokens)
    >>> render_chat_sft(tokenizer, [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    ([261, 113, 263, 262, 97, 263], [-100, -100, -100, -100, 97, 263])
    """
    parsed = _messages(messages)
    if all(message.role != "assistant" for message in parsed):
        raise DataError("no message has role assistant; expected at least one to train on")
    row = _rendered(parsed, _preset("primer"), tokenizer)
    labels = np.where(row.mask(), row.targets(), IGNORE_INDEX)
    # Every turn of this format ends with a single end-of-turn token, so it is enough to drop the last token.
    end = None if add_final_eot else -1
    return row.ids[:end].tolist(), labels[:end].tolist()


def _messages(messages: object) -> list[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise DataError('"messages" must be a list of at least one {"role": …, "content": …}')
    out = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise DataError(f'message {number} must be an object with exactly the keys "role" and "content"')
        role, content = message["role"], message["content"]
        if role not in ("system", "user", "assistant"):
            raise DataError(f'message {number} has role "{one_line(str(role))}"; expected system, user or assistant')
        if not isinstance(content, str):
            raise DataError(f"message {number} has content of type {type(content).__name__}; expected a string")
        out.append(Message(role=role, content=content))
    return out


def _rendered(messages: list[Message], format: ChatFormat, tokenizer: TextTokenizer | Any) -> Rows:
    families = [format.tokens, *(_preset(name).tokens for name in ("ngpt", "primer"))]
    # Rendering calls only the methods that this adapter defines.
    adapter: Any = _TextTokenizerAdapter(text_tokenizer(tokenizer, *families))
    return TurnRenderer(format, adapter).render([Record(messages)])


class _TextTokenizerAdapter:
    """An adapter that lets `TurnRenderer` use a tokenizer that has only `encode` and `special_token_ids`."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer

    def special_token_ids(self) -> Mapping[str, int]:
        ids = self.tokenizer.special_token_ids()
        if missing := [key for key in KEYS if key not in ids]:
            raise DataError(
                f"the tokenizer has no special token id for {', '.join(missing)}; expected sys, usr, asst and eot"
            )
        return ids

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Index]:
        encoded = [self.tokenizer.encode(text) for text in texts]
        flat = np.array([i for ids in encoded for i in ids], dtype=np.uint32)
        return flat, offsets(np.array([len(ids) for ids in encoded], dtype=np.int64))

    def byte_lengths(self, ids: Ids) -> Index:
        raise DataError("this tokenizer cannot encode the parts of a message separately; use open_tokenizer")
