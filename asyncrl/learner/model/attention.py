"""Causal attention over packed sequences that share their prompts, without padding elsewhere, a mask or a [T, T]
matrix.

Registered with transformers under `PACKED_ATTENTION`. The layout of the sequences is passed through the model's forward
as the keyword argument `packing` (`batch.packing`).

On a GPU all rows go to one call of a kernel that takes any lengths (`attention_rows`), if there is one
(`attention_kernel`). Otherwise rows of similar length form [B, H, L, D] blocks, so the cost is sum(L^2), not T^2. On a
CPU a shared prompt is then computed once, and its keys and values are held once (`attention_shared`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from asyncrl.errors import ConfigError
from asyncrl.learner.batch.packing import Packing
from asyncrl.learner.model.attention_kernel import BLOCKS, Kernel, compiles_nothing
from asyncrl.learner.model.attention_rows import Rows, attend
from asyncrl.learner.model.attention_shared import attend_apart
from asyncrl.learner.model.attention_trial import kernel_of

PACKED_ATTENTION = "asyncrl_packed"
REFUSED_KWARGS = {
    "softcap": "a cap on its scores (softcap)",
    "s_aux": "attention sinks (s_aux)",
    "position_bias": "a bias by position (position_bias)",
}
"""Changes to the attention scores that this kernel does not implement; ignoring one would train a different model."""


class UnpackedCall(ConfigError):
    """A model calls the packed attention without the packing, or with a mask of its own."""


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens head_dim"],
    key: Float[Tensor, "1 kv_heads tokens head_dim"],
    value: Float[Tensor, "1 kv_heads tokens value_dim"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 tokens heads value_dim"], None]:
    """Attention function with the signature that transformers calls. Dropout is never applied: the behavior policy had
    none.

    Raises:
        ConfigError: the model needs something this kernel does not implement (a mask, score capping, attention sinks).
    """
    refused = [said for name, said in REFUSED_KWARGS.items() if kwargs.get(name) is not None]
    if packing is None or attention_mask is not None or refused:
        cause = ", ".join(refused) or ("an attention mask" if packing is not None else "a forward without packing")
        raise (ConfigError if refused else UnpackedCall)(
            f"packed attention does not support {cause}, which {type(module).__name__} uses; use a plain causal "
            "decoder (Llama, Qwen2, Qwen3, Mistral)"
        )
    if packing.note_window is not None:
        packing.note_window(sliding_window)
    if packing.sequence is not None:
        query, key, value = packing.sequence.to_heads(query, key, value)
    if compiles_nothing(query.dtype):
        kernel = Kernel(BLOCKS, "nothing is compiled for a few tokens")
    else:
        kernel = kernel_of(query.device, query.dtype, max(query.shape[-1], value.shape[-1]))
    shared, scale = packing.shared, query.shape[-1] ** -0.5 if scaling is None else scaling
    if shared is not None and (sliding_window is None or sliding_window >= packing.max_length):
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        out = attend_apart(q, k, v, shared, scale)
        return (out if packing.sequence is None else packing.sequence.to_tokens(out))[None], None
    gather = packing.rows if kernel.any_length else packing.padded.rows
    q, k, v = (tensor[0].transpose(0, 1).index_select(0, gather.index) for tensor in (query, key, value))
    if kernel.any_length:
        rows = Rows(packing.cu_seqlens, packing.max_length, packing.lengths)
        out = attend(kernel.name, q, k, v, rows, scale, sliding_window)
    else:
        out = _blockwise(q, k, v, packing.padded.shapes, scale, sliding_window)
    out = out.index_select(0, gather.owner)
    return (out if packing.sequence is None else packing.sequence.to_tokens(out))[None], None


def _blockwise(
    q: Float[Tensor, "slots heads head_dim"],
    k: Float[Tensor, "slots kv_heads head_dim"],
    v: Float[Tensor, "slots kv_heads value_dim"],
    shapes: Sequence[tuple[int, int]],
    scale: float,
    window: int | None,
) -> Float[Tensor, "slots heads value_dim"]:
    """
    Args:
        shapes: see `Blocks`.
    """
    outputs, grouped = [], q.shape[1] != k.shape[1]
    slots = [rows * length for rows, length in shapes]
    for (rows, length), *tensors in zip(shapes, *(each.split(slots) for each in (q, k, v)), strict=True):
        bq, bk, bv = (tensor.view(rows, length, *tensor.shape[1:]).transpose(1, 2) for tensor in tensors)
        mask = None if window is None or window >= length else _band(length, window, q.device)
        options: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": mask is None,
            "scale": scale,
            "enable_gqa": grouped,
        }
        out = functional.scaled_dot_product_attention(bq, bk, bv, **options)
        outputs.append(out.transpose(1, 2).reshape(rows * length, q.shape[1], v.shape[2]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _band(length: int, window: int, device: torch.device) -> Bool[Tensor, "length length"]:
    """Which keys each token sees."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    return (distance >= 0) & (distance < window)


# Without a mask function, so that transformers builds no mask at all for this implementation.
AttentionInterface.register(PACKED_ATTENTION, packed_attention)
