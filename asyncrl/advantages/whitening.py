"""Whitening over the sampled tokens, in the conventions of several projects, also over several ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Whitening:
    """(x - mean) * scale, where scale is 1/sqrt(max(var, floor)), 1/sqrt(var + inside) or 1/(sqrt(var) + outside)."""

    ddof: int
    floor: float = 0.0
    inside: float = 0.0
    outside: float = 0.0

    def scale(self, variance: Tensor) -> Tensor:
        return 1.0 / ((variance.clamp(min=self.floor) + self.inside).sqrt() + self.outside)


WHITENINGS = {
    "ddof0": Whitening(ddof=0, floor=1e-8),
    "ddof1": Whitening(ddof=1, inside=1e-8),
    "areal": Whitening(ddof=0, outside=1e-5),
}
"""`ddof0`: OpenRLHF, NeMo-RL; `ddof1`: verl, TRL, SkyRL, slime; `areal`: AReaL's masked normalisation."""


@torch.no_grad()
def whitening_moments(values: Float[Tensor, "B T"], mask: Tensor) -> Float[Tensor, " moments"]:
    """(count, sum, sum of squares) over the mask, float64. Sum them over all ranks, then pass them to `masked_whiten`.

    float64, because the variance is a difference of the last two: in float32 it would be lost next to a large mean.
    """
    inside = mask.bool()
    kept = torch.where(inside, values, torch.zeros_like(values)).double()
    return torch.stack([inside.sum().double(), kept.sum(), kept.square().sum()])


@torch.no_grad()
def masked_whiten(
    values: Float[Tensor, "B T"],
    mask: Tensor,
    convention: str = "ddof0",
    moments: Float[Tensor, " moments"] | None = None,
) -> Float[Tensor, "B T"]:
    """Zero mean and unit variance over the tokens in the mask; 0 outside it.

    Args:
        values, mask: [B, T].
        convention: one of `WHITENINGS`. With too few tokens for a variance all results are 0.
        moments: `whitening_moments` summed over ranks; None uses those of `values`.

    Raises:
        ConfigError: unknown convention.
    """
    if convention not in WHITENINGS:
        raise ConfigError(f"the whitening must be one of {', '.join(WHITENINGS)}; got {convention!r}")
    rule, inside = WHITENINGS[convention], mask.bool()
    count, total, squares = (whitening_moments(values, mask) if moments is None else moments).unbind()
    mean = total / count.clamp(min=1)
    variance = (squares - count * mean.square()).clamp(min=0) / (count - rule.ddof).clamp(min=1)
    whitened = (values.double() - mean) * rule.scale(variance)
    return torch.where(inside & (count > rule.ddof), whitened, 0.0).to(values.dtype)
