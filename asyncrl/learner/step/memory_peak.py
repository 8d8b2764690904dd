"""Peak GPU memory of a step, and the estimate of `memory_plan` for its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.fsdp import FSDPModule

from asyncrl.learner.batch.micro_batch import MicroBatch
from asyncrl.learner.memory_plan import MASTER, Sizes, head_bytes, whole_numbers
from asyncrl.learner.model.attention_trial import kernel_of
from asyncrl.learner.model.building import compute_dtype
from asyncrl.learner.model.packed import PackedModel
from asyncrl.learner.parallel.sharding import numbers_computed_with
from asyncrl.learner.roles import Roles
from asyncrl.learner.step.accumulation import held_by
from asyncrl.schema import ModelConfig

PEAK, PLANNED = "memory/peak_gb", "memory/planned_gb"


def planned_bytes(config: ModelConfig, roles: Roles, batches: Sequence[MicroBatch]) -> int:
    """Estimate for this rank: what it holds of all models, plus the temporary memory of its largest micro-batch. 0 if
    the model's config is not that of a plain decoder."""
    sizes = Sizes.of(roles.policy.hf.config.to_dict())
    if sizes is None or not batches:
        return 0
    held = held_by(roles)
    device = batches[0].input_ids.device
    compute, several = compute_dtype(config.dtype, device), len(batches) > 1
    width = compute.itemsize
    passing = max(whole_bytes(model, width, several=several) for model in roles.models())
    every, keep = config.checkpoint_every if config.activation_checkpointing else 0, config.checkpoint_keep
    shared = 1 if roles.policy.sequence is None else roles.policy.sequence.size
    any_length = kernel_of(device, compute).any_length

    def kept_of(batch: MicroBatch) -> int:
        tokens, slots = len(batch.input_ids), batch.packing.slots(any_length=any_length)
        return sizes.activations(-(-tokens // shared), -(-slots // shared), width, every, keep)

    kept = max(map(kept_of, batches))
    scored = max(len(batch.loss_positions) for batch in batches) // shared
    wide = config.fp32_head and width < MASTER
    head = head_bytes(sizes.vocabulary, sizes.hidden, width, device.type, scored, wide=wide)
    return held + passing + kept + head


def whole_bytes(model: PackedModel, width: int, *, several: bool) -> int:
    """Temporary bytes of a sharded model: the weights that are whole while it computes and, with several micro-batches
    that are reduced at their end, its whole gradient. 0 for a model that is not sharded, which holds both
    permanently."""
    if not isinstance(model, FSDPModule):
        return 0
    shapes = {name: (numbers_computed_with(parameter),) for name, parameter in model.named_parameters()}
    gradient = sum(numbers_computed_with(parameter) for parameter in model.parameters() if parameter.requires_grad)
    return width * whole_numbers(shapes) + (MASTER * gradient if several and not model.reduce_each else 0)


def begin_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_row(
    config: ModelConfig, roles: Roles, batches: Sequence[MicroBatch], device: torch.device
) -> dict[str, float]:
    """Peak memory of tensors since `begin_peak`, and the estimate; an empty dict without a GPU, because only its
    allocator counts."""
    if device.type != "cuda":
        return {}
    planned = planned_bytes(config, roles, batches)
    row = {PEAK: torch.cuda.max_memory_allocated(device) / 1e9}
    return row | ({PLANNED: planned / 1e9} if planned else {})
