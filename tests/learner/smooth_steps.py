"""Optimizer steps as exact as the gradients, for tests that compare two ways to the same weights.

Adam divides a gradient by its own size. Where the gradient is near zero, its rounding, which differs between
processors, becomes a whole step. With a large epsilon the optimizer and its state are the same, and its steps differ
only as much as the gradients do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from asyncrl.learner.optimizer.update import make_optimizer
from asyncrl.schema import LearnerConfig
from tests.learner.fed_replay import largest_difference

MAKER = "asyncrl.learner.roles.make_optimizer"
"""The function that `make_smooth_optimizer` replaces."""
RATE = 0.1
"""Learning rate for the smooth optimizer: gradients are small compared with its epsilon of 1."""
EQUAL = 1e-3
"""Tolerance, as a share of the weights' movement. An error in one place of a gradient is far above it; float32 rounding
with other instructions made at most 1e-5."""


def make_smooth_optimizer(parameters: Iterable[nn.Parameter], config: LearnerConfig) -> torch.optim.AdamW:
    optimizer = make_optimizer(parameters, config)
    for group in optimizer.param_groups:
        group["eps"] = 1.0
    return optimizer


def apart(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]
) -> float:
    """Return the largest difference between two results, as a share of the largest movement from `start` to `one`."""
    return largest_difference(one, other) / largest_difference(start, one)
