from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.engines.hf.sampling import sample
from asyncrl.engines.noise import mix, mixes, uniforms


def test_uniforms_are_uniform_and_independent_of_their_neighbours():
    keys = np.array([mix(seed, member) for seed in range(200) for member in range(50)], np.uint64)
    draws = uniforms(keys, np.full(len(keys), 3))
    assert draws.min() >= 0 and draws.max() < 1
    histogram = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert np.abs(histogram - 500).max() < 120
    alone = uniforms(keys[7:8], np.array([3]))
    assert alone[0] == draws[7]
    assert abs(np.corrcoef(draws, uniforms(keys, np.full(len(keys), 4)))[0, 1]) < 0.05


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, 2**64 + 3])
def test_keys_of_siblings_made_at_once_are_those_made_one_by_one(seed: int):
    assert mixes(seed, 9).tolist() == [mix(seed, member) for member in range(9)]


def test_a_token_of_probability_zero_is_never_drawn_at_the_ends_of_the_interval():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(3, 1)
    uniform = torch.tensor([0.0, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs, _ = sample(logits, torch.ones(3), uniform, False)
    assert tokens.tolist() == [1, 3, 3]
    torch.testing.assert_close(logprobs, torch.full((3,), 0.5).log())


def test_greedy_and_sampled_rows_share_a_batch():
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    tokens, logprobs, _ = sample(logits, torch.tensor([0.0, 2.0]), torch.tensor([0.99, 0.999999]).double(), True)
    assert tokens.tolist() == [1, 2]
    torch.testing.assert_close(logprobs[0], torch.log_softmax(logits[0], -1)[1])
    torch.testing.assert_close(logprobs[1], torch.log_softmax(logits[1] / 2, -1)[2])
