"""A second backend: every rank holds whole models, and gradients are averaged once they are accumulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrl.checks.parallel import REPLICATE
from asyncrl.learner.backends.base import HeldModel
from asyncrl.learner.parallel.place import Place
from asyncrl.schema import Config


@dataclass(slots=True)
class WholeCopies:
    mesh: DeviceMesh
    on_host: bool = False
    hooked: set[Tensor] = field(default_factory=set)
    meets: dict[HeldModel, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, place: Place) -> WholeCopies:
        return cls(init_device_mesh(place.device.type, (place.world,), mesh_dim_names=(REPLICATE,)))

    def shard(self, model: HeldModel, compute: torch.dtype, before: Callable[[nn.Module], None] | None = None) -> None:
        assert compute == torch.float32
        model.backend = self
        if before is not None:
            before(model)

    def sync(self, model: HeldModel, now: bool) -> None:
        self.meets[model] = now
        for parameter in model.parameters():  # here and not in `shard`: reading a model replaces its parameters
            if parameter.requires_grad and parameter not in self.hooked:
                self.hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(lambda each: self.average(model, each))

    def average(self, model: HeldModel, parameter: Tensor) -> None:
        if self.meets[model] and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.mesh.size()

    def settle(self, model: HeldModel) -> None:
        """Do nothing: the model is always whole."""
