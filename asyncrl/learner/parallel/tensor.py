"""Tensor parallelism: neighbouring ranks compute every layer together, each with part of its heads and of its inner
width (Megatron-LM, arXiv 1909.08053, section 3).

    x ---copy---> q, k, v, gate, up: rows of the weight ---> heads ---> o, down: columns of the weight ---sum---> y
         backward: sum                                                               backward: copy

Weights are DTensors over the `tensor` dimension of the mesh, which FSDP2 shards again; the computation uses the local
parts. Embedding and head are split too, but gathered for their computation: every rank has all logits. Parameters that
no plan splits (norms) are the same on every rank.

Adapters (LoRA) are split like their layer, in the dimension that they share with it; the other dimension is their rank:

    by rows:     x ---> A, whole ---copy---> B: rows ---> added to this rank's part of the output
    by columns:  this rank's part of x ---> A: columns ---sum---> B, whole ---> added to y
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.func import functional_call
from torch.nn import functional
from transformers import PreTrainedModel

from asyncrl.checks.parallel import TENSOR
from asyncrl.learner.parallel.collectives import summed_over, through
from asyncrl.learner.parallel.sharding import dim_size

BY_ROWS, BY_COLUMNS = "colwise", "rowwise"
"""The names that the plans of transformers give them, after the part of the output that a rank has."""
PER_HEAD = ("q_norm", "k_norm")
"""Norms of single heads: each rank sees only its own heads, so gradients are summed."""
WHOLE = "whole"
"""Style of a matrix that every rank has and computes with: the half of an adapter that is not split."""
OF_ADAPTERS = {("lora_A", BY_ROWS): WHOLE, ("lora_B", BY_COLUMNS): WHOLE}
"""The other halves are split like their layer."""


def plan_of(hf: PreTrainedModel) -> dict[str, str]:
    """Map the last names of the linear layers that are split to the style, from the model's own plan."""
    plan = hf.config.get_text_config(decoder=True).base_model_tp_plan or {}
    return {name.rpartition(".")[2]: style for name, style in plan.items() if style in (BY_ROWS, BY_COLUMNS)}


def cut(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Split the parameters in `module` that are not sharded yet over the `tensor` ranks of `mesh`, and make it compute
    with the parts. Does nothing if there is one such rank."""
    if dim_size(mesh, TENSOR) == 1:
        return
    tensor = mesh[TENSOR]
    done: dict[Tensor, nn.Parameter] = {}
    for name, child in module.named_modules():
        own = {key: each for key, each in child._parameters.items() if each is not None}
        if not own or any(isinstance(each, DTensor) for each in own.values()):
            continue
        last, style = style_of(name, plan)
        for key, parameter in own.items():
            if parameter not in done:
                part = distribute_tensor(
                    parameter.data, tensor, [_placement(child, key, style, tensor.size())], src_data_rank=None
                )
                done[parameter] = nn.Parameter(part, parameter.requires_grad)
            child._parameters[key] = done[parameter]
        child.forward = _forward(child, style, last in PER_HEAD, tensor.get_group())


def style_of(name: str, plan: Mapping[str, str]) -> tuple[str, str]:
    """Last name of the layer that a module is, or is an adapter of, and the module's style; empty if `plan` does not
    contain it."""
    path = name.removesuffix(".base_layer").split(".")
    if len(path) > 2 and path[-2] in ("lora_A", "lora_B"):
        style = plan.get(path[-3], "")
        return path[-3], OF_ADAPTERS.get((path[-2], style), style)
    return path[-1], plan.get(path[-1], "")


def _placement(module: nn.Module, key: str, style: str, ranks: int) -> Placement:
    if style == BY_COLUMNS:
        return Shard(1) if key == "weight" else Replicate()
    if style == WHOLE:
        return Replicate()
    # Embedding and head are split only for storage; the head of a critic, which has one row, is not.
    wide = style == BY_ROWS or (isinstance(module, (nn.Embedding, nn.Linear)) and len(module.weight) >= ranks)
    return Shard(0) if wide else Replicate()


def _forward(module: nn.Module, style: str, per_head: bool, group: dist.ProcessGroup) -> Callable[..., Any]:
    """Forward of `module`, whose parameters will be DTensors over `group` when it is called."""
    if style == BY_ROWS:
        return partial(_by_rows, module, group)
    if style == BY_COLUMNS:
        return partial(_by_columns, module, group)
    # A copy has the forward of its class, and shares the table of parameters that FSDP2 changes.
    return partial(_with_whole, copy.copy(module), per_head)


def _by_rows(module: nn.Module, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    weight, bias = (_part(module._parameters[key], Shard(0)) for key in ("weight", "bias"))
    assert weight is not None
    return functional.linear(_copied(x, group), weight, bias)


def _by_columns(module: nn.Module, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    weight, bias = _part(module._parameters["weight"], Shard(1)), module._parameters["bias"]
    assert weight is not None
    total = _summed(functional.linear(x, weight), group)
    return total if bias is None else total + whole(bias)


def _with_whole(plain: nn.Module, per_head: bool, *args: Any, **kwargs: Any) -> Any:
    values = {key: whole(each, per_head=per_head) for key, each in plain._parameters.items() if each is not None}
    return functional_call(plain, values, args, kwargs)


def _part(parameter: Tensor | None, gradient: Placement) -> Tensor | None:
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[gradient])


def whole(parameter: Tensor, *, per_head: bool = False) -> Tensor:
    """The whole of a parameter split over the `tensor` ranks, once FSDP2 has gathered it; the parameter itself if it is
    not split.

    Args:
        per_head: each rank's gradient is that of its heads, a part of the sum. Otherwise it is the same on every rank
            up to the order in which a GPU sums: a parameter that is split takes its part of it, one that is not takes
            the mean, because otherwise the ranks' copies would drift apart.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    (placement,) = parameter.placements
    if isinstance(placement, Shard):
        return parameter.full_tensor(grad_placements=[Replicate()])
    local = parameter.to_local(grad_placements=[Partial()])
    return local if per_head else shared(local, parameter.device_mesh.size())


def shared(x: Tensor, ranks: int) -> Tensor:
    """`x`, for a gradient that every rank computes in full and that is later summed over the `ranks`."""
    return through(x, _same, lambda grad: grad / ranks)


def _copied(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The input of layers that are split over the ranks: its gradient is the sum of theirs."""
    return through(x, _same, lambda grad: summed_over(grad, group))


def _summed(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' partial outputs."""
    return through(part, lambda x: summed_over(x, group), lambda grad: grad)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)
