"""FlashAttention 4 and FlexAttention as attention functions of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from chatmill.train.attention import kernel_options
from chatmill.train.flash import Bounds, flash_attend

FLASH_TYPES = ("granite", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")
"""Model types that pass the boundaries of conversations to their attention function."""


def head_size(config: Any) -> int:
    """Return the size of an attention head in a model with this config."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def registered_flash() -> str:
    """Register FlashAttention 4 as an attention function; return its name in transformers.

    The name must not contain `flash`, because transformers would then look for a package of this name.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, *, scaling: float, cu_seq_lens_q: Tensor,
        max_length_q: int, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        q, k, v = (part.transpose(1, 2).to(v.dtype) for part in (q, k, v))
        return flash_attend(q, k, v, Bounds(cu_seq_lens_q, max_length_q), scaling), None

    AttentionInterface.register("chatmill_packed", attention)
    AttentionMaskInterface.register("chatmill_packed", lambda *args, **kwargs: None)
    return "chatmill_packed"


def registered_flex() -> str:
    """Register a variant of FlexAttention that accepts mixed dtypes under autocast; return its name in transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.masking_utils import flex_attention_mask

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        q = q.to(v.dtype)
        return flex_attention_forward(module, q, k.to(v.dtype), v, *args, kernel_options=kernel_options(q), **kwargs)

    AttentionInterface.register("chatmill_flex", attention)
    AttentionMaskInterface.register("chatmill_flex", flex_attention_mask)
    return "chatmill_flex"
