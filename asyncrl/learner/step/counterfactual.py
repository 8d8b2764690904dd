"""Off-policy estimates from a batch of old data, for weights that have not been trained on it yet: in a rerun nothing
is generated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from asyncrl.learner.batch.micro_batch import MicroBatch, pack
from asyncrl.learner.batch.plan import Budget, plan_minibatches
from asyncrl.learner.model.packed import Layout
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.parallel.collectives import sum_over_data
from asyncrl.learner.step.scoring import score
from asyncrl.replay.protocol import LearnerReplay, Lease
from asyncrl.schema import Config
from asyncrl.weights.base import Canary, PublishStats

MAX_LOG_WEIGHT = 300.0
"""Limit on the log-weight of one trajectory; `exp` of more would leave the others no significant digit."""


class Probe:
    """A `Publisher` that publishes nothing: it evaluates the next batch with the weights of each version.

    `rerun/reward_of_data`    mean reward of that batch, which the original run's policy generated
    `rerun/reward_estimate`   the same for the current policy: rewards weighted by pi/mu of each trajectory, normalised
    `rerun/ess`               effective sample size of those weights, as a fraction; near 0 the estimate is meaningless
    `rerun/log_ratio`         mean log(pi/mu) per token: how likely the data is under the current policy
    """

    def __init__(
        self,
        config: Config,
        policy: PolicyModel,
        replay: LearnerReplay,
        *,
        rank: int,
        world: int,
        device: torch.device,
    ) -> None:
        self._config, self._policy, self._replay = config, policy, replay
        self._rank, self._world, self._device = rank, world, device
        self._row: dict[str, float] = {}

    def publish(
        self, policy_version: int, tensors: Iterable[tuple[str, Tensor]], canary: Canary | None = None
    ) -> PublishStats:
        """Evaluate the next batch. Collective. A rerun's versions count its steps: batch `policy_version` is next."""
        self._row = {}
        if policy_version < self._config.learner.steps:
            lease = self._replay.lease(step=policy_version, rank=self._rank, world=self._world, wait_s=0.0)
            self._row = self._look(lease)
        return PublishStats(wait_previous_s=0.0, nbytes=0)

    meets = False

    def wait_sent(self) -> float:
        return 0.0

    def wait(self) -> float:
        return 0.0

    def serve(self) -> None:
        return

    def stats(self) -> dict[str, float]:
        return self._row

    def close(self, *, failed: bool = False) -> None:
        return

    @torch.no_grad()
    def _look(self, lease: Lease) -> dict[str, float]:
        budget = Budget.of(self._config.learner)
        sums = torch.zeros(len(SUMS), dtype=torch.float64)
        in_rows = self._policy.layout is Layout.ROWS
        for minibatch in plan_minibatches(lease.plan, rank=self._rank, updates=1, budget=budget, in_rows=in_rows):
            for members in minibatch.micro_batches:
                batch = pack(lease, members, self._device, routers=self._policy.routers)
                logprobs, _ = score(self._config, self._policy, batch)  # of empty ones too: the forward is collective
                rewards = [lease.plan.groups[g].trajectories[t].reward for g, t in members]
                sums += batch_sums(sequence_log_ratios(batch, logprobs, len(members)), rewards, batch)
        self._policy.settle()
        return estimates(sum_over_data(sums, self._device))


SUMS = ("weights", "squares", "weighted_rewards", "rewards", "trajectories", "log_ratios", "tokens")


def sequence_log_ratios(batch: MicroBatch, logprobs: Tensor, count: int) -> Tensor:
    """[B] log(pi/mu) of each of `count` trajectories: the sum over its loss tokens."""
    places = batch.loss_positions
    recorded = batch.behavior_logprobs[places]
    # As in the losses: a log-prob that was not recorded counts with a ratio of 1.
    ratios = torch.where(recorded.isfinite(), logprobs[places] - recorded, 0.0).double()
    return ratios.new_zeros(count).index_add_(0, batch.sequence_ids[places], ratios).cpu()


def batch_sums(log_ratios: Tensor, rewards: Sequence[float], batch: MicroBatch) -> Tensor:
    """[7] sums over a micro-batch that `estimates` needs, in the order of `SUMS`."""
    weights = log_ratios.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    values = torch.tensor(rewards, dtype=torch.float64)
    counts = torch.tensor([len(rewards), 0.0, len(batch.loss_positions)], dtype=torch.float64)
    counts[1] = log_ratios.sum()
    return torch.cat(
        [torch.stack([weights.sum(), weights.square().sum(), (weights * values).sum(), values.sum()]), counts]
    )


def estimates(sums: Tensor) -> dict[str, float]:
    """`rerun/*` of a whole batch; an empty dict if the batch has no fresh token."""
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    if not total["tokens"]:
        return {}
    return {
        "rerun/reward_of_data": total["rewards"] / total["trajectories"],
        "rerun/reward_estimate": total["weighted_rewards"] / total["weights"],
        "rerun/ess": total["weights"] ** 2 / (total["trajectories"] * total["squares"]),
        "rerun/log_ratio": total["log_ratios"] / total["tokens"],
    }
