"""FSDP2 over the ranks (HSDP where there are copies), under it tensor parallelism (`tensor`), beside it sequence
parallelism (`sequence`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from asyncrl.checks.parallel import TENSOR
from asyncrl.learner.backends.base import HeldModel
from asyncrl.learner.sequence import SequenceRanks
from asyncrl.learner.sharding import data_mesh, dim_size
from asyncrl.learner.tensor import cut, plan_of


@dataclass(frozen=True, slots=True)
class FSDP2:
    mesh: DeviceMesh
    """As `ParallelDims` lays it out."""
    on_host: bool = False

    def shard(self, model: HeldModel, compute: torch.dtype, before: Callable[[nn.Module], None] | None = None) -> None:
        """One group of parameters per decoder layer, one for the rest (embedding, final norm, head)."""
        model.sequence, model.backend = SequenceRanks.here(), self
        plan = plan_of(model.hf) if dim_size(self.mesh, TENSOR) > 1 else {}
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        # Only memory that is pinned for a GPU is copied beside what it computes.
        home = CPUOffloadPolicy(pin_memory=self.mesh.device_type == "cuda") if self.on_host else OffloadPolicy()
        layer_classes = set(model.hf._no_split_modules or ())
        # From within: Mamba names its blocks and the mixers in them, and what is sharded already cannot be again.
        layers = [each for each in reversed(list(model.hf.modules())) if type(each).__name__ in layer_classes]
        for module in (*layers, model):
            if before is not None:
                before(module)
            cut(module, self.mesh, plan)
            fully_shard(module, mesh=data_mesh(self.mesh), mp_policy=policy, offload_policy=home)
        for name in model.entries:
            register_fsdp_forward_method(model, name)  # or it would compute with the shards alone

    def sync(self, model: HeldModel, now: bool) -> None:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(now)

    def settle(self, model: HeldModel) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
