"""Exports trained models as plain Hugging Face folders: config, safetensors, tokenizer, generation settings."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer, PreTrainedModel

from asyncrl.errors import CheckpointError, DiskFullError
from asyncrl.learner.model.building import compute_dtype
from asyncrl.learner.model.critic import CriticModel
from asyncrl.learner.model.layout import own_attention
from asyncrl.learner.model.lora import merged, save_adapter
from asyncrl.learner.model.packed import PackedModel
from asyncrl.learner.model.policy import WRAPPER_PREFIX, PolicyModel
from asyncrl.schema import ModelConfig
from asyncrl.storage.checkpoints import EXPORT_DIR, EXPORTED_FILE
from asyncrl.storage.full_disk import Patience
from asyncrl.storage.sealed import replacing

COMPANIONS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")
"""Files of the source folder that belong to the tokenizer; they are copied unchanged."""


def export_hf(
    model: PolicyModel,
    config: ModelConfig,
    target: Path,
    rank: int,
    patience: Patience | None = None,
    *,
    trained: int | None = None,
) -> None:
    """Write `target` so that `AutoModelForCausalLM.from_pretrained(target)` and vLLM load it. Collective.

    Weights are saved in `model.dtype`; a tied head is stored once. `target` appears only when it is complete. With
    LoRA the adapters are merged into it, and also saved next to it as `adapter/`, in peft's format.

    Args:
        trained: number of steps, recorded in `target` (`storage.checkpoints.trained_in`).
    """
    whole = gathered(model)
    if rank != 0:
        return
    if model.adapters is not None:
        adapters = model.adapters
        written(adapter_of(target), lambda aside: save_adapter(whole, adapters, aside), nbytes_of(whole), patience)
        whole = merged(whole, model.adapters)
    plain = refilled(AutoModelForCausalLM, model.hf, whole, compute_dtype(config.dtype, model.device))
    plain.tie_weights()
    plain.generation_config = model.hf.generation_config
    written(target, lambda aside: write(plain, config.path, aside, trained), nbytes_of(plain.state_dict()), patience)


def adapter_of(target: Path) -> Path:
    """Folder of the adapters that are merged into the model `target`, next to it."""
    return target.with_name("adapter" if target.name == EXPORT_DIR else f"{target.name}-adapter")


def export_critic(
    model: CriticModel, config: ModelConfig, target: Path, rank: int, patience: Patience | None = None
) -> None:
    """Write the critic with its value head to `target`, so that `critic.path=target` starts from it. Collective."""
    whole = gathered(model)
    if rank == 0:
        plain = refilled(AutoModelForTokenClassification, model.hf, whole, compute_dtype(config.dtype, model.device))
        written(target, lambda aside: write(plain, config.path, aside), nbytes_of(plain.state_dict()), patience)


def gathered(model: PackedModel) -> dict[str, torch.Tensor]:
    """Whole weights by Hugging Face name, on the CPU of rank 0; empty on the others. Collective."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {
        name.removeprefix(WRAPPER_PREFIX): tensor
        for name, tensor in weights.items()
        if isinstance(tensor, torch.Tensor)
    }


def refilled(
    kind: type[AutoModelForCausalLM] | type[AutoModelForTokenClassification],
    hf: PreTrainedModel,
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype,
) -> PreTrainedModel:
    """A model like `hf`, without the learner's changes to it, that holds `weights`."""
    settings = copy.deepcopy(hf.config)
    settings._attn_implementation = own_attention(hf)  # ours exists in the learner only
    with torch.device("meta"):
        plain = kind.from_config(settings, dtype=dtype)
    plain.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)
    return plain


def nbytes_of(weights: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


def written(target: Path, fill: Callable[[Path], None], nbytes: int, patience: Patience | None) -> None:
    """Write `target`; on a full disk, as soon as there is space.

    Raises:
        CheckpointError: it cannot be written (permissions, a broken disk).
        DiskFullError: see `Patience`.
    """

    def write() -> None:
        with replacing(target) as aside:
            fill(aside)

    try:
        (patience or Patience()).through(target, nbytes, write, (OSError, SafetensorError))
    except DiskFullError:
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the trained model to {target}: {error}. The checkpoint is whole: when the disk can be "
            "written, resume=auto or asyncrl export writes it again"
        ) from error


def write(plain: PreTrainedModel, tokenizer: str, folder: Path, trained: int | None = None) -> None:
    """Write model, tokenizer and step count to `folder`. Raises OSError, SafetensorError."""
    plain.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors makes them readable for the owner only, unlike config.json
    if trained is not None:
        (folder / EXPORTED_FILE).write_text(json.dumps({"trained_steps": trained}) + "\n")


def save_tokenizer(source: str, target: Path) -> None:
    """Copy the tokenizer's files, or download and save it if `source` is a hub name."""
    if not Path(source).is_dir():
        AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(target)
        return
    for pattern in COMPANIONS:
        for path in Path(source).glob(pattern):
            if path.is_file():
                shutil.copy2(path, target / path.name)
