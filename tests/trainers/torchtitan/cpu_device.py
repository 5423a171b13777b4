"""Let torchtitan's own trainer run on a CPU; this module must be imported before torchtitan.

Without an accelerator, torchtitan uses CUDA, which a CPU build of torch does not have. This module replaces
torchtitan's device module with torch's CPU module, and logs zeros as the memory usage. FlexAttention has no backward
pass on a CPU, so this module replaces it with dense attention that uses torchtitan's mask. Two calls are skipped:
setting a new timeout after the first training step, which needs the index of a GPU, and a sleep of two seconds at the
end. All other code comes from torchtitan.
"""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda *_: "cpu"
torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1)
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
torch.cpu.memory_stats = lambda *_: {}

with warnings.catch_warnings():
    # These warnings come from parts of torch that torchtitan imports.
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
    from torchtitan import trainer
    from torchtitan.distributed import utils
    from torchtitan.models.common import attention


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, scale: float | None, enable_gqa: bool, **_: Any
) -> tuple[Tensor, None]:
    rows, length = query.shape[0], query.shape[2]
    mask = create_mask(block_mask.mask_mod, rows, 1, length, length, device="cpu")
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, None


attention.FlexAttention._compiled_flex_attn = staticmethod(dense_attention)
attention._compiled_create_block_mask = create_block_mask
utils.set_pg_timeouts = lambda **_: None
trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)


def without_gpu_settings(monkeypatch: Any) -> None:
    """Make torchtitan's own configs run without CUDA graphs and in float32, because bfloat16 is slow on a CPU."""
    monkeypatch.setattr(trainer, "wrap_with_cuda_graph", lambda function: function)
    monkeypatch.setattr(trainer, "cudagraph_teardown", lambda: None)
    monkeypatch.setitem(trainer.TORCH_DTYPE_MAP, "bfloat16", torch.float32)
