"""The optimizer behind the copy of the weights: it changes what is copied while the rest is being copied.

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
    """Let no step change weights that are still being copied: a version is read beside the next forward and backward.

    In the optimizer itself, so that nobody who lets it step can forget to wait. It has to step each parameter by itself
    and pass over those without a gradient, as those of torch do: the step is the same bits in parts. Gradients of all
    but the last part are gone after it.
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
            parameter.grad = gradient  # for the step that this comes before

    def _step(
        self, optimizer: torch.optim.Optimizer, waiting: dict[nn.Parameter, Tensor], free: Iterable[Tensor]
    ) -> None:
        """Of those parameters that are `free`."""
        places = {memory_of(tensor) for tensor in free} - {0}  # what has no elements lies nowhere
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
    """By parameter; none has one any more."""
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                found[parameter], parameter.grad = parameter.grad, None
    return found
