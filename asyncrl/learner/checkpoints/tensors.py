"""The (sharded) tensors of a checkpoint: taken from the roles, and loaded into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from asyncrl.errors import CheckpointError, CheckpointMismatchError
from asyncrl.learner.checkpoints.fitting import check_fits, check_roles, shapes_in
from asyncrl.learner.checkpoints.writing import said_of
from asyncrl.learner.model.lora import without_frozen
from asyncrl.learner.roles import Roles

KEYS = {"policy": ("model", "optimizer"), "critic": ("critic", "critic_optimizer")}
"""Names of the weights and moments of each trained role."""
RESUMABLE = ("lr", "betas", "eps", "weight_decay")
"""Keys of an optimizer's parameter groups that come from the settings and not from the checkpoint."""
PARTS = StateDictOptions(strict=False)
"""The frozen base of adapters is not saved, so it is missing on load; all else was compared by `check_fits`."""


def tensors_of(roles: Roles) -> dict[str, Any]:
    """All (sharded) tensors of `roles` that training changes; the reference is read from its path."""
    tensors: dict[str, Any] = {}
    for name, model, optimizer in roles.trained():
        weights, moments = get_state_dict(model, optimizer)
        tensors |= {KEYS[name][0]: without_frozen(model, weights), KEYS[name][1]: moments}
    if roles.average is not None:
        tensors["average"] = get_model_state_dict(roles.average)
    return tensors


def fill(path: Path, roles: Roles) -> None:
    """Fill `roles` in place with the tensors of the checkpoint `path`. Collective.

    Raises:
        CheckpointError: a file is damaged or missing.
        CheckpointMismatchError: the checkpoint is of another model. Nothing was filled.
    """
    saved = shapes_in(path)
    check_roles(path, saved, roles)
    loaded = tensors_of(roles)
    check_fits(path, saved, loaded)
    try:
        state_dict_loader.load(loaded, checkpoint_id=path, no_dist=not dist.is_initialized())
    except (CheckpointException, ValueError, KeyError) as error:
        failures = error.failures.values() if isinstance(error, CheckpointException) else ()
        if any(isinstance(failure, OSError) for failure, _ in failures):
            raise CheckpointError(f"{path} cannot be read: {said_of(error)}") from error
        raise CheckpointMismatchError(
            f"{path} does not fit the model: {said_of(error)}. Resume with the model.path (and critic.path) "
            "it was trained with"
        ) from error
    except RuntimeError as error:  # not the checkpoint's fault: loading is collective, and another rank is gone
        raise CheckpointError(f"{path} could not be loaded, see the other learner ranks: {error}") from error
    for name, model, optimizer in roles.trained():
        weights, moments = (loaded[key] for key in KEYS[name])
        given = [{key: group[key] for key in RESUMABLE} for group in optimizer.param_groups]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=PARTS)
        for group, settings in zip(optimizer.param_groups, given, strict=True):
            group.update(settings)  # otherwise those of the checkpoint would apply, whatever the resume configures
    if roles.average is not None:
        set_model_state_dict(roles.average, loaded["average"])
