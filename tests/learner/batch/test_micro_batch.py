from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.errors import LedgerError
from asyncrl.learner.batch.micro_batch import MicroBatch, pack
from asyncrl.learner.batch.plan import Budget, Member, plan_minibatches
from asyncrl.learner.model.attention import PACKED_ATTENTION
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.replay.protocol import Lease
from tests.learner.feed import FAMILIES, make_lease, make_step, tiny_model

CPU = torch.device("cpu")


def packed_step(seed: int, budget: int = 80) -> tuple[Lease, list[tuple[tuple[Member, ...], MicroBatch]]]:
    plan, groups = make_step(seed, groups=5)
    lease = make_lease(plan, groups)
    minibatches = plan_minibatches(plan, rank=0, updates=2, budget=Budget(tokens=budget, attention=4 * budget))
    micro_batches = [members for minibatch in minibatches for members in minibatch.micro_batches]
    return lease, [(members, pack(lease, members, CPU)) for members in micro_batches]


@pytest.mark.parametrize("seed", range(5))
def test_every_fresh_token_is_packed_exactly_once_with_its_own_values(seed: int):
    lease, micro_batches = packed_step(seed)
    plan = lease.plan
    seen: dict[Member, int] = {}
    for members, batch in micro_batches:
        for i, (g, t) in enumerate(members):
            trajectory = lease.trajectories[g, t]
            ages = np.array([plan.staleness.get(int(version), 0) for version in trajectory.policy_versions])
            fresh = trajectory.loss_mask & (ages <= plan.max_staleness)
            mine = (batch.sequence_ids == i) & batch.loss_mask
            assert batch.input_ids[mine].tolist() == trajectory.token_ids[fresh].tolist()
            assert batch.behavior_logprobs[mine].tolist() == trajectory.behavior_logprobs[fresh].tolist()
            assert batch.staleness[mine].tolist() == ages[fresh].tolist()
            assert batch.position_ids[mine].tolist() == np.flatnonzero(fresh).tolist()
            assert set(batch.group_ids[mine].tolist()) == {g}
            seen[g, t] = seen.get((g, t), 0) + int(mine.sum())
    assert seen == {
        (g, t): plan.fresh_tokens(trajectory)
        for g, group in enumerate(plan.groups)
        for t, trajectory in enumerate(group.trajectories)
        if plan.fresh_tokens(trajectory)
    }


def test_siblings_share_their_prompt():
    lease, micro_batches = packed_step(0, budget=10_000)
    for members, batch in micro_batches:
        completions = sum(len(lease.trajectories[m].token_ids) - lease.trajectories[m].prompt_length for m in members)
        prompts = {g: lease.trajectories[g, t].prompt_length for g, t in members}
        assert len(batch.input_ids) == completions + sum(prompts.values())


def test_siblings_with_different_prompts_share_nothing():
    lease, _ = packed_step(0)
    members = [member for member in lease.trajectories if member[0] == 0][:2]
    odd = lease.trajectories[members[1]]
    tokens = odd.token_ids.copy()
    tokens[0] += 1
    lease.trajectories[members[1]] = replace(odd, token_ids=tokens)
    batch = pack(lease, members, CPU)
    assert len(batch.input_ids) == sum(len(lease.trajectories[member].token_ids) for member in members)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_a_pack_equal_those_of_each_sequence_alone(family: str):
    lease, micro_batches = packed_step(1)
    hf, alone = tiny_model(family), tiny_model(family)
    hf.set_attn_implementation(PACKED_ATTENTION)
    model = PolicyModel(hf)
    for members, batch in micro_batches:
        logprobs, entropy = model(batch, 0.7)
        for i, member in enumerate(members):
            ids = torch.from_numpy(lease.trajectories[member].token_ids).long()
            table = (alone(input_ids=ids[None]).logits[0, :-1] / 0.7).log_softmax(-1)
            mine = (batch.sequence_ids == i) & batch.loss_mask
            at = batch.position_ids[mine] - 1
            expected = table[at].gather(-1, ids[at + 1, None])[:, 0]
            torch.testing.assert_close(logprobs[mine], expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(entropy[mine], -(table[at].exp() * table[at]).sum(-1), atol=1e-5, rtol=1e-5)


def test_a_rank_without_trajectories_contributes_exactly_nothing():
    lease, _ = packed_step(0)
    batch = pack(lease, (), CPU)
    hf = tiny_model()
    hf.set_attn_implementation(PACKED_ATTENTION)
    model = PolicyModel(hf)
    logprobs, _ = model(batch, 1.0)
    logprobs.sum().backward()
    assert not batch.loss_mask.any()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_arrays_that_contradict_their_header_are_refused():
    lease, [(members, _), *_] = packed_step(0)
    first = lease.trajectories[members[0]]
    lease.trajectories[members[0]] = replace(first, loss_mask=np.zeros_like(first.loss_mask))
    with pytest.raises(LedgerError, match="headers announced"):
        pack(lease, members, CPU)
