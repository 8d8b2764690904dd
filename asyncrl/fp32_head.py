"""float32 logits for a model in half precision (`model.fp32_head`), with the same product in learner and engine.

The weights keep the model's dtype. What is avoided is rounding each logit to 8 bits, which changes the log-probs of a
large vocabulary by more than everything before it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.errors import ConfigError


def make_head_fp32(head: nn.Module | None) -> None:
    """Make `head` return its logits in float32.

    Raises:
        ConfigError: it is not a linear layer.
    """
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"model.fp32_head=true needs a model whose head is one linear layer; this one has {type(head).__name__}. "
            "Leave model.fp32_head out"
        )
    head.forward = partial(_forward, head)  # pyright: ignore[reportAttributeAccessIssue]


def _forward(head: nn.Linear, input: Tensor) -> Tensor:
    """float32 [..., out] from hidden [..., in] of any dtype; float64 stays float64."""
    wide = torch.promote_types(input.dtype, torch.float32)
    bias = None if head.bias is None else head.bias.to(wide)
    return functional.linear(input.to(wide), head.weight.to(wide), bias)
