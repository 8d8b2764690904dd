"""LoRA inside vLLM's worker processes: adapters come from the staging in memory, no file and no path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from asyncrl.errors import WeightsError
from asyncrl.weights.adapter import peft_names, read_pairs, read_scaling


def add_adapter(manager: Any, tensors: Mapping[str, torch.Tensor], lora_id: int) -> None:
    """Give vLLM's adapter manager of this worker one more adapter; those it has are not touched.

    Raises:
        WeightsError: vLLM has no place for one of its layers; it would leave it out without a word.
    """
    rank, alpha = read_scaling(tensors)
    layers = list(read_pairs(tensors))
    peft = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=layers)
    peft.validate_legal(manager.lora_config)
    inner = manager._adapter_manager
    mapper = getattr(inner.model, "hf_to_vllm_mapper", None)
    # vLLM scales B in place, and the staging is overwritten by the next version.
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
    inner.add_adapter(adapter)  # also packs what vLLM computes together (q, k, v), under the name of the whole
    homeless = sorted(set(adapter.loras) - set(inner.modules))
    if homeless:
        inner.remove_adapter(lora_id)
        raise WeightsError(f"vLLM cannot adapt {homeless[0]!r}. Leave it out of model.lora_targets")
    inner.activate_adapter(lora_id)


def drop_adapters(manager: Any, lora_ids: Sequence[int]) -> None:
    """Forget adapters that no request uses: vLLM would have to load one that a step still asks for, from nowhere."""
    for lora_id in lora_ids:
        manager._adapter_manager.remove_adapter(lora_id)
