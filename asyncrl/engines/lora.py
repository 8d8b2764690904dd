"""Adapters for an engine that merges them into its weights: W = W0 + scaling * B A, computed from W0 for each
version."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from asyncrl.errors import ModelMismatchError
from asyncrl.weights.adapter import Pair, read_pairs, read_scaling


class AdapterTable:
    """Replaces `ParameterTable` when only adapters are published.

    The adapted layers' weights are kept twice, as they are served and as they were loaded: adding the difference of two
    adapters to the served weights would accumulate a rounding error per version.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self._pristine: dict[str, torch.Tensor] = {}

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise for an update that does not fit, before anything is changed.

        Raises:
            ModelMismatchError: no adapter, half of one, an unknown layer, or a shape that does not fit; names the
                first.
        """
        for name, pair in read_pairs(tensors).items():
            layer = self._layers.get(name)
            if layer is None:
                raise ModelMismatchError(f"an adapter for {name!r}: the engine's model has no such linear layer")
            check_pair(name, pair, layer.out_features, layer.in_features)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Serve the base with this adapter; `check` has passed before."""
        rank, alpha = read_scaling(tensors)
        pairs = read_pairs(tensors)
        with torch.no_grad():
            for name in pairs:
                if name not in self._pristine:
                    self._pristine[name] = self._layers[name].weight.detach().clone()
            for name, base in self._pristine.items():
                weight = self._layers[name].weight
                if name not in pairs:
                    weight.copy_(base)  # adapted earlier, but no longer
                    continue
                weight.copy_(pairs[name].added_to(base, alpha / rank))


def check_pair(name: str, pair: Pair, out_features: int, in_features: int) -> None:
    """Raises ModelMismatchError unless B [out, r] and A [r, in] fit each other and a layer [out, in]."""
    a, b = tuple(pair.a.shape), tuple(pair.b.shape)
    if len(a) != 2 or len(b) != 2 or (b[0], a[1]) != (out_features, in_features) or a[0] != b[1]:
        raise ModelMismatchError(
            f"the adapter of {name!r} has lora_A {a} and lora_B {b}; a layer [{out_features}, {in_features}] needs "
            f"[rank, {in_features}] and [{out_features}, rank]"
        )
