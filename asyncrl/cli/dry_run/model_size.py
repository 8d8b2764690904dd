"""What the files of a checkpoint say of a model's size. No tensor is loaded, nor torch."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.learner.memory_plan import Shape, Sizes, stacked


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Read from the files of a local checkpoint; no tensor is loaded."""

    parameters: int
    kv_values_per_token: int
    """Keys and values of one token over all layers, counted in numbers."""
    shapes: Mapping[str, Shape]
    """As the learner holds them (`memory_plan.stacked`)."""
    sizes: Sizes | None
    matrices: Mapping[str, tuple[int, int]]
    """[out, in] of the weights in the blocks, by the name of their layer; without experts and
    what chooses among them."""

    @property
    def of_critic(self) -> int:
        """Numbers of a critic made of it: without the head, whose place one row takes."""
        return self.parameters - math.prod(self.shapes.get("lm_head.weight", (0,)))

    def trained(self, rank: int, targets: Sequence[str]) -> int:
        """All parameters; with a rank of LoRA those of the adapters: an estimate, since only the model itself knows
        which layers are linear."""
        if rank == 0:
            return self.parameters
        return sum(map(math.prod, self.adapters(rank, targets).values()))

    def adapters(self, rank: int, targets: Sequence[str]) -> dict[str, Shape]:
        """Of LoRA with a rank, by name: the two matrices of each layer."""
        chosen = {
            name: shape
            for name, shape in self.matrices.items()
            if not targets or any(f".{name}".endswith(f".{target}") for target in targets)
        }
        halves = (
            {f"{name}.lora_A.weight": (rank, b), f"{name}.lora_B.weight": (a, rank)} for name, (a, b) in chosen.items()
        )
        return {name: shape for each in halves for name, shape in each.items()}


def model_size(folder: Path) -> ModelSize | None:
    """None where the checkpoint is not here (a hub name) or not in safetensors that can be read."""
    files = sorted(folder.glob("*.safetensors"))
    config_file = folder / "config.json"
    if not files or not config_file.is_file():
        return None
    try:
        shapes = {name: shape for file in files for name, shape in tensor_shapes(file).items()}
        config = json.loads(config_file.read_text())
    except (ValueError, struct.error):  # the plan of a replay server, whose machine need not hold a whole model
        return None
    matrices = {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if len(shape) == 2 and re.search(r"\.\d+\.", name) and not re.search(r"\.(experts|gate|router)\.", name)
    }
    if config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)  # some checkpoints have it twice, the model once
    return ModelSize(
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        kv_values_per_token=kv_values(config),
        shapes=stacked(shapes),
        sizes=Sizes.of(config),
        matrices=matrices,
    )


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """Shapes by name, from the header of a safetensors file: 8 bytes of length, then JSON."""
    with file.open("rb") as data:
        (length,) = struct.unpack("<Q", data.read(8))
        header = json.loads(data.read(length))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def kv_values(model: dict[str, Any]) -> int:
    """2 * layers * key-value heads * head dimension, by the names every Hugging Face decoder uses; 0 if unknown."""
    heads = model.get("num_attention_heads") or 0
    if not heads or "num_hidden_layers" not in model:
        return 0
    head_dim = model.get("head_dim") or model["hidden_size"] // heads
    return 2 * model["num_hidden_layers"] * (model.get("num_key_value_heads") or heads) * head_dim
