"""In which order waiting groups are trained: one pure function per word of `replay.order`.

An order decides anything only while more groups wait than a batch needs, that is with `pipeline_depth` > 0. Whatever it
says, groups over the staleness bound are out before, and ties go to the group that came first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.replay.core.ledger import Entry
from asyncrl.types import GroupHeader, members_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A group that may be trained."""

    entry: Entry
    staleness: int
    """Of its oldest loss token, at the moment of training."""
    slack: int
    """Steps it can still wait and be within the bound."""


class Selector(Protocol):
    def __call__(self, waiting: Sequence[Waiting], *, seed: int, step: int) -> list[Waiting]:
        """The groups in the order they should be trained. A function of its arguments alone: asked again after a
        restart it must answer the same."""
        ...


def fifo(waiting: Sequence[Waiting], *, seed: int, step: int) -> list[Waiting]:
    """First in, first out."""
    return list(waiting)


def freshest(waiting: Sequence[Waiting], *, seed: int, step: int) -> list[Waiting]:
    """Least stale first. What is passed over ages until it is dropped as stale: less bias, more waste."""
    return sorted(waiting, key=lambda group: group.staleness)


def prioritized(waiting: Sequence[Waiting], *, seed: int, step: int) -> list[Waiting]:
    """Largest `advantage_spread` first."""
    return sorted(waiting, key=lambda group: -advantage_spread(group.entry.header))


def uniform(waiting: Sequence[Waiting], *, seed: int, step: int) -> list[Waiting]:
    """A random order that depends on the run's seed, the step and the group ids only."""
    return sorted(waiting, key=lambda group: _lot(seed, step, group.entry.group_id))


def most_urgent(waiting: Sequence[Waiting], *, seed: int, step: int) -> list[Waiting]:
    """By how many steps a group can still wait. What `stale_policy=wait` relies on, whatever `replay.order` says."""
    return sorted(waiting, key=lambda group: group.slack)


SELECTORS: dict[str, Selector] = {
    "fifo": fifo,
    "freshest": freshest,
    "prioritized": prioritized,
    "uniform": uniform,
}


def advantage_spread(header: GroupHeader | None) -> float:
    """Mean absolute deviation of a group's rewards, `sum_i |r_i - mean(r)| / G`: the mean size of its advantages with a
    mean baseline, hence of its policy gradient before the scores. 0 when all rewards are the same."""
    if header is None:
        return 0.0
    rewards = [header.trajectories[place].reward for place in members_of(header.trajectories)]
    mean = sum(rewards) / len(rewards)
    return sum(abs(reward - mean) for reward in rewards) / len(rewards)


def _lot(seed: int, step: int, group_id: int) -> bytes:
    return hashlib.blake2b(f"{seed}/{step}/{group_id}".encode(), digest_size=8).digest()
