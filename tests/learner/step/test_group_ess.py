"""The effective sample size that the learner reports of each group: against numpy, split anyhow, with bad numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from asyncrl.learner.step.group_ess import ess_of_groups, group_weights
from asyncrl.learner.step.metrics import Measured, Told
from asyncrl.losses import LossInputs
from asyncrl.losses.diagnostics import Sums

GROUPS, TOKENS = 5, 400


def some_inputs() -> LossInputs:
    """Tokens of groups 0 to 3; of group 4 none is in the loss."""
    noise = torch.Generator().manual_seed(7)
    groups = torch.randint(0, GROUPS, (TOKENS,), generator=noise)
    behavior = -torch.rand(TOKENS, generator=noise, dtype=torch.float64)
    spread = 0.2 * (1 + groups)
    return LossInputs(
        learner_logprobs=behavior + spread * torch.randn(TOKENS, generator=noise, dtype=torch.float64),
        behavior_logprobs=behavior,
        advantages=torch.zeros(TOKENS),
        loss_mask=(torch.rand(TOKENS, generator=noise) < 0.7) & (groups != 4),
        sequence_ids=torch.zeros(TOKENS, dtype=torch.long),
        group_ids=groups,
        staleness=torch.zeros(TOKENS, dtype=torch.long),
        group_tokens=torch.ones(TOKENS),
    )


def part(inputs: LossInputs, chosen: slice) -> LossInputs:
    names = ("learner_logprobs", "behavior_logprobs", "advantages", "loss_mask", "sequence_ids", "group_ids")
    names += ("staleness", "group_tokens")
    return replace(inputs, **{name: getattr(inputs, name)[chosen] for name in names})


@pytest.mark.parametrize("edges", [[0, TOKENS], [0, 1, 130, TOKENS]])
def test_it_is_kish_s_over_the_tokens_of_a_group_however_they_are_split(edges: list[int]) -> None:
    inputs, together = some_inputs(), Measured()
    for start, stop in pairwise(edges):
        together.add(Measured.of(Told(Sums(), {}, group_weights(part(inputs, slice(start, stop)), range(GROUPS)))))
    found = ess_of_groups(together.group_weights, GROUPS)
    ratio = np.exp(inputs.learner_logprobs.numpy() - inputs.behavior_logprobs.numpy())
    for group in range(4):
        own = ratio[(inputs.group_ids == group).numpy() & inputs.loss_mask.numpy()]
        assert found[group] == pytest.approx(own.sum() ** 2 / (len(own) * (own**2).sum()), rel=1e-9)
    assert found[4] == 1.0 and found[0] > found[3]
    assert together.row() == {}, "they are no metrics"


def test_a_step_whose_numbers_are_not_finite_reports_something_that_can_be_used() -> None:
    inputs = some_inputs()
    bad = replace(inputs, learner_logprobs=torch.full_like(inputs.learner_logprobs, float("nan")))
    weights = Measured.of(Told(Sums(), {}, group_weights(bad, range(GROUPS)))).group_weights
    assert ess_of_groups(weights, GROUPS) == (1.0,) * GROUPS
