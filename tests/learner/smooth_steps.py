"""Steps as exact as the gradients, for tests that compare two ways to the same weights.

Adam divides a gradient by its own size: where it is near zero, its rounding, which differs between processors, becomes
a whole step. With a large epsilon it is the same optimizer with the same state, and its steps differ as gradients do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from asyncrl.learner.optimizer.update import make_optimizer
from asyncrl.schema import LearnerConfig
from tests.learner.fed_replay import largest_difference

MAKER = "asyncrl.learner.roles.make_optimizer"
"""What `make_smooth_optimizer` takes the place of."""
RATE = 0.1
"""A learning rate for it: gradients are small beside its epsilon of 1."""
EQUAL = 1e-3
"""Of the way that the weights went. A gradient that is wrong in one place is far above it; what rounding in float32 did
with other instructions was at most 1e-5."""


def make_smooth_optimizer(parameters: Iterable[nn.Parameter], config: LearnerConfig) -> torch.optim.AdamW:
    optimizer = make_optimizer(parameters, config)
    for group in optimizer.param_groups:
        group["eps"] = 1.0
    return optimizer


def apart(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]
) -> float:
    """Largest difference between two ends, as a share of the way from `start` to the first."""
    return largest_difference(one, other) / largest_difference(start, one)
