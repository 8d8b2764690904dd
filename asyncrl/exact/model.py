"""Makes a Hugging Face decoder compute with the exact kernels; its gradients stay those of the ordinary operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.exact import kernels

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` of decoders that compute only what `_replacement` covers, sums of two, and products."""
ROPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary embedding whose frequencies do not depend on the sequence length."""
EXACT_ATTENTION = "asyncrl_exact"


def make_exact(model: PreTrainedModel, device: torch.device, *, keep: bool = False) -> Exact:
    """Make `model` compute with the exact kernels, except its attention (see `exact_attention`).

    Args:
        keep: the weights stay fixed until `Exact.forget`, so float64 copies of those of all linear layers are kept.

    Raises:
        ConfigError: the model has parts that are not known to be computed exactly, or is not on a CPU.
    """
    config = model.config.get_text_config(decoder=True)
    fault = f"it is on {device.type}, but the kernels were only tried on CPUs" if device.type != "cpu" else ""
    if config.model_type not in FAMILIES:
        fault = fault or f"its model type is {config.model_type!r}, but only {', '.join(FAMILIES)} are known"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPES:
        fault = fault or f"its rotary embedding is of the kind {rope!r}, but only {', '.join(ROPES)} are known"
    leaves = [module for module in model.modules() if not any(module.children())]
    foreign = sorted({type(leaf).__name__ for leaf in leaves if _replacement(leaf) is None} - {"Embedding", "Identity"})
    if foreign:
        fault = fault or f"it has {', '.join(foreign)}"
    if fault:
        raise ConfigError(f"engine.exact=true cannot compute this model bit for bit: {fault}. Set engine.exact=false")
    exact = Exact(keep)
    for leaf in leaves:
        make = _replacement(leaf)
        if make is not None:
            leaf.forward = make(exact, leaf)
    return exact


class Exact:
    """State shared by the exact forward functions of a model: its rounded weights, if they are kept."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._rounded: dict[nn.Linear, Tensor] = {}

    def forget(self) -> None:
        """Drop the rounded weights, because the weights have changed."""
        self._rounded.clear()

    def weight(self, layer: nn.Linear) -> Tensor:
        found = self._rounded.get(layer)
        if found is None:
            found = kernels.rounded_weight(layer.weight)
            if self._keep:
                self._rounded[layer] = found
        return found


class _Valued(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def valued(plain: Callable[[], Tensor], exact: Callable[[], Tensor]) -> Tensor:
    """Return the value of `exact()` with the gradient of `plain()`, which is the same function up to rounding."""
    with torch.no_grad():
        value = exact()
    return _Valued.apply(plain(), value) if torch.is_grad_enabled() else value  # pyright: ignore[reportReturnType]


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature of transformers, for models that are not trained. Masks are bool; None is causal."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return kernels.attention(query, key, value, scale, attention_mask).transpose(1, 2), None


Kernel = Callable[[Any, Any, Tensor], Tensor]
"""Result of a layer for its input, from the `Exact` of its model and the layer."""


def _replacement(leaf: nn.Module) -> Callable[[Exact, Any], Callable[..., Any]] | None:
    name = type(leaf).__name__
    if type(leaf) is nn.Linear:
        return _computing(lambda exact, layer, x: kernels.linear(x, exact.weight(layer), layer.bias))
    if name.endswith("RMSNorm") and hasattr(leaf, "variance_epsilon"):
        return _computing(lambda _, norm, x: kernels.rms_norm(x, norm.weight, norm.variance_epsilon))
    if name in ("SiLU", "SiLUActivation"):
        return _computing(lambda _, activation, x: kernels.silu(x))
    return _rotary if name.endswith("RotaryEmbedding") else None


def _computing(kernel: Kernel) -> Callable[[Exact, Any], Callable[[Tensor], Tensor]]:
    """Maker of a layer's forward: the kernel's value with the gradient of its own."""

    def make(exact: Exact, layer: Any) -> Callable[[Tensor], Tensor]:
        plain = layer.forward
        return lambda x: valued(lambda: plain(x), lambda: kernel(exact, layer, x))

    return make


def _rotary(_: Exact, rotary: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    table = partial(_grown, rotary, {})

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = table(int(position_ids.max()) + 1)
        return cosines[position_ids], sines[position_ids]

    return forward


def _grown(rotary: Any, tables: dict[str, tuple[Tensor, Tensor]], positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions or more, head_dim], by the C library: ATen's depend on the position in a tensor."""
    known = len(tables["both"][0]) if tables else 0
    if known < positions:
        angles = torch.arange(max(positions, 2 * known, 512)).float()[:, None] * rotary.inv_freq.cpu().float()
        rows = angles.tolist()
        both = (torch.tensor([[f(angle) for angle in row] for row in rows]) for f in (math.cos, math.sin))
        first, second = (torch.cat([half, half], -1) * float(rotary.attention_scaling) for half in both)
        tables["both"] = first, second
    return tables["both"]


AttentionInterface.register(EXACT_ATTENTION, exact_attention)
