"""Convert batches to the Hugging Face convention: labels are aligned with input_ids, and the model shifts them.

    x          a b c d      input_ids     a b c d e
    y          b c d e      labels        - b c d e      - is -100
    positions  0 1 0 1      position_ids  0 1 0 1 2

A row of `input_ids` has one more token than a row of `x`: the target at the last position. If the target at the last
position is not trained, the last token is padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from chatmill.load.batch import IGNORE_INDEX, Batch


def causal_lm_columns(batch: Batch, *, pad_token_id: int) -> dict[str, Tensor]:
    """Return the columns `input_ids`, `labels`, `position_ids` and `weights`, each of shape (rows, block_size + 1).

    `weights` are aligned with `input_ids`; a weight of 0 excludes the token from the loss. `position_ids` restart at 0
    in each segment, so that models can separate the segments of a packed row.

    >>> import numpy as np
    >>> from chatmill.integrations.columns import causal_lm_columns
    >>> from chatmill.rows import rows_from_mask
    >>> rows = rows_from_mask(np.array([5, 6, 7, 8], dtype=np.uint32), np.array([0, 0, 1, 1]), [4])
    >>> columns = causal_lm_columns(chatmill.collate(rows, pad_token_id=0), pad_token_id=0)
    >>> columns["input_ids"].tolist(), columns["labels"].tolist()
    ([[5, 6, 7, 8]], [[-100, -100, 7, 8]])
    """
    x, y, weights, positions = (_tensor(part) for part in (batch.x, batch.y, batch.weights, batch.positions))
    last_is_trained = y[:, -1:] != IGNORE_INDEX
    last_token = torch.where(last_is_trained, y[:, -1:], pad_token_id)
    last_position = torch.where(last_is_trained, positions[:, -1:] + 1, 0)
    return {
        "input_ids": torch.cat([x, last_token], 1),
        "labels": torch.cat([torch.full_like(y[:, :1], IGNORE_INDEX), y], 1),
        "position_ids": torch.cat([positions, last_position], 1).long(),
        "weights": torch.cat([torch.zeros_like(weights[:, :1]), weights], 1),
    }


def sequence_lengths(position_ids: Tensor) -> tuple[Tensor, int]:
    """Return `cu_seq_lens` of the concatenated rows, and the length of the longest sequence.

    A sequence starts wherever `position_ids` is 0.

    >>> import torch
    >>> from chatmill.integrations.columns import sequence_lengths
    >>> sequence_lengths(torch.tensor([[0, 1, 0], [0, 1, 2]]))
    (tensor([0, 2, 3, 6], dtype=torch.int32), 3)
    """
    flat = position_ids.reshape(-1)
    starts = torch.nonzero(flat == 0).reshape(-1)
    edges = torch.cat([starts, starts.new_tensor([len(flat)])])
    return edges.int(), int(edges.diff().max())


def flattened(columns: Mapping[str, Tensor]) -> dict[str, Any]:
    """Concatenate all rows into one, and add the sequence boundaries that FlashAttention needs.

    The boundaries are `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`.

    >>> import torch
    >>> from chatmill.integrations.columns import flattened
    >>> flat = flattened({"position_ids": torch.tensor([[0, 1, 0], [0, 1, 2]])})
    >>> flat["position_ids"].tolist(), flat["cu_seq_lens_q"].tolist(), flat["max_length_q"]
    ([[0, 1, 0, 0, 1, 2]], [0, 2, 3, 6], 3)
    """
    edges, longest = sequence_lengths(columns["position_ids"])
    lengths = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest, "max_length_k": longest}
    return {**{name: column.reshape(1, -1) for name, column in columns.items()}, **lengths}


ONE = 0x3F800000
"""The bit pattern of 1.0 in float32."""


def weighted_labels(labels: Tensor, weights: Tensor) -> Tensor:
    """Encode float32 weights in labels, for loss functions that receive only labels.

    The upper 32 bits of a label encode its weight. Labels with weight 1 and the label -100 are unchanged.
    `split_labels` decodes the weights.

    >>> import torch
    >>> from chatmill.integrations.columns import split_labels, weighted_labels
    >>> labels = weighted_labels(torch.tensor([-100, 7, 8]), torch.tensor([0.0, 1.0, 0.5]))
    >>> labels[:2].tolist(), [part.tolist() for part in split_labels(labels)]
    ([-100, 7], [[-100, 7, 8], [0.0, 1.0, 0.5]])
    """
    upper = (weights.float().view(torch.int32).long() ^ ONE) << 32
    return torch.where(labels == IGNORE_INDEX, labels, labels | upper)


def split_labels(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the plain labels and the weight of each label; the weight of the label -100 is 0."""
    trained = labels != IGNORE_INDEX
    weights = ((labels >> 32) ^ ONE).int().view(torch.float32)
    return torch.where(trained, labels & 0xFFFFFFFF, labels), torch.where(trained, weights, 0.0)


def _tensor(array: Any) -> Tensor:
    return array if isinstance(array, Tensor) else torch.from_numpy(array)
