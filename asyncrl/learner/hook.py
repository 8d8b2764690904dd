"""`learner.hook=file.py:name`: called before and after each optimizer step of the policy.

    def hook(update: Update, **hook_args) -> dict[str, float] | None

Every rank makes and calls its own. Numbers that it returns on rank 0 are metrics, `hook/<name>`, the mean over the
updates of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from asyncrl.errors import OwnCodeError
from asyncrl.learner.optimizer.update import UpdateReport
from asyncrl.own_code import called, with_args
from asyncrl.schema import LearnerConfig

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One call. Parameters and gradients are this rank's shards (`DTensor` under FSDP2): what is done to them must be
    done on every rank, and collectives must be called by all."""

    moment: str
    """`before`: gradients of the whole minibatch are there, summed over the ranks, not yet clipped: they may be changed
    in place. `after`: the step is made, or was skipped; weights may be changed in place, and are published so. Not to
    be touched: which parameters there are, `optimizer.step` and `zero_grad`, learning rates (set by the schedule)."""
    step: int
    """Train step, from 0."""
    index: int
    """Which of the step's `learner.updates_per_batch` * `learner.epochs_per_batch`, from 0."""
    rank: int
    world: int
    model: nn.Module
    """The Hugging Face model of the policy."""
    optimizer: torch.optim.Optimizer
    report: UpdateReport | None = None
    """After: loss, gradient norm before the clipping, learning rate, and whether the step was applied."""


class Hook:
    """The user's function or object.

    Raises:
        ConfigError: it cannot be loaded, or does not take its arguments.
    """

    def __init__(self, config: LearnerConfig, *, rank: int, world: int) -> None:
        self._named = f"learner.hook={config.hook}"
        self._call: Callable[[Update], Any] = with_args(config.hook, config.hook_args, "learner.hook", takes=1)
        self._rank, self._world = rank, world

    def call(
        self,
        moment: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        step: int,
        index: int,
        report: UpdateReport | None = None,
    ) -> dict[str, float]:
        """The metrics that it gave, `hook/<name>`.

        Raises:
            OwnCodeError: it raised, or returned what are no numbers.
        """
        update = Update(
            moment=moment,
            step=step,
            index=index,
            rank=self._rank,
            world=self._world,
            model=model,
            optimizer=optimizer,
            report=report,
        )
        where = f"{self._named}, {moment} update {index} of step {step}"
        found = called(self._call, where, update)
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            raise OwnCodeError(f"{where}: it must return a dictionary of numbers or None; got a {type(found).__name__}")
        for name, value in found.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise OwnCodeError(f"{where}: {name!r} must be a finite number, as it is logged; got {value!r}")
        return {f"hook/{name}": float(value) for name, value in found.items()} if self._rank == 0 else {}
