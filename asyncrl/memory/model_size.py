"""Reads a model's size from the files of a checkpoint. Loads neither tensors nor torch."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl.learner.memory_plan import Shape, Sizes, stacked
from asyncrl.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Size of a model, read from the files of a local checkpoint without loading tensors."""

    parameters: int
    kv_values_per_token: int
    """Number of elements in the keys and values of one token, over all layers."""
    shapes: Mapping[str, Shape]
    """Shapes of the tensors as the learner holds them (`memory_plan.stacked`)."""
    sizes: Sizes | None
    matrices: Mapping[str, tuple[int, int]]
    """[out, in] of the weights in the blocks, by layer name; without experts and routers."""
    others: Mapping[str, ModelSize] = field(default_factory=dict)
    """Sizes of the checkpoints of the critic and the reference that are local and not this one, by path."""

    @property
    def of_critic(self) -> int:
        """Number of parameters of a critic made from the model, without the head, which is replaced by one row."""
        return self.parameters - math.prod(self.shapes.get("lm_head.weight", (0,)))

    def trained(self, rank: int, targets: Sequence[str]) -> int:
        """Return the number of trained parameters: all, or with a LoRA rank those of the adapters. The latter is an
        estimate, since only the model itself knows which layers are linear."""
        if rank == 0:
            return self.parameters
        return sum(map(math.prod, self.adapters(rank, targets).values()))

    def adapters(self, rank: int, targets: Sequence[str]) -> dict[str, Shape]:
        """Return the shapes of LoRA adapters by name, two matrices for each layer."""
        chosen = {
            name: shape
            for name, shape in self.matrices.items()
            if not targets or any(f".{name}".endswith(f".{target}") for target in targets)
        }
        halves = (
            {f"{name}.lora_A.weight": (rank, b), f"{name}.lora_B.weight": (a, rank)} for name, (a, b) in chosen.items()
        )
        return {name: shape for each in halves for name, shape in each.items()}


def sizes_of(config: Config) -> ModelSize | None:
    """Read the sizes of all models of a run; None if that of the policy is unknown. Reads each file once, so call this
    once: a model of hundreds of files takes seconds on a network disk."""
    policy = model_size(Path(config.model.path))
    paths = {config.critic.path, config.reference.path} - {"", config.model.path}
    others = {path: found for path in paths if (found := model_size(Path(path))) is not None} if policy else {}
    return policy and replace(policy, others=others)


def model_size(folder: Path) -> ModelSize | None:
    """Read a model's size; None if the checkpoint is not local (a hub name) or has no readable safetensors."""
    files = sorted(folder.glob("*.safetensors"))
    config_file = folder / "config.json"
    if not files or not config_file.is_file():
        return None
    try:
        shapes = {name: shape for file in files for name, shape in tensor_shapes(file).items()}
        config = json.loads(config_file.read_text())
    except (ValueError, struct.error):  # the machine of a replay server need not have a complete model
        return None
    return model_of(shapes, config)


def model_of(shapes: dict[str, Any], config: dict[str, Any]) -> ModelSize:
    """Return the size of a model with these tensors and this `config.json`."""
    matrices = {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if len(shape) == 2 and re.search(r"\.\d+\.", name) and not re.search(r"\.(experts|gate|router)\.", name)
    }
    if config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)  # some checkpoints store it although it is tied
    return ModelSize(
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        kv_values_per_token=kv_values(config),
        shapes=stacked(shapes),
        sizes=Sizes.of(config),
        matrices=matrices,
    )


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """Read shapes by name from the header of a safetensors file: 8 bytes with its length, then JSON."""
    with file.open("rb") as data:
        (length,) = struct.unpack("<Q", data.read(8))
        header = json.loads(data.read(length))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def kv_values(model: dict[str, Any]) -> int:
    """Return 2 * layers * key-value heads * head dimension, by the names that every Hugging Face decoder uses; 0 if
    unknown."""
    heads = model.get("num_attention_heads") or 0
    if not heads or "num_hidden_layers" not in model:
        return 0
    head_dim = model.get("head_dim") or model["hidden_size"] // heads
    return 2 * model["num_hidden_layers"] * (model.get("num_key_value_heads") or heads) * head_dim
