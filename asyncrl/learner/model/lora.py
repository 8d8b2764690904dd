"""LoRA: frozen base weights, trainable adapters on the linear layers of the blocks (peft).

This module holds all that differs from full training: which parameters are trained, what is published and exported, and
which base a checkpoint of adapters belongs to.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from xxhash import xxh3_128_hexdigest

from asyncrl.errors import CheckpointMismatchError
from asyncrl.learner.parallel.sharding import part_and_box
from asyncrl.schema import ModelConfig
from asyncrl.storage.objects import read_object
from asyncrl.weights.adapter import SCALING, Pair, peft_names, scaling_tensor, target_layers
from asyncrl.weights.boxes import slices
from asyncrl.weights.fingerprint import chain

NAME = "default"
"""peft's name for the only adapter in the model."""
ADAPTER_FILE = "adapter_model.safetensors"
BASE_FILE = "base.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters of one model. Layers have their Hugging Face names, which peft keeps."""

    layers: Mapping[str, Any]
    """peft's layers, in the order of the model."""
    settings: Any
    """peft's config, for the export."""
    rank: int
    alpha: int
    base_path: str
    base_fingerprint: str
    """Fingerprint of the frozen weights, see `base_fingerprint`."""

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    def identity(self) -> dict[str, Any]:
        """What must be equal in two runs for one to continue with the adapters of the other."""
        return {
            "path": self.base_path,
            "fingerprint": self.base_fingerprint,
            "rank": self.rank,
            "alpha": self.alpha,
            "layers": list(self.layers),
        }

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """The scaling, and `(peft name, parameter or its DTensor)` of each adapter: all that is published."""
        yield SCALING, scaling_tensor(self.rank, self.alpha)
        for name, layer in self.layers.items():
            name_a, name_b = peft_names(name)
            yield name_a, layer.lora_A[NAME].weight.detach()
            yield name_b, layer.lora_B[NAME].weight.detach()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Use the base alone: the reference policy, without a second model. For forwards without gradient."""
        # peft's own switch also changes requires_grad, of the tensors that FSDP currently has in place of the
        # parameters.
        for layer in self.layers.values():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer._disable_adapters = False


def add_adapters(hf: PreTrainedModel, config: ModelConfig, fingerprint: str) -> Adapters:
    """Freeze `hf` and add fp32 adapters to its target layers; `start_adapters` sets their values.

    Args:
        hf: may be without weights.
        fingerprint: of the base weights, see `base_fingerprint`.

    Raises:
        ConfigError: a target matches no layer; the message names the nearest ones.
    """
    peft = importlib.import_module("peft")  # an optional package
    names = target_layers(hf, config.lora_targets)
    settings = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=names,
        lora_dropout=0.0,  # like the model's own dropout: the behavior policy has none
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.path,
    )
    hf.requires_grad_(False)
    peft.inject_adapter_in_model(settings, hf, adapter_name=NAME)
    modules = dict(hf.named_modules())
    layers: dict[str, Any] = {name: modules[name] for name in names}
    blank = any(parameter.is_meta for parameter in hf.parameters())
    for layer in layers.values():
        for side in (layer.lora_A[NAME], layer.lora_B[NAME]):
            side.float()  # peft gives them the dtype of the base
            side.to("meta" if blank else "cpu")
    return Adapters(
        layers=layers,
        settings=settings,
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        base_path=config.path,
        base_fingerprint=fingerprint,
    )


@torch.no_grad()
def start_adapters(adapters: Adapters, seed: int) -> None:
    """Initialise the adapters so that they change nothing yet: A is random, independent of the sharding, and B is 0."""
    generator = torch.Generator().manual_seed(seed)
    for layer in adapters.layers.values():
        a = layer.lora_A[NAME].weight
        drawn = nn.init.kaiming_uniform_(torch.empty(a.shape), a=math.sqrt(5), generator=generator)
        local, own = part_and_box(a)
        local.copy_(drawn[slices(own)])
        nn.init.zeros_(layer.lora_B[NAME].weight)


def base_fingerprint(hf: nn.Module) -> str:
    """Fingerprint of all parameters, each rounded to bfloat16: it is the same for a checkpoint whatever dtype it was
    loaded in and over however many ranks. Collective if they are sharded."""
    parts = []
    for name, parameter in sorted(hf.named_parameters()):
        rounded = parameter.detach().to(torch.bfloat16)
        whole = rounded
        if isinstance(rounded, DTensor):
            whole = rounded.to(rounded.device_mesh.device_type)  # the device on which its ranks communicate
            whole = whole.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
        data = whole.contiguous().view(-1).view(torch.uint8).cpu().numpy().data
        parts.append(f"{name}:{tuple(parameter.shape)}:{xxh3_128_hexdigest(data)}")
    return chain(parts)


def merged(whole: Mapping[str, Tensor], adapters: Adapters) -> dict[str, Tensor]:
    """The full state dict of the model with merged adapters, as that of the plain model: W0 + scaling * B A, in fp32.

    Args:
        whole: unsharded, by peft's form of the Hugging Face names: `<layer>.base_layer.weight`, `<layer>.lora_A...`.
    """
    plain = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in whole.items()
        if ".lora_A." not in name and ".lora_B." not in name
    }
    for name, pair in _pairs(whole, adapters).items():
        weight = plain[f"{name}.weight"]
        plain[f"{name}.weight"] = pair.added_to(weight, adapters.scaling).to(weight.dtype)
    return plain


def save_adapter(whole: Mapping[str, Tensor], adapters: Adapters, folder: Path) -> None:
    """Write the adapters to `folder` in peft's format: adapter_config.json and adapter_model.safetensors (fp32)."""
    tensors: dict[str, Tensor] = {}
    for name, pair in _pairs(whole, adapters).items():
        name_a, name_b = peft_names(name)
        tensors |= {name_a: pair.a.float().contiguous(), name_b: pair.b.float().contiguous()}
    adapters.settings.inference_mode = True
    adapters.settings.save_pretrained(folder)
    file = folder / ADAPTER_FILE
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)


def _pairs(whole: Mapping[str, Tensor], adapters: Adapters) -> dict[str, Pair]:
    return {
        name: Pair(a=whole[f"{name}.lora_A.{NAME}.weight"], b=whole[f"{name}.lora_B.{NAME}.weight"])
        for name in adapters.layers
    }


def without_frozen(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict without the parameters that are not trained, under all names of a tied one."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in weights.items() if name not in frozen}


def write_base(folder: Path, adapters: Adapters | None) -> None:
    """Write to a checkpoint which base its adapters belong to. Nothing for a full model, which has its own weights."""
    if adapters is not None:
        (folder / BASE_FILE).write_text(json.dumps(adapters.identity()) + "\n")


def check_base(folder: Path, adapters: Adapters | None) -> None:
    """Check, before a checkpoint is loaded, that its adapters fit.

    Raises:
        CheckpointMismatchError: it holds adapters of another base, rank, alpha or choice of layers, or none at all.
    """
    file = folder / BASE_FILE
    if adapters is None or not file.is_file():
        if adapters is not None or file.is_file():
            has, want = ("adapters", "0") if file.is_file() else ("a full model", str(adapters and adapters.rank))
            raise CheckpointMismatchError(
                f"{folder} holds {has}, but model.lora_rank={want}. Resume with the settings that it was saved with"
            )
        return
    saved, ours = read_object(file), adapters.identity()
    if saved["fingerprint"] != ours["fingerprint"]:
        raise CheckpointMismatchError(
            f"{folder} holds adapters for the base {saved['path']} (fingerprint {saved['fingerprint'][:12]}); "
            f"model.path={ours['path']} has other weights ({ours['fingerprint'][:12]}). Resume with that model.path"
        )
    for key in ("rank", "alpha", "layers"):
        if saved[key] != ours[key]:
            setting = "model.lora_targets" if key == "layers" else f"model.lora_{key}"
            raise CheckpointMismatchError(
                f"{folder} was trained with another {setting} ({saved[key]}; now {ours[key]}). Resume with that one"
            )
