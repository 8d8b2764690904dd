"""Loss, advantages and hook of the user's own in the learner: right under every split, run by every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.advantages.custom import custom_advantages, try_advantages
from asyncrl.digests import learner_digest
from asyncrl.errors import AsyncRLError, ConfigError, UserCodeError
from asyncrl.learner.batch.micro_batch import pack
from asyncrl.learner.batch.plan import Budget, plan_minibatches
from asyncrl.learner.hook import Hook
from asyncrl.learner.roles import build_roles
from asyncrl.learner.step.gradients import accumulate, loss_inputs
from asyncrl.learner.step.targets import own_inputs, with_targets
from asyncrl.losses import LossConfig, policy_loss
from asyncrl.schema import AdvantageConfig, Config
from tests.learner.alone import train_alone
from tests.learner.fed_replay import FedReplay, KeptWeights
from tests.learner.feed import gradient, make_lease, make_step
from tests.learner.rank_process import train_on_ranks
from tests.learner.smooth_steps import EQUAL, RATE, apart
from tests.learner.tiny_config import tiny_config

CPU = torch.device("cpu")
MINE = """
import torch

def loss(inputs, power=0.5):
    # Of its own sequence: tokens late in an answer count less.
    place = torch.zeros_like(inputs.advantages)
    for sequence in inputs.sequence_ids.unique():
        here = (inputs.sequence_ids == sequence) & inputs.loss_mask
        place[here] = torch.arange(int(here.sum())).float()
    ratio = (inputs.learner_logprobs - inputs.behavior_logprobs).clamp(-20, 20).exp()
    return -inputs.advantages * ratio.clamp(max=3) / (1 + place) ** power

def median(inputs):
    found = torch.zeros_like(inputs.rewards)
    for group in inputs.group_ids.unique():
        here = inputs.group_ids == group
        found[here] = inputs.rewards[here] - inputs.rewards[here].median()
    return found

def fading(inputs):
    columns = torch.arange(int(inputs.lengths.max()))
    return median(inputs)[:, None] * 0.9 ** columns + inputs.lengths[:, None]

def in_place(inputs):
    found = fading(inputs)
    inputs.lengths.clamp_(max=1)
    inputs.rewards.sub_(1)
    return found

def drawn(inputs):
    return torch.rand(len(inputs.rewards))

def divides(inputs):
    spread = torch.stack([inputs.rewards[inputs.group_ids == g].std() for g in inputs.group_ids.unique()])
    return median(inputs) / spread[inputs.group_ids]

def short(inputs):
    return inputs.rewards[:-1]

def parted(inputs):
    return median(inputs) + inputs.reward_parts["form"]

async def later(inputs):
    return median(inputs)

class Later:
    async def __call__(self, update):
        return {"calls": 1}

class Halve:
    def __init__(self, step):
        self.step, self.calls = step, []
    def __call__(self, update):
        self.calls.append((update.moment, update.step, update.index, update.report is not None))
        if update.moment == "before":
            assert all(p.grad is not None for p in update.model.parameters())
            if update.step == self.step:
                for parameter in update.model.parameters():
                    parameter.grad.mul_(0)
        return {"calls": len(self.calls)}

def shifts(update):
    if update.moment == "after":
        with torch.no_grad():
            next(update.model.parameters()).add_(1e-3)

def fails(update):
    if update.moment == "after" and update.step == 1:
        update.model.no_such_thing
"""


def make_config(folder: Path, run: str = "run", **learner: object) -> Config:
    (folder / "mine.py").write_text(MINE)
    return tiny_config(
        folder,
        run,
        learner={"steps": 1, "lr": RATE} | learner,
        loss=LossConfig(preset="custom", function=f"{folder}/mine.py:loss", args={"power": 0.7}),
        advantage=own(folder, "median"),
    )


def own(folder: Path, name: str) -> AdvantageConfig:
    return AdvantageConfig(estimator="custom", baseline="none", function=f"{folder}/mine.py:{name}")


@pytest.mark.parametrize("advantage", ["median", "fading"])
def test_the_gradient_of_several_micro_batches_is_that_of_the_whole_batch(advantage: str, tmp_path: Path):
    config = make_config(tmp_path)
    config.advantage = own(tmp_path, advantage)
    config.loss.aggregation = "seq_mean_token_mean"
    plan, groups = make_step(4, groups=4, size=4)
    lease = make_lease(plan, groups)
    found, micro_batches = [], []
    for budget in (10_000, 60, 25):
        roles = build_roles(config, CPU, None)
        (minibatch,) = plan_minibatches(plan, rank=0, updates=1, budget=Budget(tokens=budget, attention=4 * budget))
        batches = [pack(lease, members, CPU) for members in minibatch.micro_batches]
        batches, _ = with_targets(plan, batches, config.advantage, 0.0, CPU)
        if not found:
            policy_loss(loss_inputs(config, roles.policy, batches[0]), config.loss).loss.backward()
            found.append(gradient(roles.policy))
            roles.policy.zero_grad()
        accumulate(config, roles.policy, batches, minibatch.denominators)
        found.append(gradient(roles.policy))
        micro_batches.append(len(batches))
    assert micro_batches[0] == 1 < micro_batches[1] < micro_batches[2]
    assert found[0].norm() > 0
    for other in found[1:]:
        torch.testing.assert_close(other / found[0].norm(), found[0] / found[0].norm(), atol=1e-6, rtol=0)


@pytest.mark.slow
def test_two_ranks_learn_the_same_as_one(tmp_path: Path):
    one, two = (train_on_ranks(make_config(tmp_path, f"ranks_{n}"), n) for n in (1, 2))
    assert apart(one, two, load_file(tmp_path / "ranks_1" / "first.safetensors")) < EQUAL


@pytest.mark.parametrize("name", ["fading", "in_place"])
def test_advantages_per_token_are_those_of_the_trained_ones(name: str, tmp_path: Path):
    """Over-age tokens come first and are not trained: the function's columns count all sampled tokens, and what it
    writes into its inputs changes nothing."""
    config = make_config(tmp_path)
    config.advantage = own(tmp_path, name)
    try_advantages(config.advantage)
    plan, groups = make_step(7, groups=3, size=2)
    lease = make_lease(plan, groups)
    members = sorted(place for shard in plan.shards for place in shard)
    (batch,), _ = with_targets(plan, [pack(lease, members, CPU)], config.advantage, 0.0, CPU)
    inputs = own_inputs(plan, {})
    assert (inputs.fresh < inputs.lengths).any() and (inputs.fresh > 0).any()
    table = custom_advantages(inputs, config.advantage)
    assert batch.advantages is not None
    places = [(g, t) for g, group in enumerate(plan.groups) for t in range(len(group.trajectories))]
    for row, member in enumerate(places):
        if member not in members:
            continue
        length, fresh = int(inputs.lengths[row]), int(inputs.fresh[row])
        here = batch.loss_mask & (batch.sequence_ids == batch.members.index(member))
        torch.testing.assert_close(
            batch.advantages[here], table[row, length - fresh : length].float(), msg=f"trajectory {member}"
        )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("drawn", "different advantages for the same step"),
        ("divides", "must be finite"),
        ("short", "[6]"),
        ("later", "is async, and the learner's step awaits nothing"),
    ],
)
def test_advantages_that_cannot_work_are_refused_before_a_run(name: str, said: str, tmp_path: Path):
    make_config(tmp_path)
    try_advantages(own(tmp_path, "median"))
    with pytest.raises(AsyncRLError) as error:
        try_advantages(own(tmp_path, name))
    assert said in str(error.value) and f"mine.py:{name}" in str(error.value)


def test_a_part_of_the_reward_that_is_not_there_says_how_to_ask_for_it(tmp_path: Path):
    make_config(tmp_path)
    with pytest.raises(UserCodeError, match=r"no 'form' \(it has: none\).*advantage\.components\.form=1"):
        try_advantages(own(tmp_path, "parted"))
    named = own(tmp_path, "parted")
    named.components = {"form": 1.0}
    try_advantages(named)


@pytest.mark.parametrize("name", ["later", "Later"])
def test_an_async_hook_is_refused_when_it_is_made(name: str, tmp_path: Path):
    config = make_config(tmp_path)
    config.learner.hook = f"{tmp_path}/mine.py:{name}"
    with pytest.raises(ConfigError, match=f"{name} is async"):
        Hook(config.learner, rank=0, world=1)


def test_the_hook_is_called_around_each_update_and_what_it_does_to_gradients_counts(tmp_path: Path):
    config = make_config(tmp_path, steps=2, groups_per_step=4, updates_per_batch=2)
    config.learner.hook, config.learner.hook_args = f"{tmp_path}/mine.py:Halve", {"step": 1}
    kept = KeptWeights()
    parts, rows = train_alone(config, FedReplay(groups=4, size=4), kept)
    assert parts.roles.hook is not None
    made = parts.roles.hook._call  # pyright: ignore[reportPrivateUsage]
    moments = [("before", False), ("after", True)]
    expected = [(moment, step, index, after) for step in (0, 1) for index in (0, 1) for moment, after in moments]
    assert made.calls == expected  # pyright: ignore[reportFunctionMemberAccess]
    last = rows.rows[-1]
    assert last["hook/calls"] == pytest.approx((6 + 8) / 2) and last["optim/grad_norm"] == 0.0


class ReadWeights(KeptWeights):
    """Reads them, as a copy beside training does, until somebody waits for that."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[str, torch.Tensor] = {}
        self.alike = list[bool]()

    def publish(self, policy_version, tensors, canary=None):
        self._live = dict(tensors)
        return super().publish(policy_version, self._live.items(), canary)

    def wait(self) -> float:
        live, self._live = self._live, {}
        if live:
            self.alike.append(all(torch.equal(tensor, self.newest[name]) for name, tensor in live.items()))
        return 0.0


def test_what_the_hook_writes_after_a_skipped_step_is_not_in_the_version_before(tmp_path: Path):
    config = make_config(tmp_path, steps=3, groups_per_step=4)
    config.learner.hook, config.loss, config.advantage = f"{tmp_path}/mine.py:shifts", LossConfig(), AdvantageConfig()
    replay, kept = FedReplay(groups=4, size=4), ReadWeights()
    replay.poisoned = {1}
    _, rows = train_alone(config, replay, kept)
    assert [row["optim/nonfinite_steps"] for row in rows.rows] == [0, 1, 1]
    assert kept.versions == [0, 1, 2, 3] and kept.alike == [True] * 4


def test_an_error_of_the_hook_names_setting_moment_and_line(tmp_path: Path):
    config = make_config(tmp_path, steps=3, groups_per_step=4)
    config.learner.hook = f"{tmp_path}/mine.py:fails"
    with pytest.raises(UserCodeError, match=r"fails, after update 0 of step 1 raised AttributeError.*line \d+"):
        train_alone(config, FedReplay(groups=4, size=4), KeptWeights())


def test_a_changed_file_is_another_learner(tmp_path: Path):
    config = make_config(tmp_path)
    before = learner_digest(config)
    (tmp_path / "mine.py").write_text(MINE.replace("max=3", "max=4"))
    assert learner_digest(config) != before
