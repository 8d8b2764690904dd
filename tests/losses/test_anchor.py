from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.losses.anchor import ema_update


def test_the_average_is_the_weighted_sum_of_all_policies_so_far() -> None:
    rng = np.random.default_rng(0)
    policies = rng.standard_normal((6, 4))
    average = torch.tensor(policies[0])
    for policy in policies[1:]:
        ema_update([average], [torch.tensor(policy, requires_grad=True)], 0.8)
    weights = np.array([0.8**5, *(0.2 * 0.8**k for k in (4, 3, 2, 1, 0))])
    np.testing.assert_allclose(average.numpy(), weights @ policies)


def test_bfloat16_policies_are_averaged_in_float32_without_losing_small_steps() -> None:
    average = torch.ones(3)
    for _ in range(100):
        ema_update([average], [torch.full((3,), 1.0078125, dtype=torch.bfloat16)], 0.999)
    assert average.dtype == torch.float32
    assert average[0].item() == pytest.approx(1 + 0.0078125 * (1 - 0.999**100), rel=1e-4)


def test_a_decay_out_of_range_or_another_number_of_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"below 1; got 1\.0"):
        ema_update([torch.ones(1)], [torch.ones(1)], 1.0)
    with pytest.raises(ValueError, match="argument 2"):
        ema_update([torch.ones(1), torch.ones(1)], [torch.ones(1)], 0.5)
