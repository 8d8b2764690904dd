"""In which order waiting groups are trained: one pure function per word of `replay.order`; and the window
(`replay.window`) that keeps any of them near the order of admission.

An order decides anything only while more groups wait than a batch needs, that is with `pipeline_depth` > 0. Whatever it
says, groups over the staleness bound are out before, and ties go to the group that came first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from asyncrl.replay.core.durable.ledger import Entry
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


def most_effective(waiting: Sequence[Waiting], *, seed: int, step: int) -> list[Waiting]:
    """Those not trained yet, then the largest effective sample size: the share of a group's tokens that its importance
    weights leave, as the learner measured it when it trained the group last (`asyncrl/learner/step/group_ess.py`)."""
    return sorted(waiting, key=lambda group: -group.entry.ess if group.entry.trained else -1.0)


def most_urgent(waiting: Sequence[Waiting], *, seed: int, step: int) -> list[Waiting]:
    """By how many steps a group can still wait. What `stale_policy=wait` relies on, whatever `replay.order` says."""
    return sorted(waiting, key=lambda group: group.slack)


SELECTORS: dict[str, Selector] = {
    "fifo": fifo,
    "freshest": freshest,
    "prioritized": prioritized,
    "uniform": uniform,
    "ess": most_effective,
}


def within_window(order: Sequence[Waiting], unfinished: Iterable[int], window: int) -> list[Waiting]:
    """Those of `order` that may be trained now, in turn: always the first that is among the `window` group ids from the
    oldest open group on. `unfinished`: ids of the open groups that do not wait.

    Taking a younger group does not move the window, so at most `W - 1` pass any group (windowed FIFO: section 6.2.4 of
    arXiv 2605.26494; the bound follows torchtitan's `experiments/rl/docs/windowed_fifo.md`). When a group is given to a
    worker at version v, at most `A - 1` others are untrained, `A = (1 + depth) * B`, the older ones among them. Before
    its batch of B groups are trained at most those and the W - 1 that pass it, hence

        staleness <= lag + floor((A - 1 + W - 1) / B) = lag + depth + ceil((W - 1) / B)

    with the worker's `lag` behind v, for which `AdmissionSettings.max_lag` leaves what is missing to the bound. Nothing
    gets stuck: once no group is unfinished, all are in.
    """
    rank = {group.entry.group_id: place for place, group in enumerate(order)}
    ids = sorted([*rank, *unfinished], reverse=True)  # popped from the end: the next to come into the window
    ready: list[int] = []
    taken: set[int] = set()
    result: list[Waiting] = []
    oldest = len(ids) - 1
    incoming = oldest
    while oldest >= 0:
        while incoming >= 0 and ids[incoming] < ids[oldest] + window:
            if ids[incoming] in rank:
                heappush(ready, rank[ids[incoming]])
            incoming -= 1
        if not ready:
            break
        result.append(order[heappop(ready)])
        taken.add(result[-1].entry.group_id)
        while oldest >= 0 and ids[oldest] in taken:
            oldest -= 1
    return result


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
