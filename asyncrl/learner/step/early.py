"""Starts to train before the batch is full: forward and backward of the groups that the batch certainly starts with.

    learner waits ──▶ early: the next `early_groups` have arrived ──▶ pack, score, advantages, backward ──▶ repeat
                 └──▶ lease: the batch is sealed ──▶ does it start with these groups? ──▶ the rest of it, the update

A batch with `early_groups=N` is always trained in parts of N groups, in the order of its plan. The same micro-batches
run in the same order whether they run before or after the batch is sealed, so the weights are bitwise independent of
when the groups arrived. The denominators are known last, so gradients are summed undivided and divided before the
update. Nothing relies on a guess: on every rank the sealed plan and its advantages are compared with those that were
trained on, and a batch that differs is computed again.
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
"""Seconds between two requests to the replay server when it had nothing more; the lease may arrive meanwhile."""


@dataclass(slots=True, kw_only=True)
class Begun:
    """The part of a step that was trained on before its batch was sealed (`early`)."""

    plan: StepPlan
    """Plan of the groups that the batch is expected to start with."""
    batches: list[MicroBatch]
    """Scored, with advantages."""
    sums: Accumulated

    def is_of(self, plan: StepPlan, first: MinibatchPlan) -> bool:
        """Whether the sealed plan starts as expected, and its `first` minibatch with these micro-batches and at least
        one more, with which the gradients are reduced."""
        mine, count = self.plan, len(self.batches)
        ages = all(plan.staleness.get(version) == age for version, age in mine.staleness.items())
        same = plan.groups[: len(mine.groups)] == mine.groups and plan.max_staleness == mine.max_staleness and ages
        members = tuple(batch.members for batch in self.batches)
        return same and plan.step == mine.step and first.micro_batches[:-1][:count] == members


@dataclass(frozen=True, slots=True)
class Early:
    """Rank 0 decides which groups are next; all ranks train on the same ones, because every micro-batch is collective.

    consumes: groups that wait at the replay server. waits for: the next part of a batch, or its lease. unblocked by:
    the replay server, or a request to stop the learner.
    """

    config: Config
    roles: Roles
    replay: LearnerReplay
    leases: LeasePrefetch
    rank: int
    """Data rank: determines the trajectories to train on; equal for ranks that share the computation of a layer."""
    world: int
    first: bool
    """Whether this is global rank 0, which decides."""

    @property
    def device(self) -> torch.device:
        return self.roles.policy.device

    def begin(self, step: int, asked: Asked, lap: Callable[[str], None]) -> Begun | None:
        """Train on the certain part of `step` as it arrives, until its lease is there or `asked`. Collective.

        Args:
            lap: called with a name for the time since its last call.
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
        """The next part, with the same groups on every rank."""
        mine = however_long(lambda: self._wait(step, after, asked) if self.first else None, self.device)
        wanted = text_of_rank_zero(_name_of(mine), self.device)
        if not wanted:
            return None
        if not self.first:
            mine = self._ask(step, after, after + len(wanted.split()))
        # A server that restarted in between may have fewer of them.
        return mine if everywhere(_name_of(mine) == wanted, self.device) else None

    def _wait(self, step: int, after: int, asked: Asked) -> Lease | None:
        learner = self.config.learner
        if after + learner.early_groups >= learner.groups_per_step // learner.updates_per_batch:
            return None  # the last part comes with the lease
        while not asked() and not self.leases.is_there(step, AGAIN_S):
            part = self._ask(step, after, 0)
            if part is not None:
                return part
        return None

    def _ask(self, step: int, after: int, upto: int) -> Lease | None:
        return self.replay.early(step=step, rank=self.rank, world=self.world, after=after, upto=upto, wait_s=LOOK_S)

    def _train(self, part: Lease, begun: Begun | None) -> Begun:
        """Run forward and backward of the groups of `part`, which follow those of `begun`."""
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
            add_gradients(config, roles.policy, batch, UNDIVIDED, begun.sums, last=False)
        before = begun.plan
        batches = [_counted_from(len(before.groups), batch) for batch in batches]
        both = replace(before, groups=before.groups + plan.groups, staleness={**before.staleness, **plan.staleness})
        return Begun(plan=both, batches=begun.batches + batches, sums=begun.sums)


def _counted_from(first: int, batch: MicroBatch) -> MicroBatch:
    """The micro-batch with its groups numbered by their positions in the step."""
    members = tuple((group + first, place) for group, place in batch.members)
    return replace(batch, members=members, group_ids=batch.group_ids + first)


def _name_of(part: Lease | None) -> str:
    """The ids and attempts of its groups, one word each; empty for None."""
    groups = part.plan.groups if part else ()
    return " ".join(f"{group.group_id}.{group.attempt}" for group in groups)


def still_of(begun: Begun | None, minibatches: Sequence[MinibatchPlan], roles: Roles, lease: Lease) -> Begun | None:
    """`begun`, if it belongs to the batch that was sealed; otherwise discard its gradients and return None.
    Collective."""
    plan = lease.plan
    if begun is None or everywhere(bool(minibatches) and begun.is_of(plan, minibatches[0]), roles.policy.device):
        return begun
    give_up_gradients(roles, lease, f"step {plan.step} was sealed with other groups than it began with")
    return None


def same_advantages(begun: Begun, batches: Sequence[MicroBatch], roles: Roles, lease: Lease) -> bool:
    """Whether the micro-batches of `begun` have the same advantages in the whole batch as they were trained with;
    otherwise discard their gradients. Collective."""
    pairs = [(mine.advantages, batch.advantages) for mine, batch in zip(begun.batches, batches, strict=False)]
    equal = [(mine == now).all() for mine, now in pairs if mine is not None and now is not None]
    same = len(equal) == len(pairs) and bool(torch.stack(equal).all())
    if everywhere(same, roles.policy.device):
        return True
    give_up_gradients(roles, lease, f"step {begun.plan.step} has other advantages than its first groups alone")
    return False


def give_up_gradients(roles: Roles, lease: Lease, why: str) -> None:
    """Discard the accumulated gradients. Collective: they are reduced once, because FSDP would keep them otherwise."""
    log.info("%s: the results from before the batch was full are computed again", why)
    set_gradient_sync(roles.policy, True)
    empty = pack(lease, (), roles.policy.device)
    logprobs, *_ = roles.policy(empty, 1.0)
    logprobs.sum().backward()
    roles.optimizer.zero_grad()
