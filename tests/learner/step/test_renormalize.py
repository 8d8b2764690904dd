"""Losses that divide by what they keep: the loop's gradient is that of the pure function on the whole batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.learner.batch.micro_batch import pack
from asyncrl.learner.batch.plan import Budget, plan_minibatches
from asyncrl.learner.roles import build_roles
from asyncrl.learner.step.gradients import accumulate, loss_inputs
from asyncrl.learner.step.targets import with_targets
from asyncrl.losses import LossConfig, policy_loss, preset
from asyncrl.schema import Config
from tests.learner.feed import gradient, make_lease, make_step
from tests.learner.rank_process import train_on_ranks
from tests.learner.smooth_steps import EQUAL, RATE, apart
from tests.learner.tiny_config import tiny_config

CPU = torch.device("cpu")
LOSSES = {
    "geo_rs": preset("geo_rs", weight_low=0.3, weight_high=3.0),
    "m2po_areal": preset("m2po_areal", m2_tau=2.0),
    "by_sequence": preset("geo_rs", weight_low=0.3, weight_high=3.0, aggregation="seq_mean_token_mean"),
    "by_prompt": preset("m2po_areal", m2_tau=2.0, aggregation="prompt_mean"),
    "of_tokens": preset("ppo", reject="ratio", reject_low=0.2, reject_high=5.0, denominator="renormalize"),
}
"""Bounds that leave some tokens out, and not all, of made-up log-probs."""
OF_ALL = {
    "m2po_paper": preset("m2po_paper", m2_tau=0.5),
    "m2po_release": preset("m2po_release", m2_tau=0.5),
    "m2po_areal": preset("m2po_areal", m2_tau=0.5, denominator="keep"),
    "self_normalize": preset("ppo", weight="self_normalize", weight_high=1.5),
}
"""They look at all tokens, and divide by all."""


def make_config(folder: Path, loss: LossConfig, run: str = "run", budget: int = 60) -> Config:
    return tiny_config(folder, run, learner={"steps": 1, "lr": RATE, "max_tokens_per_microbatch": budget}, loss=loss)


@pytest.mark.parametrize("name", OF_ALL)
def test_what_a_loss_asks_of_all_tokens_is_asked_of_those_of_all_micro_batches(name: str, tmp_path: Path):
    config = make_config(tmp_path, OF_ALL[name])
    plan, groups = make_step(4, groups=4, size=4)
    lease = make_lease(plan, groups)
    roles = build_roles(config, CPU, None)
    found, apart_each = [], torch.zeros(0)
    for budget in (10_000, 25):
        (minibatch,) = plan_minibatches(plan, rank=0, updates=1, budget=Budget(tokens=budget, attention=4 * budget))
        batches = [pack(lease, members, CPU) for members in minibatch.micro_batches]
        batches, _ = with_targets(plan, batches, config.advantage, 0.0, CPU)
        accumulate(config, roles.policy, batches, minibatch.denominators)
        found.append(gradient(roles.policy))
        roles.policy.zero_grad()
        for batch in batches:  # as it was: each by itself
            policy_loss(loss_inputs(config, roles.policy, batch), config.loss, minibatch.denominators).loss.backward()
        apart_each = gradient(roles.policy)
        roles.policy.zero_grad()
    norm = found[0].norm()
    torch.testing.assert_close(found[1] / norm, found[0] / norm, atol=1e-6, rtol=0)
    assert (apart_each - found[0]).norm() > 0.001 * norm, "the statistic of a micro-batch would do as well"


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_several_micro_batches_is_that_of_the_whole_batch(name: str, tmp_path: Path):
    config = make_config(tmp_path, LOSSES[name])
    plan, groups = make_step(4, groups=4, size=4)
    lease = make_lease(plan, groups)
    found, micro_batches = [], []
    for budget in (10_000, 60, 25):
        roles = build_roles(config, CPU, None)
        (minibatch,) = plan_minibatches(plan, rank=0, updates=1, budget=Budget(tokens=budget, attention=4 * budget))
        batches = [pack(lease, members, CPU) for members in minibatch.micro_batches]
        batches, _ = with_targets(plan, batches, config.advantage, 0.0, CPU)
        if not found:
            inputs = loss_inputs(config, roles.policy, batches[0])
            out = policy_loss(inputs, config.loss)
            out.loss.backward()
            found.append(gradient(roles.policy))
            roles.policy.zero_grad()
            everything = policy_loss(loss_inputs(config, roles.policy, batches[0]), keeping(config.loss))
            everything.loss.backward()
            assert not torch.allclose(gradient(roles.policy), found[0], rtol=0.02)  # the denominator matters here
            roles.policy.zero_grad()
        accumulate(config, roles.policy, batches, minibatch.denominators)
        found.append(gradient(roles.policy))
        micro_batches.append(len(batches))
    assert micro_batches[0] == 1 < micro_batches[1] < micro_batches[2]
    assert found[0].norm() > 0
    for other in found[1:]:
        torch.testing.assert_close(other / found[0].norm(), found[0] / found[0].norm(), atol=1e-6, rtol=0)


def keeping(loss: LossConfig) -> LossConfig:
    return replace(loss, denominator="keep")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["geo_rs", "m2po_areal"])
def test_two_ranks_learn_the_same_as_one(name: str, tmp_path: Path):
    one, two = (train_on_ranks(make_config(tmp_path, LOSSES[name], f"ranks_{n}"), n) for n in (1, 2))
    assert apart(one, two, load_file(tmp_path / "ranks_1" / "first.safetensors")) < EQUAL
