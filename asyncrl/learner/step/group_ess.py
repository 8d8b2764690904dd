"""Effective sample size of a group's importance weights. The replay server uses it to sample old groups again by how
informative they still are (`replay.order=ess`); only the learner can measure it.

    ESS / n = (sum_t r_t)^2 / (n sum_t r_t^2),   r_t = pi_theta(t) / mu(t)      (Kish)

over the n fresh tokens of a group, with the raw ratios of the training forward, at the weights before the update. 1:
the policy is still the one that sampled the group; 1 / n: a single token has all the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from asyncrl.losses import LossInputs
from asyncrl.losses.ratios import LOG_RATIO_LIMIT


@torch.no_grad()
def group_weights(inputs: LossInputs, groups: Iterable[int]) -> dict[str, Tensor]:
    """Map the position of a group in the step's plan, as text, to float64 [3]: sums of ratios, of their squares,
    tokens.

    Args:
        groups: the groups of the micro-batch.
    """
    assert inputs.group_ids is not None
    here, chosen = sorted(set(groups)), inputs.loss_mask
    log_ratio = (inputs.learner_logprobs - inputs.behavior_logprobs).double()
    ratio = torch.where(chosen, log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), 0.0)
    terms = torch.stack([ratio, ratio.square(), chosen.double()], dim=1)
    table = terms.new_zeros(max(here, default=0) + 1, 3).index_add(0, inputs.group_ids, terms)
    return {str(group): table[group] for group in here}


def ess_of_groups(weights: Mapping[str, tuple[float, ...]], groups: int) -> tuple[float, ...]:
    """[G] ESS / n, from 0 to 1, of the groups of a plan; 1 for a group without a trained token."""
    shares = []
    for place in range(groups):
        total, squares, tokens = weights.get(str(place), (0.0, 0.0, 0.0))
        shares.append(min(1.0, total**2 / (tokens * squares)) if squares > 0 else 1.0)
    return tuple(shares)
