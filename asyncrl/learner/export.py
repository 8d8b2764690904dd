"""The trained policy as a plain Hugging Face folder: config, safetensors, tokenizer, generation settings."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.learner.lora import merged, save_adapter
from asyncrl.learner.model import DTYPES, WRAPPER_PREFIX, PolicyModel
from asyncrl.schema import ModelConfig

COMPANIONS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")
"""Files of the source folder that belong to the tokenizer; copied as they are."""


def export_hf(model: PolicyModel, config: ModelConfig, target: Path, rank: int) -> None:
    """Write `target` so that `AutoModelForCausalLM.from_pretrained(target)` and vLLM load it. Collective.

    Weights are saved in `model.dtype`; a tied head is stored once. `target` appears only when it is complete. With
    LoRA the adapters are merged into it, and lie beside it as `adapter/`, in peft's format.
    """
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank != 0:
        return
    dtype = DTYPES[config.dtype]
    whole = {
        name.removeprefix(WRAPPER_PREFIX): tensor
        for name, tensor in weights.items()
        if isinstance(tensor, torch.Tensor)
    }
    if model.adapters is not None:
        save_adapter(whole, model.adapters, target.with_name("adapter"))
        whole = merged(whole, model.adapters)
    whole = {name: tensor.to(dtype) for name, tensor in whole.items()}
    settings = copy.deepcopy(model.hf.config)
    settings._attn_implementation = "sdpa"  # ours exists in the learner only
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    plain.load_state_dict(whole, assign=True)
    plain.tie_weights()
    plain.generation_config = model.hf.generation_config
    aside = target.with_name(target.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    plain.save_pretrained(aside)
    save_tokenizer(config.path, aside)
    for file in aside.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes for the owner alone; who may read config.json may read the weights
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)


def save_tokenizer(source: str, target: Path) -> None:
    """Copy the tokenizer's files, or fetch and save it where `source` is a hub name."""
    if not Path(source).is_dir():
        AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(target)
        return
    for pattern in COMPANIONS:
        for path in Path(source).glob(pattern):
            if path.is_file():
                shutil.copy2(path, target / path.name)
