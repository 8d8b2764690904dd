"""The proximal policy as a moving average of the learner: PPO-EWMA's anchor (2110.00641)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from asyncrl.errors import ConfigError


@torch.no_grad()
def ema_update(average: Iterable[Tensor], current: Iterable[Tensor], decay: float) -> None:
    """average <- decay * average + (1 - decay) * current, in place, parameter by parameter.

    Call it after every optimizer step; the average then lags by about decay / (1 - decay) steps. Weights are averaged,
    not log-probs. The average starts as a copy of the initial policy, so no bias correction is needed.

    Args:
        average, current: parameters of the two models in the same order, plain or sharded alike. `average` must be in
            float32, because changes smaller than its rounding would be lost.
        decay: in [0, 1); 0 makes the average the current policy.

    Raises:
        ConfigError: decay out of range.
        ValueError: the two have different numbers of parameters.
    """
    if not 0.0 <= decay < 1.0:
        raise ConfigError(f"the decay of the averaged policy must be at least 0 and below 1; got {decay}")
    for kept, new in zip(average, current, strict=True):
        kept.mul_(decay).add_(new.detach().to(kept.dtype), alpha=1.0 - decay)
