"""The cost of the stale policy, and idle times: the numbers behind `staleness/*`, `waste/*` and `idle/*`."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from asyncrl.replay.core.admission import stale_by_quartile
from asyncrl.replay.core.live.workers import LOST, Workers
from asyncrl.types import DropReason, GroupHeader, StepPlan

QUARTILES = ("q1", "q2", "q3", "q4")
MAX_FILTERS = 16
"""Limit on the filters counted by name: a worker that makes up names cannot fill the memory."""
RECENT_GROUPS = 512
"""Number of recent groups over which `data/zero_variance` is computed."""


class Stopwatch:
    """Adds up the seconds spent in each state."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.state: str | None = None
        """The present state; None: its time is not counted."""
        self._since = 0.0

    def note(self, now: float, state: str | None) -> None:
        """Record the state from `now` on; the time until now is counted for the previous one."""
        if self.state is not None:
            self.seconds[self.state] = self.seconds.get(self.state, 0.0) + now - self._since
        self.state, self._since = state, now


class RolloutRates:
    """The workers' rates. Their counters arrive with heartbeats, about one per second: a rate over one train step would
    jump between zero and far too much, so it is measured over SPAN_S and kept until the next measurement."""

    SPAN_S = 3.0

    def __init__(self, now: float) -> None:
        self._since, self._generated, self._waiting = now, 0.0, 0.0
        self._row = {"idle/rollout": 0.0, "perf/generated_tokens_per_s": 0.0}

    def row(self, now: float, workers: Workers) -> dict[str, float]:
        span = now - self._since
        if span >= self.SPAN_S:
            generated, waiting = workers.total("generated_tokens"), workers.total("waiting_s")
            idle = max(0.0, waiting - self._waiting) / span / max(1, len(workers.live))
            rate = (generated - self._generated) / span
            self._row = {"idle/rollout": min(1.0, idle), "perf/generated_tokens_per_s": rate}
            self._since, self._generated, self._waiting = now, generated, waiting
        return dict(self._row)


class Meter:
    """Cumulative counters, turned into one metrics row per trained step."""

    def __init__(self, now: float) -> None:
        self.idle = Stopwatch()
        """Seconds in which the learner could have trained but had no batch, by the reason at the time."""
        self.wasted = [0, 0, 0, 0]
        """`[4]` loss tokens not trained because of staleness, by quartile of their position in the trajectory."""
        self.masked_tokens = 0
        self.stale_groups = 0
        self.inserted_groups = 0
        self.missing_members = 0
        """Missing members of groups that were closed without all their members."""
        self.filtered: dict[str, int] = {}
        """Number of groups by the name of the filter that dropped them."""
        self._equal: deque[bool] = deque(maxlen=RECENT_GROUPS)
        """For each of the last finished groups, dropped by a filter or not: whether all its rewards are equal."""
        self._inserted = [0, 0]
        """Number of trajectories, and of their sampled tokens."""
        self._trained = [0, 0]
        self._lost_groups: dict[DropReason, int] = dict.fromkeys((DropReason.STALE, DropReason.DEAD_BRANCH), 0)
        """Loss tokens of groups that were dropped for their age."""
        self._fates: dict[int, tuple[int, int]] = {}
        """Step -> loss tokens trained in it, and masked loss tokens of its groups; a group that is used again counts
        only the first time. Committed steps are added up under one step number."""
        self._rollouts = RolloutRates(now)

    def whole(self, rewards: Sequence[float], missing: int) -> None:
        """Count a group to which no more members will be added."""
        self.missing_members += missing
        self.measured(rewards)

    def insert(self, header: GroupHeader) -> None:
        self.inserted_groups += 1
        self._inserted[0] += len(header.trajectories)
        self._inserted[1] += sum([trajectory.loss_tokens for trajectory in header.trajectories])

    def measured(self, rewards: Sequence[float]) -> None:
        """Count a finished group; without rewards it is ignored."""
        if rewards:
            self._equal.append(min(rewards) == max(rewards))

    def drop_stale(self, header: GroupHeader, reason: DropReason) -> None:
        """Count a group dropped as stale: all its loss tokens are wasted, including the fresh ones."""
        self.stale_groups += 1
        for trajectory in header.trajectories:
            self._lost_groups[reason] += trajectory.loss_tokens
            everything = dict.fromkeys((version for version, _ in trajectory.version_tokens), 1)
            self._waste(stale_by_quartile(trajectory, everything, 0))

    def drop_filtered(self, name: str) -> None:
        if name in self.filtered or (len(self.filtered) < MAX_FILTERS and name.isidentifier()):
            self.filtered[name] = self.filtered.get(name, 0) + 1

    def train(self, plan: StepPlan, again: Collection[int] = ()) -> dict[str, float]:
        """Count a trained step. Returns its `staleness/*`. `again`: ids of its groups that were trained before."""
        good = masked = 0
        all_fresh = plan.all_fresh
        for group in plan.groups:
            first = group.group_id not in again
            for trajectory in group.trajectories:
                total = trajectory.loss_tokens
                fresh = total if all_fresh else plan.fresh_tokens(trajectory)
                if first:
                    good, masked = good + fresh, masked + total - fresh
                if fresh < total:
                    self.masked_tokens += total - fresh
                    self._waste(stale_by_quartile(trajectory, plan.staleness, plan.max_staleness))
                if fresh:
                    self._trained[0] += 1
                    self._trained[1] += total
        self._fates[plan.step] = good, masked
        by_age = plan.tokens_by_staleness()
        tokens = sum(by_age.values())
        return {
            "staleness/mean": sum(age * count for age, count in by_age.items()) / tokens if tokens else 0.0,
            "staleness/max": float(max(by_age, default=0)),
        }

    def row(self, now: float, workers: Workers) -> dict[str, float]:
        """Return the costs so far and the rates of the rollouts. The learner measures its own rates."""
        row = {
            "staleness/dropped": float(self.stale_groups),
            "staleness/masked_tokens": float(self.masked_tokens),
            "replay/missing_members": float(self.missing_members),
            "waste/tokens": float(sum(self.wasted)),
            "waste/trained_length_bias": self._length_bias(),
        }
        if self._equal:
            row["data/zero_variance"] = sum(self._equal) / len(self._equal)
        row |= self._rollouts.row(now, workers)
        row |= {f"waste/tokens_by_position_{q}": float(n) for q, n in zip(QUARTILES, self.wasted, strict=True)}
        row |= {f"replay/filtered_by_{name}": float(count) for name, count in self.filtered.items()}
        row |= {f"idle/learner_s_{reason}": seconds for reason, seconds in self.idle.seconds.items()}
        return row

    def restore(self, step: int) -> None:
        """Forget the steps after the checkpoint of `step`, to which the learner went back: they are trained again."""
        self._fates = {known: tokens for known, tokens in self._fates.items() if known <= step}

    def commit(self, step: int) -> None:
        """Add up the steps until `step`: no restore goes back beyond it."""
        done = [self._fates.pop(known) for known in list(self._fates) if known <= step]
        self._fates[step] = sum(good for good, _ in done), sum(masked for _, masked in done)

    def goodput(self, workers: Workers) -> dict[str, float]:
        """Return what became of the sampled tokens, as far as is known: tokens in progress are in no metric."""
        good, masked = (sum(tokens) for tokens in zip((0, 0), *self._fates.values(), strict=True))
        lost = {fate: workers.total(stat) for fate, stat in LOST.items()}
        lost |= {reason.value: float(tokens) for reason, tokens in self._lost_groups.items()}
        lost |= {"masked": float(masked), "unfinished": workers.unfinished_tokens()}
        row = {"goodput/generated_tokens": workers.total("generated_tokens"), "goodput/trained_tokens": float(good)}
        settled = good + sum(lost.values())
        if settled:
            row["goodput/share"] = good / settled
        return row | {f"goodput/lost_{fate}": tokens for fate, tokens in lost.items() if tokens}

    def _length_bias(self) -> float:
        """Mean number of sampled tokens of trained trajectories over that of inserted ones; below 1, long ones are
        being lost."""
        if not self._trained[0] or not self._inserted[1]:
            return 1.0
        return (self._trained[1] / self._trained[0]) / (self._inserted[1] / self._inserted[0])

    def _waste(self, by_quartile: list[int]) -> None:
        self.wasted = [a + b for a, b in zip(self.wasted, by_quartile, strict=True)]
