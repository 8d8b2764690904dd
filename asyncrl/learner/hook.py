"""User code around optimizer steps: `learner.hook=file.py:name`, called before and after each step of the policy.

    def hook(update: Update, **hook_args) -> dict[str, float] | None

Every rank makes and calls its own hook. The numbers that it returns on rank 0 become metrics `hook/<name>`, averaged
over the updates of a train step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from asyncrl.errors import UserCodeError
from asyncrl.learner.optimizer.update import UpdateReport
from asyncrl.schema import LearnerConfig
from asyncrl.user_code import called, with_args

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Argument of one call. Parameters and gradients are this rank's shards (`DTensor` under FSDP2): a change must be
    made on every rank, and all ranks must call the same collectives."""

    moment: str
    """`before`: the gradients of the whole minibatch are there, summed over the ranks, not yet clipped; they may be
    changed in place. `after`: the step was applied or skipped; weights may be changed in place and are published as
    changed. Do not touch the set of parameters, `optimizer.step`, `zero_grad` or the learning rates (set by the
    schedule)."""
    step: int
    """Train step, from 0."""
    index: int
    """Number of the update among the step's `learner.updates_per_batch` * `learner.epochs_per_batch`, from 0."""
    rank: int
    world: int
    model: nn.Module
    """The Hugging Face model of the policy."""
    optimizer: torch.optim.Optimizer
    report: UpdateReport | None = None
    """In `after`: loss, gradient norm before clipping, learning rate, and whether the step was applied."""


class Hook:
    """Calls the user's function or object.

    Raises:
        ConfigError: it cannot be loaded, or does not take its arguments.
    """

    def __init__(self, config: LearnerConfig, *, rank: int, world: int) -> None:
        self._named = f"learner.hook={config.hook}"
        self._call: Callable[[Update], Any] = with_args(config.hook, config.hook_args, "learner.hook", takes=1)
        self.rank, self.world = rank, world

    def call(self, update: Update) -> dict[str, float]:
        """Call the hook and return its metrics as `hook/<name>`.

        Raises:
            UserCodeError: it raised, or returned something other than finite numbers.
        """
        where = f"{self._named}, {update.moment} update {update.index} of step {update.step}"
        found = called(self._call, where, update)
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            raise UserCodeError(
                f"{where}: it must return a dictionary of numbers, or None; got a {type(found).__name__}"
            )
        for name, value in found.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise UserCodeError(f"{where}: {name!r} must be a finite number, as it is logged; got {value!r}")
        return {f"hook/{name}": float(value) for name, value in found.items()} if self.rank == 0 else {}
