"""AdamW whose moments are kept in host memory (`learner.offload=optimizer`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.learner.optimizer.one_by_one import MOMENTS, OneByOne, step_one
from asyncrl.learner.parallel.sharding import local

HOST = torch.device("cpu")


class HostMoments(OneByOne):
    """The moments and step count of a parameter are copied to its device for its step, and back. Uses the same kernel
    as when all of them are kept there, with bitwise the same result."""

    def _step_of(self, parameter: nn.Parameter, kept: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        if not kept:
            kept["step"] = torch.zeros((), device=HOST)
            kept |= {name: torch.zeros_like(parameter, device=HOST) for name in MOMENTS}
        names = ("step", *MOMENTS)
        here = [local(kept[name]).to(parameter.device) for name in names]
        assert parameter.grad is not None
        step_one(local(parameter), local(parameter.grad), here, group)
        for name, value in zip(names, here, strict=True):
            local(kept[name]).copy_(value)

    def _home(self, parameter: nn.Parameter) -> torch.device:
        return HOST
