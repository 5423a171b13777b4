from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from chatmill.train import attention
from chatmill.train.attention import HOPPER_TILES, attend, block_mask, dense_mask, kernel_options, segment_start


def rows_of(lengths: list[list[int]], size: int) -> torch.Tensor:
    rows = []
    for row in lengths:
        numbers = [number % 5 for number, length in enumerate(row) for _ in range(length)]
        rows.append((numbers + [7] * size)[:size])
    return torch.tensor(rows)


def plain_mask(segments: torch.Tensor) -> torch.Tensor:
    """Return the attention mask: a query attends to a key if all segment ids from the key to the query are equal."""
    rows, size = segments.shape
    mask = torch.zeros(rows, 1, size, size, dtype=torch.bool)
    for row in range(rows):
        for query in range(size):
            for key in range(query, -1, -1):
                if segments[row, key] != segments[row, query]:
                    break
                mask[row, 0, query, key] = True
    return mask


def test_segment_start_matches_the_example_in_its_docstring():
    assert segment_start(torch.tensor([[0, 0, 0, 1, 1, 2]])).tolist() == [[0, 0, 0, 3, 3, 5]]


rows_ = st.lists(st.lists(st.integers(1, 23), min_size=1, max_size=8), min_size=1, max_size=3)


@given(rows_, st.integers(1, 40))
def test_the_dense_mask_matches_the_pairwise_rule(lengths, size):
    segments = rows_of(lengths, size)
    assert torch.equal(dense_mask(segment_start(segments)), plain_mask(segments))


@given(rows_, st.integers(1, 70), st.sampled_from([4, 16]))
@settings(max_examples=60)
def test_the_block_mask_covers_all_needed_blocks_and_marks_full_blocks(lengths, size, block):
    segments = rows_of(lengths, size)
    start = segment_start(segments)
    wanted = dense_mask(start)
    saved, attention.BLOCK = attention.BLOCK, block
    try:
        mask = block_mask(start)
    finally:
        attention.BLOCK = saved
    count = -(-size // block)
    padded = torch.zeros(len(segments), 1, count * block, count * block, dtype=torch.bool)
    padded[:, :, :size, :size] = wanted
    tiles = padded.unflatten(3, (count, block)).unflatten(2, (count, block))
    assert torch.equal(mask.to_dense().bool(), tiles.any(dim=5).any(dim=3))
    # Positions past the end of a row have no queries or keys, so a block may be marked as full regardless of them.
    ends = torch.arange(count * block) >= size
    beyond = (ends[:, None] | ends).unflatten(1, (count, block)).unflatten(0, (count, block))
    full = _full(mask, count)
    assert bool((tiles | beyond).all(dim=5).all(dim=3)[full].all())
    # The kernel applies `mask_mod` to each pair in blocks that are not full.
    assert torch.equal(create_mask(mask.mask_mod, len(segments), 1, size, size, device="cpu"), wanted)


def _full(mask, count: int) -> torch.Tensor:
    full = torch.zeros(*mask.full_kv_num_blocks.shape, count, dtype=torch.bool)
    for place in torch.cartesian_prod(*map(torch.arange, mask.full_kv_num_blocks.shape)).tolist():
        at = tuple(place)
        full[at][mask.full_kv_indices[at][: mask.full_kv_num_blocks[at]].long()] = True
    return full


def test_most_blocks_of_long_conversations_need_no_mask():
    mask = block_mask(segment_start(torch.zeros(1, 1024, dtype=torch.long)))
    assert mask.kv_num_blocks.flatten().tolist() == [1] * 8
    assert mask.full_kv_num_blocks.flatten().tolist() == list(range(8))


def test_grouped_query_attention_shares_key_heads_between_query_heads():
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    mask = dense_mask(segment_start(torch.zeros(2, 5, dtype=torch.long)))
    repeated = (heads.repeat_interleave(2, dim=2) for heads in (k, v))
    assert torch.allclose(attend(q, k, v, mask), attend(q, *repeated, mask), atol=1e-6)


@given(st.integers(1, 5), st.integers(1, 300))
@settings(max_examples=40)
def test_block_tables_have_the_strides_that_the_kernel_expects(rows, length):
    mask = block_mask(segment_start(torch.zeros(rows, length, dtype=torch.long)))
    tables = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    tables += (mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices)
    assert [table.stride() for table in tables] == [torch.empty(table.shape).stride() for table in tables]


@pytest.mark.parametrize(
    ("gpu", "head_size", "dtype", "tuned"),
    [
        ((9, 0), 128, torch.bfloat16, True),
        ((9, 0), 64, torch.float32, True),
        ((9, 0), 128, torch.float32, False),
        ((9, 0), 256, torch.bfloat16, False),
        ((8, 9), 128, torch.bfloat16, False),
        ((10, 0), 128, torch.bfloat16, False),
    ],
)
def test_tuned_tiles_are_used_only_on_hopper_and_for_heads_that_fit(gpu, head_size, dtype, tuned, monkeypatch):
    properties = SimpleNamespace(major=gpu[0], minor=gpu[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert kernel_options(torch.empty(1, 2, 4, head_size, dtype=dtype)) == (HOPPER_TILES if tuned else None)
