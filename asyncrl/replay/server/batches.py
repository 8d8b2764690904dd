"""Hand out batches to the learner's ranks: a rank's part of a step, once the step is sealed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncrl.balance import UPDATES, shard_step
from asyncrl.replay.codec import headers, wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.lease import pack_places
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.server.sessions import Answer, Reply, Session, while_it_moves
from asyncrl.spans import moment
from asyncrl.types import StepPlan

MAX_WORLD = 65536
PLANS_KEPT = 4
"""Limit on cached plans: those of the step in training and of the step fetched ahead, and a few that a late rank may
still ask for."""


def announced(core: ReplayCore, name: str) -> int:
    """Return a count from the board; 0 if it is absent."""
    count = core.board.values.get(name)
    return count if isinstance(count, int) and count > 0 else 0


class Batches:
    """The handler of the verb `lease`."""

    def __init__(self, core: ReplayCore) -> None:
        self._core = core
        self._plans: dict[tuple[int, ...], tuple[StepPlan, StepPlan, Any]] = {}
        """(step, world, updates) -> (plan as sealed, plan with shards, encoded). Cached because every
        rank asks for the same plan. The most recently used is last. At most `PLANS_KEPT`, so that a peer that keeps
        asking for new world sizes cannot fill the memory."""

    def lease(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        step, rank, world, wait_s, samples = wire.sequence(body, "lease", 5)
        wire.integer(step, "step", 0, wire.MAX_ID)
        wire.integer(world, "world", 1, MAX_WORLD)
        wire.integer(rank, "rank", 0, world - 1)
        wire.integer(samples, "samples", 0, 4096)

        def retry() -> Answer | None:
            plan = self._core.lease(step)
            return None if plan is None else self._leased(plan, rank, world, samples)

        def mark() -> tuple[int, ...] | None:
            return self._core.patience_mark(step)

        def silence() -> str:
            return f"no group and no token for {wait_s:.1f} s: {self._core.explain(step)}"

        there = lambda: self._core.lease(step) is not None  # noqa: E731
        return while_it_moves(retry, mark, silence, wait_s, ("batch", step), there)

    def _leased(self, plan: StepPlan, rank: int, world: int, samples: int) -> Answer:
        key = (plan.step, world, max(1, announced(self._core, UPDATES)))
        known = self._plans.pop(key, None)
        if known is None or known[0] is not plan:
            sharded = replace(plan, shards=shard_step(plan, *key[1:]))
            known = (plan, sharded, headers.encode_plan(sharded))
            moment("lease", step=plan.step + 1, groups=[group.group_id for group in plan.groups])
        self._plans[key] = known
        if len(self._plans) > PLANS_KEPT:
            del self._plans[next(iter(self._plans))]
        return self._handed_out(known[1], known[2], rank, samples)

    def _handed_out(self, plan: StepPlan, encoded: Any, rank: int, samples: int) -> Answer:
        """Return the part of `rank` in a plan with shards, plus the first `samples` groups whole."""
        sampled = list(range(min(samples, len(plan.groups))))
        places = set(plan.shards[rank])
        wanted = {group for group, _ in places}.union(sampled)
        together = self._core.state.ledger.together
        entries = {group: together(plan.groups[group].group_id) for group in wanted}
        self._core.bring_back(entry for group in entries.values() for entry in group)
        kept = {group: [entry.payload for entry in parts] for group, parts in entries.items()}
        body, forwarded = pack_places(kept, places, sampled)
        return Answer([encoded, *body], forwarded)
