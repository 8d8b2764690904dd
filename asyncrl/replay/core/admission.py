"""The two gates. Admission: may one more group be started? Consumption: may this token still be trained on?

Admission alone bounds only the average staleness (one slow group can exceed it); the consumption gate is the
guarantee. Everything here is a pure function of numbers, so both gates can be read, tested and simulated alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.checks.sources import sources
from asyncrl.drawing.curriculum import Curriculum
from asyncrl.schema import Config, DataConfig
from asyncrl.types import GroupHeader, StalePolicy, TrajectoryHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """The run's settings that the gates need, checked by the rules of `asyncrl.checks`: some others would deadlock."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    pipeline_depth: int
    max_in_flight: int
    stale_policy: StalePolicy = StalePolicy.MASK
    max_attempts: int = 3
    order: str = "fifo"
    window: int = 0
    """Length of the window of groups, from the oldest open one on, that may be trained; 0: all."""
    max_times_sampled: int = 1
    group_timeout_s: float = 0.0
    """Seconds after which an assignment is reissued to another worker; 0: never."""
    min_group_size: int = 0
    """Members that suffice if the others have failed permanently; 0: all of them."""
    by_sample: bool = False
    """New groups are admitted member by member."""
    curriculum: Curriculum | None = None
    """How prompts are chosen by measured pass rate; None: in their order."""

    @classmethod
    def from_config(cls, config: Config) -> AdmissionSettings:
        """Build the settings from a checked run configuration."""
        return cls(
            groups_per_step=config.learner.groups_per_step,
            group_size=config.rollout.group_size,
            max_staleness=config.replay.max_staleness,
            pipeline_depth=config.replay.pipeline_depth,
            max_in_flight=config.rollout.max_in_flight,
            stale_policy=StalePolicy(config.replay.stale_policy),
            max_attempts=config.rollout.max_attempts,
            order=config.replay.order,
            window=config.replay.window,
            max_times_sampled=config.replay.max_times_sampled,
            group_timeout_s=config.replay.group_timeout_s,
            min_group_size=config.rollout.min_group_size,
            by_sample=config.replay.admission == "sample",
            curriculum=curriculum_of(config.data),
        )

    def plain(self) -> dict[str, Any]:
        """Return the settings as plain values, for the journal."""
        values = {**asdict(self), "stale_policy": self.stale_policy.value}
        if self.curriculum is not None:
            values["curriculum"]["weights"] = list(self.curriculum.weights)
        return values

    @property
    def fewest_members(self) -> int:
        return self.min_group_size or self.group_size

    @property
    def orders_per_group(self) -> int:
        """The number of assignments that a new group takes, each with its own slot and place."""
        return self.group_size if self.by_sample else 1

    @property
    def bypass_steps(self) -> int:
        """The most steps by which younger groups that pass a group can delay it: see `order.within_window`."""
        return -(-max(0, self.window - 1) // self.groups_per_step)

    @property
    def max_lag(self) -> int:
        """The largest lag behind the newest version at which a worker still gets assignments, in versions."""
        return self.max_staleness - self.pipeline_depth - self.bypass_steps


def curriculum_of(data: DataConfig) -> Curriculum | None:
    """Build the curriculum from checked settings; None if there is none."""
    if not data.curriculum:
        return None
    low, high = data.curriculum_window
    return Curriculum(
        low=low,
        high=high,
        explore=data.curriculum_explore,
        passes_at=data.curriculum_passes_at,
        weights=tuple(source.weight for source in sources(data)),
        shuffle=data.shuffle,
    )


def may_admit(settings: AdmissionSettings, *, untrained: int, in_flight: int) -> bool:
    """Return whether one more group may be started.

    With `max_times_sampled` above 1 a group that may be trained again counts as untrained, which slows the rollouts
    down to the rate at which the learner consumes groups.

    `untrained` = admitted - dropped - trained, so `untrained < (1 + depth) * B` is the production gate
    `admitted - dropped < (trained_steps + 1 + depth) * B` with the trained batches subtracted from both sides. The
    caller leaves out groups that a restore has planned for steps beyond the window; counting them could stop admission
    while the next step is short of a group.

    By sample, both are counts of members, and a group is begun only if there is room for all its members: begun in
    part, it could wait for room that becomes free only once it is trained.
    """
    orders = settings.orders_per_group
    window = (1 + settings.pipeline_depth) * settings.groups_per_step
    return untrained + orders <= window * orders and in_flight + orders <= settings.max_in_flight * orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one group at the time when it would be trained."""

    fresh_tokens: int
    """Loss tokens within the bound."""
    stale_tokens: int
    staleness: int
    """Staleness of its oldest loss token, in versions."""


def judge(header: GroupHeader, staleness: Mapping[int, int], bound: int) -> Verdict:
    """Count the loss tokens of a group within `bound`. `staleness` maps every version in it to its age at training."""
    fresh = stale = oldest = 0
    for trajectory in header.trajectories:
        for version, count in trajectory.version_tokens:
            age = staleness[version]
            if age > oldest:
                oldest = age
            if age <= bound:
                fresh += count
            else:
                stale += count
    return Verdict(fresh_tokens=fresh, stale_tokens=stale, staleness=oldest)


def may_train(verdict: Verdict, policy: StalePolicy) -> bool:
    """Return whether the group goes into the batch (its over-age tokens masked); otherwise it is dropped as stale."""
    if policy is StalePolicy.DROP:
        return verdict.stale_tokens == 0
    return verdict.fresh_tokens > 0


def over_committed(slacks: Iterable[int], groups_per_step: int) -> int | None:
    """For the policy `wait`: check whether the batch leaves out more groups than the coming steps can train in time.

    `slacks` are those of the groups left out of the batch: how many further steps each can wait and still be within
    the bound. At most `j * B` of them may have a slack of `j` or less. Returns the smallest `j` that is violated, or
    None if the batch may be sealed. Negative slacks (only a rollback causes them) cannot be helped and are not counted.
    """
    counts = Counter(slack for slack in slacks if slack >= 0)
    total = 0
    for slack in sorted(counts):
        total += counts[slack]
        if total > slack * groups_per_step:
            return slack
    return None


def stale_by_quartile(trajectory: TrajectoryHeader, staleness: Mapping[int, int], bound: int) -> list[int]:
    """Count over-age loss tokens by their position in the trajectory, `[4]`: first quarter of its loss tokens, ..."""
    total = trajectory.loss_tokens
    edges = [total * quarter // 4 for quarter in range(5)]
    result = [0, 0, 0, 0]
    start = 0
    for version, count in trajectory.version_tokens:
        stop = start + count
        if staleness[version] > bound:
            for quarter in range(4):
                result[quarter] += max(0, min(stop, edges[quarter + 1]) - max(start, edges[quarter]))
        start = stop
    return result
