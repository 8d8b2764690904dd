"""When gradients are reduced over the ranks: with the last micro-batch of an optimizer step, or with each one.

Before the reduction every rank holds the whole gradient in fp32, whatever the number of ranks; after it each rank holds
its shard. Reducing with each micro-batch multiplies the bytes sent by the number of micro-batches.
"""

from __future__ import annotations

import logging

from asyncrl.checks.parallel import TENSOR
from asyncrl.learner.backends.base import Backend
from asyncrl.learner.memory_plan import MASTER, held, reduces_each
from asyncrl.learner.optimizer.eight_bits import EightBits
from asyncrl.learner.optimizer.one_by_one import HOST, HostMoments
from asyncrl.learner.parallel.collectives import text_of_rank_zero
from asyncrl.learner.parallel.place import memory_of
from asyncrl.learner.parallel.sharding import device_of, dim_size, numbers_computed_with, shards_of
from asyncrl.learner.roles import Roles
from asyncrl.schema import LearnerConfig

log = logging.getLogger(__name__)


def held_by(roles: Roles) -> int:
    """Bytes that the shards of all models take on the compute device, on the rank that holds most."""
    total, optimizers = 0, {id(model): optimizer for _, model, optimizer in roles.trained()}
    for model in roles.models():
        optimizer = optimizers.get(id(model))
        moved, kind = isinstance(optimizer, HostMoments), "adamw_8bit" if isinstance(optimizer, EightBits) else "adamw"
        device = model.device.type
        for parameter in model.parameters():
            width, trained = parameter.element_size(), parameter.requires_grad
            shape, shards = tuple(parameter.shape), shards_of(parameter)
            each = held([shape], shards, width=width, trained=trained, optimizer=kind)
            if parameter.device.type == device:
                total += each.total - (each.optimizer if moved and device != HOST.type else 0)
    return total


def agree_on_reduction(roles: Roles, config: LearnerConfig, backend: Backend | None) -> None:
    """Set `reduce_each` of the trained models to the same value on every rank, since it decides which collectives they
    call. Collective."""
    if backend is None:
        return
    mesh, device = backend.mesh, device_of(backend.mesh)
    learned = [model for _, model, _ in roles.trained()]
    trained = max(
        sum(numbers_computed_with(each) for each in model.parameters() if each.requires_grad) for model in learned
    )
    trained = -(-trained // dim_size(mesh, TENSOR))  # tensor-parallel ranks hold a part each
    memory = memory_of(device, mesh.size())
    shards = held_by(roles)
    mine = reduces_each(config.reduce_gradients, shards=shards, trained=trained, memory=memory)
    each = text_of_rank_zero("each" if mine else "last", device) == "each"
    for model in learned:
        model.reduce_each = each
    if each and config.reduce_gradients == "auto":
        log.info(
            "gradients are reduced after every micro-batch, because whole gradients take %.1f GB besides %.1f GB of "
            "shards, together more than half of a rank's %.1f GB (learner.reduce_gradients=last keeps whole gradients)",
            *(MASTER * trained / 1e9, shards / 1e9, memory / 1e9),
        )
