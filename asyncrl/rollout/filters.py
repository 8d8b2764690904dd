"""Groups that are not worth training on, dropped where they are made: no byte of them travels.

A dropped group is counted with its reason and makes room for exactly one new prompt, so batches stay full (dynamic
sampling as in DAPO).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.schema import RolloutConfig
from asyncrl.types import DropReason, TrajectoryGroup

GroupFilter = Callable[[TrajectoryGroup], bool]
"""True: the group is to be dropped."""


def zero_variance(group: TrajectoryGroup) -> bool:
    """All rewards are the same: with a group baseline every advantage is 0."""
    return len({trajectory.reward for trajectory in group.trajectories}) < 2


def any_truncated(group: TrajectoryGroup) -> bool:
    return any(trajectory.finish_reason == "length" for trajectory in group.trajectories)


def all_truncated(group: TrajectoryGroup) -> bool:
    return all(trajectory.finish_reason == "length" for trajectory in group.trajectories)


TRUNCATED: dict[str, GroupFilter | None] = {"never": None, "any": any_truncated, "all": all_truncated}
Filters = Sequence[tuple[DropReason, GroupFilter]]


def make_filters(config: RolloutConfig) -> Filters:
    """Those that the settings ask for, in the order they are tried."""
    filters: list[tuple[DropReason, GroupFilter]] = []
    truncated = TRUNCATED[config.drop_truncated]
    if truncated is not None:
        filters.append((DropReason.OVER_LENGTH, truncated))
    if config.drop_zero_variance:
        filters.append((DropReason.FILTERED_ZERO_VARIANCE, zero_variance))
    return filters


def why_dropped(filters: Filters, group: TrajectoryGroup) -> DropReason | None:
    """The reason of the first filter that wants the group dropped."""
    return next((reason for reason, unwanted in filters if unwanted(group)), None)
