"""Repairs vLLM's layer-by-layer reload: two fixes for its CPU backend, a check, and recovery from a failed load.

Between `initialize_layerwise_reload` and `finalize_layerwise_reload` a layer's parameters are placeholders without
memory; each is filled and put back in place once all its elements have arrived.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    LOADING_LAYERS,
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from asyncrl.errors import WeightsError
from asyncrl.weights.sliced import Wanted, find_wanted

PADDED = (VocabParallelEmbedding, RoutedExperts)
"""Layers that may be larger than the tensors loaded into them."""


def forget_packed_experts(model: nn.Module) -> None:
    """Run before a load, on CPU only. vLLM packs experts for the kernel only while there is no kernel yet: without this
    the new weights are copied in unpacked, and a mixture of experts returns log-probs several nats off, without an
    error."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


def repack_tied_heads(model: nn.Module) -> None:
    """Run after a load, on CPU only. A head tied to the embedding computes with a packed copy of it, which the reload
    does not refresh: without this the head keeps the old weights (log-probs several nats off, without an error)."""
    sharing: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, VocabParallelEmbedding) and isinstance(weight, torch.Tensor):
            sharing.setdefault(weight.data_ptr(), []).append(module)
    for modules in sharing.values():
        if len(modules) > 1:
            for module in modules:
                module.quant_method.process_weights_after_loading(module)  # pyright: ignore


def check_all_loaded(model: nn.Module) -> None:
    """Run after the last tensor and before the end of a load. vLLM itself only logs a layer that got no values, which
    keeps its old weights; the rest of a layer that got some values is uninitialised memory.

    Raises:
        WeightsError: there is such a layer; names it.
    """
    loaded = set()
    missing: list[tuple[str, set[int]]] = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        parameters = info.kernel_tensors[0] if info.kernel_tensors is not None else {}
        places = {parameter.data_ptr() for parameter in parameters.values()} - {0}
        if not info.can_load():
            # complete, and back in place already
            loaded |= {parameter.data_ptr() for parameter in layer.parameters(recurse=False)}
        elif info.load_numel and not isinstance(layer, PADDED):
            raise WeightsError(
                f"an update brought only {info.load_numel} of {info.load_numel_total} values of {name!r}"
            )
        elif info.load_numel:
            loaded |= places
        elif parameters and info.load_numel_total and not is_deferred_attention_layer(layer):
            missing.append((name, places))
    for name, places in missing:
        if not places & loaded:
            raise WeightsError(f"an update brought nothing for {name!r} of vLLM's model: parameter names do not map")


def abandon_reload(model: nn.Module) -> None:
    """Run after a load that failed half-way: every layer gets its own tensors back, so that the next load can start.

    Layers that were complete hold the new weights, the others the old ones: only a complete load makes the model valid.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
    LOADING_LAYERS.clear()


def wanted_by(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Wanted:
    """Return the parts of `tensors` (Hugging Face names; without data) that this process keeps: its loaders run over
    placeholders as in a load, but no layer is ever complete. The model is unchanged afterwards, even on errors. Call it
    between two steps.

    Raises:
        Exception: any error of a loader that cannot work without data.
    """
    torchao = getattr(model, "_do_torchao_reload", False)
    initialize_layerwise_reload(model)
    try:
        for layer in model.modules():
            for tensor in get_layer_tensors(layer).values():
                tensor.weight_loader = _get_original_loader(tensor)  # pyright: ignore[reportAttributeAccessIssue]
        return find_wanted(model.load_weights, tensors)  # pyright: ignore[reportArgumentType]
    finally:
        abandon_reload(model)
        model._do_torchao_reload = torchao  # pyright: ignore[reportArgumentType]
