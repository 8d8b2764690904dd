"""FSDP2 over the ranks (HSDP with several copies), combined with tensor, expert and sequence parallelism
(`parallel`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
from asyncrl.learner.parallel.experts import spread
from asyncrl.learner.parallel.sequence import SequenceRanks
from asyncrl.learner.parallel.sharding import data_mesh, dim_size, expert_data_mesh
from asyncrl.learner.parallel.tensor import Plan, cut


@dataclass(frozen=True, slots=True)
class FSDP2:
    mesh: DeviceMesh
    """Laid out by `ParallelDims`."""
    on_host: bool = False

    def shard(self, model: HeldModel, compute: torch.dtype, before: Callable[[nn.Module], None] | None = None) -> None:
        """One FSDP parameter group per decoder layer and one for the rest (embedding, final norm, head); with expert
        parallelism another for the experts of each layer."""
        model.sequence, model.backend = SequenceRanks.here(), self
        plan = Plan.of(model.hf) if dim_size(self.mesh, TENSOR) > 1 else None
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        of_experts = replace(policy, cast_forward_inputs=False)  # router weights in float32 stay in float32
        over, over_same_experts = data_mesh(self.mesh), expert_data_mesh(self.mesh)
        # Only pinned memory is copied in parallel to the GPU's work.
        home = CPUOffloadPolicy(pin_memory=self.mesh.device_type == "cuda") if self.on_host else OffloadPolicy()
        for module in (*model.layers, model):  # innermost first: FSDP2 leaves out what is sharded already
            if before is not None:
                before(module)
            for experts in spread(module, self.mesh):
                fully_shard(experts, mesh=over_same_experts, mp_policy=of_experts, offload_policy=home)
            if plan:
                cut(module, self.mesh, plan)
            fully_shard(module, mesh=over, mp_policy=policy, offload_policy=home)
        for name in model.entries:
            register_fsdp_forward_method(model, name)  # otherwise it would compute with the shards

    def sync(self, model: HeldModel, now: bool) -> None:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(now)

    def settle(self, model: HeldModel) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
