"""The format `text` (`--format text`), for records without turns: one text, or a prompt and its completion.

    <s> Once upon a time … </s>

The special tokens that the tokenizer adds by default are placed before and after the text. If the tokenizer adds no end
token, the text ends with the EOS token of the tokenizer folder.

A prompt and its completion are encoded separately, so that the prompt has the same tokens as at inference. If the
tokenizer adds a space before every text, the prompt and its completion are encoded as one text, and a token that spans
the boundary is not trained on.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from chatmill.errors import RecordError
from chatmill.format.chat_format import ChatFormat, TurnMarkers
from chatmill.format.template.hf_folder import special_tokens
from chatmill.records import Record
from chatmill.remote.named_files import TOKENIZER_LIMIT, local_file
from chatmill.rows import TrainOn
from chatmill.tokenizer import Tokenizer

TEXT = "text"
END_TOKEN = "<|endoftext|>"
"""The end token for tokenizers that do not define one."""
BYTES_END = "<|EOS|>"
"""The end token of the built-in byte tokenizer."""


def text_format(tokenizer: str) -> ChatFormat:
    if tokenizer == "bytes":
        return _format([], [BYTES_END])
    path = local_file(tokenizer, limit=TOKENIZER_LIMIT)
    file = path / "tokenizer.json" if path.is_dir() else path
    begin, end = _around(file) if file.suffix == ".json" and file.is_file() else ([], [])
    if not end:
        end = [special_tokens(path).get("eos_token", END_TOKEN) if path.is_dir() else END_TOKEN]
    return _format(begin, end)


def _format(begin: list[str], end: list[str]) -> ChatFormat:
    keys = {token: f"bos{number or ''}" for number, token in enumerate(begin)}
    keys |= {token: f"eos{number or ''}" for number, token in enumerate(end)}
    return ChatFormat(
        name=TEXT,
        tokens={key: token for token, key in keys.items()},
        turns={"user": TurnMarkers("", ""), "assistant": TurnMarkers("", "".join(end))},
        begin="".join(begin),
    )


def _around(file: Path) -> tuple[list[str], list[str]]:
    """Return the special tokens that a tokenizer.json adds before and after a text."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
        plain, whole = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a")
    except Exception:
        # Ignore the error here, because opening the tokenizer later raises a more precise error.
        return [], []
    start = next((at for at in range(len(whole.ids)) if whole.ids[at : at + len(plain)] == plain), 0)
    return whole.tokens[:start], whole.tokens[start + len(plain) :]


def adds_space(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer adds a space before every text, like the Llama 2 and Mistral tokenizers."""
    ids = tokenizer.encode("a")
    return bool(ids) and tokenizer.piece(ids[0]).startswith(b" ")


def joined(record: Record, train_on: TrainOn) -> Record:
    """Return the record with the prompt and its completion joined into one text.

    The weights of the prompt and the completion are kept as `train_ranges`.
    """
    if len(record.messages) == 1:
        return record
    prompt, completion = record.messages
    size = len(prompt.content)
    by_role = 1.0 if train_on == "all" else 0.0
    ranges = [(0, size, by_role if prompt.weight is None else prompt.weight)] if size else []
    ranges += [(size + start, size + stop, weight) for start, stop, weight in completion.train_ranges]
    text = msgspec.structs.replace(completion, content=prompt.content + completion.content, train_ranges=tuple(ranges))
    return msgspec.structs.replace(record, messages=[text])


def text_fault(record: Record, format: ChatFormat) -> RecordError | None:
    """Return an error if a text record is used with a chat format, or a conversation with the format `text`."""
    if format.has_turns:
        if not record.is_text:
            return None
        what = "the record is a single text without turns"
        return RecordError(what, "use --format text", kind="text_record")
    roles = [message.role for message in record.messages]
    plain = not record.tools and not any(message.reasoning or message.tool_calls for message in record.messages)
    if plain and roles in (["user", "assistant"], ["assistant"]):
        return None
    what = "the record is a conversation, which --format text cannot render"
    return RecordError(what, "expected a single text, or a prompt and its completion", kind="text_record")
