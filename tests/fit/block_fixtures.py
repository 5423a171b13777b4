"""Functions for tests of blocks that are cut from a stream of conversations; each token is a letter.

S, U and A open a system, user and assistant turn, E is END, X is EOS, and lowercase letters are text. In a mask, `*`
marks a trained token. Documents are written without their last X, which packing adds.
"""

from __future__ import annotations

from chatmill.fit import pack_chat_blocks
from chatmill.fit.turns import rows_from_ids
from chatmill.format import load_format
from chatmill.rows import Role, Rows
from chatmill.tokenizer import open_tokenizer

MARKERS = {
    "system_id": ord("S"),
    "user_id": ord("U"),
    "assistant_id": ord("A"),
    "end_id": ord("E"),
    "eos_id": ord("X"),
}
POST_TRAINING = load_format("post-training")
BYTES = open_tokenizer("bytes", control=POST_TRAINING.tokens)


def packed(*documents: str, size: int, remainder: str = "pad") -> list[str]:
    ids, masks = pack_chat_blocks(
        [[ord(token) for token in document] for document in documents],
        block_size=size,
        remainder=remainder,
        **MARKERS,
    )
    return [
        "".join(map(chr, block)) + " " + "".join(".*"[trained] for trained in mask)
        for block, mask in zip(ids, masks, strict=True)
    ]


def parsed(*documents: str) -> Rows:
    rows = rows_from_ids(
        [[ord(token) for token in document] for document in documents],
        openers={Role.SYSTEM: ord("S"), Role.USER: ord("U"), Role.ASSISTANT: ord("A")},
        close=ord("E"),
        eos=ord("X"),
    )
    rows.check()
    return rows
