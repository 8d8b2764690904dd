"""Hand out batches to the learner's ranks: a rank's shard of a step once the step is sealed, or of its first groups
before that (`learner.early_groups`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncrl.balance import EARLY, UPDATES, begin_step, shard_step
from asyncrl.replay.codec import headers, wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.lease import pack_places
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.server.sessions import Answer, Reply, Session, now_or_later, while_it_moves
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
    """Handlers of the verbs `lease` and `early`."""

    def __init__(self, core: ReplayCore) -> None:
        self._core = core
        self._plans: dict[tuple[int, ...], tuple[StepPlan, StepPlan, Any]] = {}
        """(step, world, updates, groups together) -> (plan as sealed, plan with shards, encoded). Cached because every
        rank asks for the same plan. The most recently used is last. At most `PLANS_KEPT`, so that a peer that keeps
        asking for new world sizes cannot fill the memory."""
        self._last_begun: tuple[tuple[Any, ...], tuple[StepPlan, Any] | None] = (), None
        """Key and result of the last call to `_begun`: who asked for what, and the part of a step that was returned."""

    def lease(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        step, rank, world, wait_s, samples = wire.sequence(body, "lease", 5)
        wire.integer(step, "step", 0, wire.MAX_ID)
        wire.integer(world, "world", 1, MAX_WORLD)
        wire.integer(rank, "rank", 0, world - 1)
        wire.integer(samples, "samples", 0, 4096)

        def retry() -> Answer | None:
            plan = self._core.lease(step)
            return None if plan is None else self._leased(plan, rank, world, samples)

        def mark() -> tuple[int, ...] | None:  # a full disk has its own patience
            return None if self._core.run.paused else self._core.patience_mark(step)

        def silence() -> str:
            return f"no group and no token for {wait_s:.1f} s: {self._core.explain(step)}"

        there = lambda: self._core.lease(step) is not None  # noqa: E731
        return while_it_moves(retry, mark, silence, wait_s, ("batch", step), there)

    def early(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        step, rank, world, after, upto, wait_s = wire.sequence(body, "early", 6)
        wire.integer(step, "step", 0, wire.MAX_ID)
        wire.integer(world, "world", 1, MAX_WORLD)
        wire.integer(rank, "rank", 0, world - 1)
        wire.integer(after, "after", 0, wire.MAX_TOKENS)
        wire.integer(upto, "upto", 0, wire.MAX_TOKENS)

        def there() -> bool:
            # A sealed step is handed out by `lease`, but a rank may still ask for what another got before the seal.
            sealed = self._core.is_sealed(step)
            return sealed or len(self._core.state.buffer.waiting) >= after + max(1, announced(self._core, EARLY))

        def retry() -> Answer | None:
            if self._core.is_sealed(step) and not upto:
                return Answer()
            begun = self._begun(step, world, after, upto)
            return None if begun is None else self._handed_out(*begun, rank, 0)

        return now_or_later(retry, Answer, wait_s, ("early", step, after), there)

    def _begun(self, step: int, world: int, after: int, upto: int) -> tuple[StepPlan, Any] | None:
        """Return the result of `begin_step` and its encoding. Cached, as the other ranks ask for what rank 0 got."""
        asked = self._core.state.peers.learner, step, world, after
        if (*asked, upto) == self._last_begun[0]:
            return self._last_begun[1]
        together = announced(self._core, EARLY)
        plan = self._core.certain(step) if together else None
        if plan is None:
            return None
        first = self._core.run.settings.groups_per_step // self._updates()
        begun = begin_step(plan, world, first=first, together=together, after=after, upto=upto)
        if begun is None:
            return None
        self._last_begun = (*asked, after + len(begun.groups)), (begun, headers.encode_plan(begun))
        return self._last_begun[1]

    def _leased(self, plan: StepPlan, rank: int, world: int, samples: int) -> Answer:
        key = (plan.step, world, self._updates(), announced(self._core, EARLY))
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

    def _updates(self) -> int:
        """Optimizer steps per batch, as announced by the learner; at least 1."""
        return max(1, announced(self._core, UPDATES))
