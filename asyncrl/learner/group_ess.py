"""Effective sample size of a group's importance weights: what the replay needs to know to use old groups again by what
they still say (`replay.order=ess`), and only the learner can measure.

    ESS / n = (sum_t r_t)^2 / (n sum_t r_t^2),   r_t = pi_theta(t) / mu(t)      (Kish)

over the n fresh tokens of a group, of the raw ratios of the forward that the step trains by, at the weights before its
update. 1: the policy is still the one that sampled the group; 1 / n: a single token has all the weight.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncrl.losses import LossInputs
from asyncrl.losses.ratios import LOG_RATIO_LIMIT

Weights = dict[str, tuple[float, ...]]
"""Position of a group in the step's plan, as text -> (sum of ratios, of their squares, tokens)."""


@torch.no_grad()
def group_weights(inputs: LossInputs) -> Weights:
    """Of the groups of a micro-batch."""
    assert inputs.group_ids is not None
    chosen = inputs.loss_mask
    log_ratio = (inputs.learner_logprobs - inputs.behavior_logprobs)[chosen].double()
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    groups, place = inputs.group_ids[chosen].unique(return_inverse=True)
    terms = torch.stack([ratio, ratio.square(), torch.ones_like(ratio)], dim=1)
    table = terms.new_zeros(len(groups), 3).index_add(0, place, terms).tolist()
    return {str(group): (row[0], row[1], row[2]) for group, row in zip(groups.tolist(), table, strict=True)}


def ess_of_groups(weights: Mapping[str, tuple[float, ...]], groups: int) -> tuple[float, ...]:
    """[G] shares from 0 to 1 of the groups of a plan; 1 where no token was trained."""
    shares = []
    for place in range(groups):
        total, squares, tokens = weights.get(str(place), (0.0, 0.0, 0.0))
        shares.append(min(1.0, total**2 / (tokens * squares)) if squares > 0 else 1.0)
    return tuple(shares)
