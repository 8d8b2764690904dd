"""Wire format of a LoRA adapter: pairs of matrices under their peft names, and the scaling.

    base_model.model.<module>.lora_A.weight  [rank, in]      base_model.model.<module>.lora_B.weight  [out, rank]
    adapter.rank_alpha                       int32 [2]: integers, so that no wire dtype rounds them

The policy is W = W0 + alpha / rank * B A; every machine has W0 from `model.path`, and it is never sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from asyncrl.checks.hints import nearest
from asyncrl.errors import ConfigError, ModelMismatchError

SCALING = "adapter.rank_alpha"
_PREFIX = "base_model.model."
_SIDES = (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The two matrices of one adapted linear layer."""

    a: torch.Tensor
    """[rank, in]"""
    b: torch.Tensor
    """[out, rank]"""

    def added_to(self, weight: torch.Tensor, scaling: float) -> torch.Tensor:
        """weight [out, in] + scaling * B A, in fp32; on the device of `weight`."""
        a, b = (side.to(weight.device, torch.float32) for side in (self.a, self.b))
        return torch.addmm(weight.float(), b, a, alpha=scaling)


def peft_names(module: str) -> tuple[str, str]:
    """Names of A and B for a linear layer."""
    return _PREFIX + module + _SIDES[0], _PREFIX + module + _SIDES[1]


def scaling_tensor(rank: int, alpha: int) -> torch.Tensor:
    return torch.tensor([rank, alpha], dtype=torch.int32)


def is_adapter(names: Iterable[str]) -> bool:
    return SCALING in set(names)


def read_scaling(tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Return (rank, alpha)."""
    rank, alpha = tensors[SCALING].tolist()
    return rank, alpha


def read_pairs(tensors: Mapping[str, torch.Tensor]) -> dict[str, Pair]:
    """Return `{module: Pair}` of a whole update; values are not read, so tensors on `meta` are accepted.

    Raises:
        ModelMismatchError: not an adapter, a name that does not belong to an adapter, or half a pair; names the first.
    """
    if SCALING not in tensors:
        raise ModelMismatchError(
            "this update has no adapter, but model.lora_rank is above 0 here. One run sends either full weights or "
            "adapters: give learner and workers the same model settings"
        )
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name == SCALING:
            continue
        side = next((side for side in _SIDES if name.endswith(side)), None)
        if side is None or not name.startswith(_PREFIX):
            raise ModelMismatchError(f"{name!r} belongs to no adapter, and an update of adapters has nothing else")
        sides.setdefault(name.removeprefix(_PREFIX).removesuffix(side), {})[side] = tensor
    for module, found in sides.items():
        if len(found) != len(_SIDES):
            raise ModelMismatchError(f"only {next(iter(found))[1:]} of the adapter of {module!r} arrived")
    return {module: Pair(a=found[_SIDES[0]], b=found[_SIDES[1]]) for module, found in sides.items()}


def target_layers(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the names of the linear layers in a Hugging Face model's blocks: all, or those that end in one of
    `targets`.

    Raises:
        ConfigError: a target matches none, or there are none; the message names the nearest.
    """
    block_classes = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [name for name, module in model.named_modules() if type(module).__name__ in block_classes]
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(name.startswith(f"{block}.") for block in blocks)
    ]
    known = sorted({name.rpartition(".")[2] for name in linear})
    for target in targets:
        if not any(_matches(name, target) for name in linear):
            raise ConfigError(
                f"model.lora_targets: {target!r} matches no linear layer in the blocks of {type(model).__name__}, "
                f"which are {', '.join(known) or 'none'}.{nearest(target, [*known, *linear])}"
            )
    chosen = [name for name in linear if not targets or any(_matches(name, target) for target in targets)]
    if not chosen:
        raise ConfigError(f"{type(model).__name__} has no linear layers in its blocks to adapt. Use model.lora_rank=0")
    return chosen


def _matches(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")
