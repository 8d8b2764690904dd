"""Training begins before the batch is full: forward and backward of the groups that it is certain to begin with.

    learner waits ──▶ early: the next `early_groups` are there ──▶ pack, score, advantages, backward ──▶ once more
                 └──▶ lease: the batch is sealed ──▶ is it the one that was begun? ──▶ the rest of it, the update

A batch of `early_groups=N` is trained N groups by N groups, in the order of its plan, whenever they came: what is done
before it is sealed and what after it are the same micro-batches in the same order, so weights do not depend on it, to
the bit. What gradients are divided by is known last, so they are summed undivided and divided before the update. And
nothing rests on a guess: the sealed plan and its advantages are compared with those that were trained on, on every
rank, and what is another batch is computed anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from asyncrl.learner.batch.micro_batch import MicroBatch, pack
from asyncrl.learner.batch.plan import Budget, MinibatchPlan, micro_batches
from asyncrl.learner.batch.prefetch import LOOK_S, LeasePrefetch
from asyncrl.learner.model.packed import set_gradient_sync
from asyncrl.learner.parallel.collectives import everywhere, however_long, text_of_rank_zero
from asyncrl.learner.processes.stop import Asked
from asyncrl.learner.roles import Roles
from asyncrl.learner.step.gradients import UNDIVIDED, Accumulated, add_gradients
from asyncrl.learner.step.memory_peak import begin_peak
from asyncrl.learner.step.scoring import scored_batches
from asyncrl.learner.step.targets import with_targets
from asyncrl.replay.protocol import LearnerReplay, Lease
from asyncrl.schema import Config
from asyncrl.types import StepPlan

log = logging.getLogger(__name__)

AGAIN_S = 0.02
"""After the replay had nothing more, until it is asked again: its lease may be on the way."""


@dataclass(slots=True, kw_only=True)
class Begun:
    """What of a step was trained on before its batch was sealed (`early`)."""

    plan: StepPlan
    """Of the groups that it was to begin with."""
    batches: list[MicroBatch]
    """Scored, with their advantages."""
    sums: Accumulated

    def is_of(self, plan: StepPlan, first: MinibatchPlan) -> bool:
        """Whether the sealed plan begins as was expected, and its `first` minibatch with these micro-batches and one
        more, with which the ranks meet."""
        mine, count = self.plan, len(self.batches)
        ages = all(plan.staleness.get(version) == age for version, age in mine.staleness.items())
        same = plan.groups[: len(mine.groups)] == mine.groups and plan.max_staleness == mine.max_staleness and ages
        members = tuple(batch.members for batch in self.batches)
        return same and plan.step == mine.step and first.micro_batches[:-1][:count] == members


@dataclass(frozen=True, slots=True)
class Early:
    """What rank 0 is given, all ranks train on: they meet in every micro-batch.

    consumes: groups that wait at the replay. waits for: the next part of a batch, or its lease. unblocked by: the
    replay, or whoever asks the learner to stop.
    """

    config: Config
    roles: Roles
    replay: LearnerReplay
    leases: LeasePrefetch
    rank: int
    """Whose trajectories this one trains; ranks that compute a layer together train the same."""
    world: int
    device: torch.device
    first: bool
    """Rank 0 of all, which decides."""

    def begin(self, step: int, asked: Asked, lap: Callable[[str], None]) -> Begun | None:
        """Train on what of `step` is certain, until its lease is there or `asked`. Collective.

        Args:
            lap: told what the time since it was called last was.
        """
        begun: Begun | None = None
        while (part := self._next(step, len(begun.plan.groups) if begun else 0, asked)) is not None:
            lap("wait_batch")
            if begun is None:
                begin_peak(self.device)
            begun = self._train(part, begun)
            lap("early")
        return begun

    def _next(self, step: int, after: int, asked: Asked) -> Lease | None:
        """The next part, of the same groups on every rank."""
        mine = however_long(lambda: self._wait(step, after, asked) if self.first else None, self.device)
        wanted = text_of_rank_zero(_name_of(mine), self.device)
        if not wanted:
            return None
        if not self.first:
            mine = self._ask(step, after, after + len(wanted.split()))
        # A server that began anew in between may know of fewer.
        return mine if everywhere(_name_of(mine) == wanted, self.device) else None

    def _wait(self, step: int, after: int, asked: Asked) -> Lease | None:
        learner = self.config.learner
        if after + learner.early_groups >= learner.groups_per_step // learner.updates_per_batch:
            return None  # the last ones come with the lease
        while not asked() and not self.leases.is_there(step, AGAIN_S):
            part = self._ask(step, after, 0)
            if part is not None:
                return part
        return None

    def _ask(self, step: int, after: int, upto: int) -> Lease | None:
        return self.replay.early(step=step, rank=self.rank, world=self.world, after=after, upto=upto, wait_s=LOOK_S)

    def _train(self, part: Lease, begun: Begun | None) -> Begun:
        """Forward and backward of the groups of `part`, which come after those of `begun`."""
        config, roles, plan = self.config, self.roles, part.plan
        members = micro_batches(
            plan,
            [g for g, group in enumerate(plan.groups) if any(map(plan.fresh_tokens, group.trajectories))],
            rank=self.rank,
            budget=Budget.of(config.learner),
            in_rows=roles.in_rows,
            together=config.learner.early_groups,
        )
        batches = scored_batches(config, roles, part, members, self.device)
        batches, _ = with_targets(plan, batches, config.advantage, roles.kl_coef, self.device)
        begun = begun or Begun(
            plan=replace(plan, groups=(), shards=()),
            batches=[],
            sums=Accumulated(loss=torch.zeros((), device=self.device)),
        )
        for batch in batches:
            add_gradients(config, roles.policy, batch, UNDIVIDED, self.world, begun.sums, last=False)
        before = begun.plan
        batches = [_counted_from(len(before.groups), batch) for batch in batches]
        both = replace(before, groups=before.groups + plan.groups, staleness={**before.staleness, **plan.staleness})
        return Begun(plan=both, batches=begun.batches + batches, sums=begun.sums)


def _counted_from(first: int, batch: MicroBatch) -> MicroBatch:
    """Its groups by their places in the step."""
    members = tuple((group + first, place) for group, place in batch.members)
    return replace(batch, members=members, group_ids=batch.group_ids + first)


def _name_of(part: Lease | None) -> str:
    """Its groups and attempts, a word each; empty for none."""
    groups = part.plan.groups if part else ()
    return " ".join(f"{group.group_id}.{group.attempt}" for group in groups)


def still_of(
    begun: Begun | None,
    plan: StepPlan,
    minibatches: Sequence[MinibatchPlan],
    roles: Roles,
    lease: Lease,
    device: torch.device,
) -> Begun | None:
    """`begun`, if it is of the batch that was sealed; else its gradients are given up. Collective."""
    if begun is None or everywhere(bool(minibatches) and begun.is_of(plan, minibatches[0]), device):
        return begun
    give_up_gradients(roles, lease, device, f"step {plan.step} was sealed with other groups than it was to begin with")
    return None


def same_advantages(
    begun: Begun, batches: Sequence[MicroBatch], roles: Roles, lease: Lease, device: torch.device
) -> bool:
    """Whether the whole batch gives the micro-batches of `begun` the advantages that they were trained with; else its
    gradients are given up. Collective."""
    pairs = [(mine.advantages, batch.advantages) for mine, batch in zip(begun.batches, batches, strict=False)]
    equal = [(mine == now).all() for mine, now in pairs if mine is not None and now is not None]
    same = len(equal) == len(pairs) and bool(torch.stack(equal).all())
    if everywhere(same, device):
        return True
    give_up_gradients(roles, lease, device, f"step {begun.plan.step} has other advantages than its first groups alone")
    return False


def give_up_gradients(roles: Roles, lease: Lease, device: torch.device, why: str) -> None:
    """What is accumulated is no part of the next update. Collective: the ranks meet with it, or FSDP keeps it."""
    log.info("%s: what was computed before the batch was full is computed again", why)
    set_gradient_sync(roles.policy, True)
    empty = pack(lease, (), device)
    logprobs, *_ = roles.policy(
        empty.input_ids, empty.position_ids, empty.loss_positions, empty.predictors, empty.packing, 1.0
    )
    logprobs.sum().backward()
    roles.optimizer.zero_grad()
