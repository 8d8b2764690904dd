"""What a recomputed layer keeps for the backward (`model.checkpoint_keep`): its input, and the outputs that are most
expensive to compute for the memory they take.

In a long sequence that is attention: its arithmetic grows with the square of the length, its output with the length.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.attention import varlen
from torch.utils.checkpoint import create_selective_checkpoint_contexts

assert varlen, "its import is what registers `torch_attn`"
ATTENTION = (
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
MATMUL = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
KEPT = {"nothing": (), "attention": ATTENTION, "matmul": (*ATTENTION, *MATMUL)}
"""Operations whose outputs are kept, by the value of the setting."""


def checkpointing_options(keep: str) -> dict[str, Any]:
    """Keyword arguments for `torch.utils.checkpoint`."""
    options: dict[str, Any] = {"use_reentrant": False}
    if KEPT[keep]:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(KEPT[keep]))
    return options
