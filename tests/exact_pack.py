"""Score completions of an engine by a learner's model, packed as in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.learner.batch.micro_batch import MicroBatch, pack
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.replay.protocol import Lease
from asyncrl.types import NO_VERSION, Completion, StepPlan, Trajectory, TrajectoryGroup
from tests.engines.models import VOCABULARY
from tests.learner.feed import header_of


@dataclass(frozen=True)
class Sibling:
    prompt: NDArray[np.int32]
    completion: Completion

    @classmethod
    def drawn(cls, prompt: NDArray[np.int32], length: int, seed: int) -> Sibling:
        """Return a sibling of random tokens that no engine sampled."""
        ids = np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)
        nothing = np.zeros(length, np.float32)
        versions = np.zeros(length, np.int32)
        done = Completion(token_ids=ids, logprobs=nothing, policy_versions=versions, finish_reason="stop")
        return cls(prompt, done)

    def trajectory(self) -> Trajectory:
        before, done = np.zeros(len(self.prompt)), self.completion
        return Trajectory(
            token_ids=np.concatenate([self.prompt, done.token_ids]).astype(np.int32),
            loss_mask=np.concatenate([before, np.ones(len(done.token_ids))]).astype(bool),
            behavior_logprobs=np.concatenate([before, done.logprobs]).astype(np.float32),
            policy_versions=np.concatenate([before + NO_VERSION, done.policy_versions]).astype(np.int32),
            reward=0.0,
            extras=dict(done.recorded),
        )


def packed(siblings: Sequence[Sibling], *, topk: bool = False) -> MicroBatch:
    """Return one micro-batch of the siblings. Adjacent siblings of the same prompt share it."""
    runs = [list(run) for _, run in groupby(siblings, key=lambda each: each.prompt.tobytes())]
    groups = [
        TrajectoryGroup(
            group_id=place,
            prompt_index=place,
            attempt=0,
            worker="w",
            trajectories=tuple(each.trajectory() for each in run),
        )
        for place, run in enumerate(runs)
    ]
    members = tuple((g, t) for g, group in enumerate(groups) for t in range(len(group.trajectories)))
    versions = {int(version) for each in siblings for version in each.completion.policy_versions}
    plan = StepPlan(
        step=0,
        policy_version=max(versions),
        groups=tuple(header_of(group) for group in groups),
        staleness={version: max(versions) - version for version in versions},
        max_staleness=9,
        shards=(members,),
    )
    lease = Lease(plan=plan, trajectories={(g, t): groups[g].trajectories[t] for g, t in members}, samples=())
    return pack(lease, members, torch.device("cpu"), topk=topk)


def scored_by_learner(
    policy: PolicyModel, siblings: Sequence[Sibling], temperature: float, *, tensors: bool = False
) -> list[Any]:
    """Return the [N] log-probs of each sibling's tokens by the forward of training.

    Args:
        tensors: return tensors that can be differentiated, not arrays.
    """
    batch = packed(siblings)
    found = _forward(policy, batch, temperature, None)[0][batch.loss_positions]
    parts = found.split([len(each.completion.token_ids) for each in siblings])
    return list(parts) if tensors else [part.detach().numpy() for part in parts]


def likeliest_by_learner(policy: PolicyModel, siblings: Sequence[Sibling], temperature: float) -> list[Any]:
    """Return, for each sibling, the [N, k] log-probs of the likeliest tokens that the engine recorded."""
    batch = packed(siblings, topk=True)
    found = _forward(policy, batch, temperature, batch.topk_ids)[2].detach()
    return [part.numpy() for part in found.split([len(each.completion.token_ids) for each in siblings])]


def _forward(policy: PolicyModel, batch: MicroBatch, temperature: float, candidates: Any) -> tuple[Any, ...]:
    return policy(batch, temperature, batch.support, candidates)
