"""Router replay for mixture-of-experts models: the built-in engine records what its routers chose, and the learner
makes its routers choose the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.types import Routers


def gates_of(hf: PreTrainedModel) -> list[tuple[nn.Module, nn.Module]]:
    """`(decoder layer, its router)` for each layer that has experts, in order."""
    found = []
    for layer in hf.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            blocks = (each._modules for each in layer.modules())
            found += [(layer, gate) for block in blocks if "experts" in block and (gate := block.get("gate"))]
    return found


def routers_of(hf: PreTrainedModel) -> Routers:
    """The routers' sizes. The model's family must have passed `checks.architecture.not_replayed`."""
    gates: list[Any] = [gate for _, gate in gates_of(hf)]
    return Routers(layers=len(gates), chosen=int(gates[0].top_k), experts=int(gates[0].num_experts))


def weights_of(
    gate: Any, logits: Float[Tensor, "tokens experts"], chosen: Int[Tensor, "tokens k"]
) -> Float[Tensor, "tokens k"]:
    """The weights that a router gives to the outputs of the chosen experts, with gradient, by its family's formula.

    Softmax routers (Qwen-MoE, Mixtral) normalise over the chosen, which is the softmax of their logits (eq. 6 of
    Rollout Routing Replay, arXiv 2510.11370), or over all; those of DeepSeek-V3 and GLM-4-MoE take sigmoids.
    """
    if hasattr(gate, "routed_scaling_factor"):
        scores = logits.sigmoid().gather(-1, chosen)
        if gate.norm_topk_prob:
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        return scores * gate.routed_scaling_factor
    if getattr(gate, "norm_topk_prob", True):  # Mixtral has no such setting, and normalises
        return logits.gather(-1, chosen).softmax(-1, dtype=torch.float32)
    return logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)


class Recorder:
    """Records the experts that the routers of an engine's model choose."""

    def __init__(self, hf: PreTrainedModel) -> None:
        self._dtype = torch.uint8 if routers_of(hf).experts <= 256 else torch.int16
        self._seen: list[Tensor] | None = None
        for _, gate in gates_of(hf):
            gate.register_forward_hook(self._note)

    @contextmanager
    def on(self, rows: int, told: list[NDArray[Any]]) -> Iterator[None]:
        """Record one forward of [rows, T] tokens; appends an array [T, layers, k] per row to `told`."""
        self._seen = []
        try:
            yield
            each = torch.stack([chosen.to(self._dtype) for chosen in self._seen], 1)
            told.extend(each.unflatten(0, (rows, -1)).cpu().numpy())
        finally:
            self._seen = None

    def _note(self, gate: nn.Module, given: Any, answer: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._seen is not None:
            self._seen.append(answer[2])
