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
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.func import functional_call
from torch.nn import functional
from transformers import PreTrainedModel

from asyncrl.checks.architecture import BY_COLUMNS, BY_ROWS, FUSED, SPLIT_LAYERS
from asyncrl.checks.parallel import TENSOR
from asyncrl.learner.parallel.collectives import summed_over, through

ACROSS = "across"
"""A norm over the heads of all ranks: each has its part of the row, and their squares are summed."""
OF_PART = "of part"
"""What every rank applies to its part alone (norms of single heads, activations with parameters): gradients are
summed."""
WHOLE = "whole"
"""Style of a matrix that every rank has and computes with: the half of an adapter that is not split."""
OF_ADAPTERS = {("lora_A", BY_ROWS): WHOLE, ("lora_A", FUSED): WHOLE, ("lora_B", BY_COLUMNS): WHOLE}
"""The other halves are split like their layer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How the layers of a model are split."""

    styles: Mapping[str, str]
    """Last name of a module -> style."""
    heads: tuple[int, int]
    """Number of query heads and of key-value heads."""

    @classmethod
    def of(cls, hf: PreTrainedModel) -> Plan:
        """Return the plan of a model: of its layers `SPLIT_LAYERS`, of its norms what transformers' plan says."""
        config = hf.config.get_text_config(decoder=True)
        given = {name.rpartition(".")[2]: style for name, style in (config.base_model_tp_plan or {}).items()}
        styles = {name: SPLIT_LAYERS[name] for name in given.keys() & SPLIT_LAYERS.keys()} | {"act_fn": OF_PART}
        styles |= {name: OF_PART for name, style in given.items() if style == "replicated_with_grad_allreduce"}
        # Transformers puts q and k together again where a norm of the whole row follows.
        if given.get("q_proj") == "colwise_gather_output":
            styles |= dict.fromkeys(("q_norm", "k_norm"), ACROSS)
        heads = config.num_attention_heads
        return cls(styles, (heads, getattr(config, "num_key_value_heads", None) or heads))

    def style_of(self, name: str) -> str:
        """Return the style of the module `name`, or of the layer whose adapter it is; empty if it is not split."""
        path = name.removesuffix(".base_layer").split(".")
        if len(path) > 2 and path[-2] in ("lora_A", "lora_B"):
            style = self.styles.get(path[-3], "")
            return OF_ADAPTERS.get((path[-2], style), style)
        return self.styles.get(path[-1], "")

    def rows_of(self, name: str, rows: int, part: int, parts: int) -> list[slice]:
        """Return the rows of a fused layer, or of its adapter, that the rank `part` of `parts` computes with."""
        queries, keys = self.heads
        layers = (queries, keys, keys) if "qkv_proj" in name.split(".") else (1, 1)
        ends = [rows * end // sum(layers) for end in accumulate(layers)]
        lengths = [(end - start) // parts for start, end in pairwise((0, *ends))]
        return [
            slice(start + part * length, start + (part + 1) * length)
            for start, length in zip((0, *ends), lengths, strict=False)
        ]


def cut(module: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Split the parameters in `module` that are not sharded yet over the `tensor` ranks of `mesh`, and make it compute
    with the parts."""
    tensor = mesh[TENSOR]
    done: dict[Tensor, nn.Parameter] = {}
    for name, child in module.named_modules():
        if hasattr(child, "qkv_proj") and not isinstance(child.config, _OfRank):
            _with_own_heads(child, tensor.size())
        own = {key: each for key, each in child._parameters.items() if each is not None}
        if not own or any(isinstance(each, DTensor) for each in own.values()):
            continue
        style = plan.style_of(name)
        for key, parameter in own.items():
            if parameter not in done:
                part = distribute_tensor(
                    parameter.data, tensor, [_placement(child, key, style, tensor.size())], src_data_rank=None
                )
                done[parameter] = nn.Parameter(part, parameter.requires_grad)
            child._parameters[key] = done[parameter]
        child.forward = _forward(child, name, plan, tensor.get_group())


class _OfRank:
    """The config of a model, as the attention of one rank sees it: what is set later on the model's is seen too."""

    def __init__(self, config: Any, ranks: int) -> None:
        self._config = config
        self.num_attention_heads = config.num_attention_heads // ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _with_own_heads(attention: Any, ranks: int) -> None:
    """Let an attention that cuts q, k and v out of one output by numbers of heads count those of a rank."""
    attention.config = _OfRank(attention.config, ranks)
    attention.num_key_value_heads //= ranks


def _placement(module: nn.Module, key: str, style: str, ranks: int) -> Placement:
    if style == BY_COLUMNS:
        return Shard(1) if key == "weight" else Replicate()
    if style == WHOLE:
        return Replicate()
    # Embedding and head are split only for storage; the head of a critic, which has one row, is not.
    wide = style in (BY_ROWS, FUSED) or (isinstance(module, (nn.Embedding, nn.Linear)) and len(module.weight) >= ranks)
    return Shard(0) if wide else Replicate()


def _forward(module: nn.Module, name: str, plan: Plan, group: dist.ProcessGroup) -> Callable[..., Any]:
    """Forward of `module`, whose parameters will be DTensors over `group` when it is called."""
    style = plan.style_of(name)
    if style == BY_ROWS:
        return partial(_by_rows, module, group)
    if style == BY_COLUMNS:
        return partial(_by_columns, module, group)
    if style == FUSED:
        return partial(_fused, module, group, partial(plan.rows_of, name, part=group.rank(), parts=group.size()))
    if style == ACROSS:
        return partial(_across, module, group)
    # A copy has the forward of its class, and shares the table of parameters that FSDP2 changes.
    return partial(_with_whole, copy.copy(module), style == OF_PART)


def _by_rows(module: nn.Module, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    weight, bias = (_part(module._parameters[key], Shard(0)) for key in ("weight", "bias"))
    assert weight is not None
    return functional.linear(_copied(x, group), weight, bias)


def _by_columns(module: nn.Module, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    weight, bias = _part(module._parameters["weight"], Shard(1)), module._parameters["bias"]
    assert weight is not None
    total = _summed(functional.linear(x, weight), group)
    return total if bias is None else total + whole(bias)


def _fused(module: nn.Module, group: dist.ProcessGroup, rows_of: Callable[[int], list[slice]], x: Tensor) -> Tensor:
    weight, bias = (
        None if each is None else torch.cat([whole(each, of_part=True)[rows] for rows in rows_of(len(each))])
        for each in (module._parameters[key] for key in ("weight", "bias"))
    )
    assert weight is not None
    return functional.linear(_copied(x, group), weight, bias)


def _across(module: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """RMSNorm, in fp32, of rows of which each rank has a part."""
    parameter = module._parameters["weight"]
    weight, wide = whole(parameter, of_part=True).chunk(group.size())[group.rank()], x.float()
    squares = _summed(_copied(wide.square().sum(-1, keepdim=True), group), group)
    scale = torch.rsqrt(squares / len(parameter) + module.variance_epsilon)
    return (weight * (wide * scale)).to(x.dtype)


def _with_whole(plain: nn.Module, of_part: bool, *args: Any, **kwargs: Any) -> Any:
    values = {key: whole(each, of_part=of_part) for key, each in plain._parameters.items() if each is not None}
    return functional_call(plain, values, args, kwargs)


def _part(parameter: Tensor | None, gradient: Placement) -> Tensor | None:
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[gradient])


def whole(parameter: Tensor, *, of_part: bool = False) -> Tensor:
    """The whole of a parameter split over the `tensor` ranks, once FSDP2 has gathered it; the parameter itself if it is
    not split.

    Args:
        of_part: each rank's gradient is that of its part of the layer, a part of the sum. Otherwise it is the same on
            every rank up to the order in which a GPU sums: a parameter that is split takes its part of it, one that is
            not takes the mean, because otherwise the ranks' copies would drift apart.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    (placement,) = parameter.placements
    if isinstance(placement, Shard):
        return parameter.full_tensor(grad_placements=[Partial() if of_part else Replicate()])
    local = parameter.to_local(grad_placements=[Partial()])
    return local if of_part else shared(local, parameter.device_mesh.size())


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
