"""LoRA inside vLLM's worker processes: adapters are taken from staging in memory, without a file or path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from asyncrl.errors import WeightsError
from asyncrl.weights.adapter import peft_names, read_pairs, read_scaling


def add_adapter(manager: Any, tensors: Mapping[str, torch.Tensor], lora_id: int) -> None:
    """Add one more adapter to vLLM's adapter manager in this worker; the others are not touched.

    Raises:
        WeightsError: vLLM cannot adapt one of its layers; vLLM itself would silently leave it out.
    """
    rank, alpha = read_scaling(tensors)
    layers = list(read_pairs(tensors))
    peft = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=layers)
    peft.validate_legal(manager.lora_config)
    inner = manager._adapter_manager
    mapper = getattr(inner.model, "hf_to_vllm_mapper", None)
    # Cloned: vLLM scales B in place, and the next version overwrites the staging.
    copies = {name: tensors[name].clone() for layer in layers for name in peft_names(layer)}
    adapter = LoRAModel.from_lora_tensors(
        lora_model_id=lora_id,
        tensors=copies,
        peft_helper=peft,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
    )
    inner.add_adapter(adapter)  # also packs layers that vLLM merges (q, k, v), under the merged name
    homeless = sorted(set(adapter.loras) - set(inner.modules))
    if homeless:
        inner.remove_adapter(lora_id)
        raise WeightsError(f"vLLM cannot adapt {homeless[0]!r}. Leave it out of model.lora_targets")
    inner.activate_adapter(lora_id)


def drop_adapters(manager: Any, lora_ids: Sequence[int]) -> None:
    """Drop adapters that no request uses; a step that still used one would make vLLM load it, which is not possible."""
    for lora_id in lora_ids:
        manager._adapter_manager.remove_adapter(lora_id)
