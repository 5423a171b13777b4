from __future__ import annotations

from itertools import islice

import pytest
import torch
from load_fixtures import talks, write_rows

from chatmill.load.loader import EpisodeLoader

CONFIG = {"batch_size": 16, "block_size": 512, "use_loss_mask": True, "packing": "bins"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_on_a_gpu_equal_those_on_the_host(tmp_path):
    target = write_rows(tmp_path / "d", {"train": talks(1, 4000, longest=300)}, shard_tokens=10**7)
    here = EpisodeLoader(target, CONFIG)
    there = EpisodeLoader(target, CONFIG, device="cuda", ahead=3)
    busy = torch.randn(4096, 4096, device="cuda")
    sums = []
    for batch in islice(there, 120):
        assert all(array.device.type == "cuda" for array in batch)
        # A slow kernel delays the current stream while memory is freed and the next batches are copied.
        busy = torch.tanh(busy @ busy)
        sums.append(torch.stack([array.double().sum() for array in batch]))
        del batch
    wanted = [torch.stack([array.double().sum() for array in batch]) for batch in islice(here, 120)]
    assert torch.equal(torch.stack(sums).cpu(), torch.stack(wanted))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_batches_stay_on_the_host(tmp_path):
    target = write_rows(tmp_path / "d", {"train": talks(1, 1000)})
    batch = EpisodeLoader(target, CONFIG, pin_memory=True).get_batch()
    assert all(array.is_pinned() for array in batch)
