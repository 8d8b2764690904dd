"""KL to the reference policy: estimators from the sampled token's log-probs, and the adaptive coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.losses.ratios import LOG_RATIO_LIMIT

ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+")
ROUNDING = 1e-4
"""Differences of log-probs up to this are rounding of float32 (1e-6 for a model of 149 k parameters), not pulled back:
where no token has an advantage, they are the whole gradient, and Adam scales any gradient up to full steps."""


def without_rounding(learner: Float[Tensor, "*shape"], other: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The learner's log-probs, but the other ones, without gradient, where both differ by rounding. NaN stays NaN."""
    return torch.where((learner - other).detach().abs() <= ROUNDING, other.detach(), learner)


def kl_estimate(learner: Float[Tensor, " T"], ref: Float[Tensor, " T"], kind: str) -> Float[Tensor, " T"]:
    """Estimate of KL(learner || ref) per token.

    `k1` log-ratio, `k2` half its square, `k3` exp(ref-learner) - (ref-learner) - 1 (never negative), `abs`; `k1+` and
    `k3+` have that value with the gradient of k2, which is the gradient of the KL (those of k1 and k3 are not).

    Raises:
        ConfigError: unknown kind.
    """
    if kind not in ESTIMATORS:
        raise ConfigError(f"the KL estimator must be one of {', '.join(ESTIMATORS)}; got {kind!r}")
    if kind.endswith("+"):
        gradient = kl_estimate(learner, ref, "k2")
        return gradient - gradient.detach() + kl_estimate(learner, ref, kind[:-1]).detach()
    difference = learner - ref
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "abs":
        return difference.abs()
    back = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return back.exp() - back - 1


@dataclass(frozen=True, slots=True)
class AdaptiveKL:
    """Adapts a KL coefficient to a target (Ziegler et al. 1909.08593), as in verl, SkyRL and OpenRLHF."""

    target: float
    """Target KL to the reference, in the unit of `adapted`'s argument: per sequence as in the paper, or per token."""
    horizon: float
    """Number of samples over which an error of 20 % changes the coefficient by 20 %."""

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ConfigError(f"an adaptive KL needs target and horizon above 0; got {self.target} and {self.horizon}")

    def adapted(self, coefficient: float, kl: float, samples: int | float) -> float:
        """The coefficient multiplied by 1 + clip(kl/target - 1, -0.2, 0.2) * samples / horizon.

        Args:
            kl: KL measured in this step; a non-finite one changes nothing.
            samples: sequences of the step (or tokens, if `horizon` counts those).
        """
        if not math.isfinite(kl):
            return coefficient
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        # With more samples than five horizons below the target it would become negative: a reward for diverging.
        return coefficient * max(1.0 + error * samples / self.horizon, 0.0)
