"""Steps the optimizer behind the copy of the weights: parts that are copied are updated while the rest is copied.

copy        part 0 | part 1 | part 2 | ...
optimizer           part 0 | part 1 | part 2 | ...
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from asyncrl.weights.base import Publisher
from asyncrl.weights.publishing.sharding import memory_of


def hold_back(optimizer: torch.optim.Optimizer, publisher: Publisher) -> None:
    """Make every optimizer step wait for weights that are still being copied: a version is read during the next forward
    and backward.

    The wait is in the optimizer itself, so that no caller can forget it. The optimizer must step each parameter
    independently and skip those without a gradient, as torch's optimizers do; a step in parts then gives the same bits.
    Afterwards only the gradients of the last part remain.
    """
    optimizer.register_step_pre_hook(_Behind(publisher))


class _Behind:
    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._within = False

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._within:
            return
        waiting: dict[nn.Parameter, Tensor] | None = None
        for free in self._publisher.copied():
            if waiting is None:
                waiting = taken_gradients(optimizer)
            self._step(optimizer, waiting, free)
        for parameter, gradient in (waiting or {}).items():
            parameter.grad = gradient  # for the optimizer step that follows this hook

    def _step(
        self, optimizer: torch.optim.Optimizer, waiting: dict[nn.Parameter, Tensor], free: Iterable[Tensor]
    ) -> None:
        places = {memory_of(tensor) for tensor in free} - {0}  # tensors without elements have no memory
        ready = [parameter for parameter in waiting if memory_of(parameter) in places]
        if not ready:
            return
        for parameter in ready:
            parameter.grad = waiting.pop(parameter)
        self._within = True
        try:
            optimizer.step()
        finally:
            self._within = False
        for parameter in ready:
            parameter.grad = None


def taken_gradients(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, Tensor]:
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                found[parameter], parameter.grad = parameter.grad, None
    return found
