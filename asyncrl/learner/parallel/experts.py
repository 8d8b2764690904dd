"""Expert parallelism: neighbouring ranks hold different experts of a mixture's layers (GShard, arXiv 2006.16668).

    rank 0: its tokens, by expert --- all to all ---> all ranks' tokens for experts 0 1 --- all to all ---> its tokens,
    rank 1:                                                                 for 2 3         their output    added up

A token is sent once for each expert that it is routed to. Each rank receives the tokens routed to its experts, possibly
none. The ranks have sequences of their own, and all parameters but the experts are as without expert parallelism: FSDP2
shards them over all ranks. Experts are DTensors over the `expert` dimension of the mesh; FSDP2 shards them again over
the ranks with the same experts.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from asyncrl.checks.parallel import EXPERT
from asyncrl.learner.parallel.collectives import exchanged
from asyncrl.learner.parallel.sharding import dim_size
from asyncrl.learner.parallel.tensor import shared


def spread(module: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Leave this rank only its part of the experts in `module` that are not distributed yet, and make them compute the
    tokens of all `expert` ranks of `mesh`. Returns the modules that hold them; an empty list if there is one such
    rank."""
    if dim_size(mesh, EXPERT) == 1:
        return []
    ranks = mesh[EXPERT]
    found = [each for name, each in module.named_modules() if name.rpartition(".")[2] == "experts" and _whole(each)]
    for each in found:
        for key, parameter in each._parameters.items():
            assert parameter is not None
            part = distribute_tensor(parameter.data, ranks, [Shard(0)], src_data_rank=None)
            each._parameters[key] = nn.Parameter(part, parameter.requires_grad)
        # A copy, of the module's own class, without the hooks that FSDP2 will add; it shares the table of parameters.
        each.forward = partial(_forward, copy.copy(each), ranks.get_group())
    return found


def _whole(module: nn.Module) -> bool:
    """Whether the module has all experts, stacked along dim 0, as transformers has them."""
    own = list(module._parameters.values())
    return bool(own) and all(each is not None and each.ndim == 3 and not isinstance(each, DTensor) for each in own)


def _forward(
    plain: nn.Module,
    group: dist.ProcessGroup,
    hidden: Float[Tensor, "tokens width"],
    chosen: Int[Tensor, "tokens k"],
    weights: Float[Tensor, "tokens k"],
) -> Float[Tensor, "tokens width"]:
    """Output of all experts for this rank's tokens. Collective, and so is its backward.

    Args:
        plain: module that computes with some of the experts.
        chosen: expert numbers, among all experts.
        weights: weights of the experts' outputs.
    """
    # FSDP2 takes the mean over the ranks with the same experts, but the mean over all ranks is needed.
    own = {key: shared(_local(each), group.size()) for key, each in plain._parameters.items()}
    count, ranks = len(next(iter(own.values()))), group.size()
    expert, order = chosen.flatten().sort(stable=True)
    mine = torch.bincount(expert, minlength=count * ranks)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    # The sizes must be Python numbers: this synchronises with the GPU once per layer.
    sent, got = torch.stack([mine, theirs]).unflatten(1, (ranks, count)).sum(-1).tolist()
    rows = exchanged(hidden[order // chosen.shape[1]], group, sent, got)
    of_row = torch.arange(count, device=rows.device).repeat(ranks).repeat_interleave(theirs, output_size=len(rows))
    out = exchanged(_computed(plain, own, rows, of_row), group, got, sent)
    weighted = out[order.argsort()].unflatten(0, chosen.shape) * weights[..., None]
    return weighted.sum(1).to(hidden.dtype)


def _local(parameter: Tensor | None) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=[Shard(0)])


def _computed(
    plain: nn.Module, own: dict[str, Tensor], rows: Float[Tensor, "rows width"], expert: Int[Tensor, " rows"]
) -> Float[Tensor, "rows width"]:
    """Output of each row from one of the `own` experts."""
    if not len(rows):
        # Use a row of zeros instead. Without any row the weights would have no gradient, for whose reduction the other
        # ranks wait, and the backward of the exchange, which the other ranks wait for too, would not run.
        zeros = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return _computed(plain, own, zeros, expert.new_zeros(1))[:0]
    ours: Any = copy.copy(plain)
    ours.num_experts = len(next(iter(own.values())))
    ours.__dict__["_parameters"] = own
    return type(plain).forward(ours, rows, expert[:, None], rows.new_ones(len(rows), 1))
