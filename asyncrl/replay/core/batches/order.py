"""The order in which waiting groups are trained: one sort key per value of `replay.order`; and the window
(`replay.window`) that keeps any such order close to the order of admission.

The order matters only while more groups wait than a batch needs, that is with `pipeline_depth` > 0. For every order,
groups over the staleness bound are removed first, and ties go to the group that came first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from asyncrl.replay.core.durable.ledger import Entry
from asyncrl.types import GroupHeader, members_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A group that may be trained."""

    entry: Entry
    staleness: int
    """Staleness of its oldest loss token at the time of training, in versions."""
    slack: int
    """Steps that it can still wait and be within the bound."""


ORDERS: dict[str, Callable[[Waiting, str], Any]] = {
    "fifo": lambda group, draw: 0,
    # Groups that are passed over age until they are dropped as stale: less bias, more waste.
    "freshest": lambda group, draw: group.staleness,
    "prioritized": lambda group, draw: -advantage_spread(group.entry.header),
    "uniform": lambda group, draw: _lot(draw, group.entry.group_id),
    # Untrained groups first, then the largest effective sample size: the share of a group's tokens that its importance
    # weights leave, as the learner measured it when it last trained the group (`asyncrl/learner/step/group_ess.py`).
    "ess": lambda group, draw: -group.entry.ess if group.entry.trained else -1.0,
}
"""Sort key of a group by `replay.order`; for random orders, of the name of the draw too."""


def ordered(waiting: Sequence[Waiting], order: str, *, seed: int, step: int) -> list[Waiting]:
    """Return the groups in the order in which they should be trained. Depends on its arguments only: a call repeated
    after a restart returns the same."""
    key, draw = ORDERS[order], f"{seed}/{step}"
    return sorted(waiting, key=lambda group: key(group, draw))


def within_window(order: Sequence[Waiting], unfinished: Iterable[int], window: int) -> list[Waiting]:
    """Return the groups of `order` that may be trained now: repeatedly the first that lies in the window, which is
    `window` group ids from the oldest open group on. `unfinished`: ids of the open groups that are not waiting.

    Taking a younger group does not move the window, so at most `W - 1` pass any group (windowed FIFO: section 6.2.4 of
    arXiv 2605.26494; the bound follows torchtitan's `experiments/rl/docs/windowed_fifo.md`). When a group is given to a
    worker at version v, at most `A - 1` others are untrained, `A = (1 + depth) * B`, the older ones included. Before
    its batch of B groups, at most these and the W - 1 that pass it are trained, hence

        staleness <= lag + floor((A - 1 + W - 1) / B) = lag + depth + ceil((W - 1) / B)

    with the worker's `lag` behind v, which `AdmissionSettings.max_lag` limits to what is left of the bound. No group
    gets stuck: once no group is unfinished, all are returned.
    """
    rank = {group.entry.group_id: place for place, group in enumerate(order)}
    ids = sorted([*rank, *unfinished], reverse=True)  # taken from the end: the next to enter the window
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
    """Mean absolute deviation of a group's rewards, `sum_i |r_i - mean(r)| / G`: the mean magnitude of its advantages
    with a mean baseline, hence of its policy gradient before the scores. 0 if all rewards are equal."""
    if header is None:
        return 0.0
    rewards = [header.trajectories[place].reward for place in members_of(header.trajectories)]
    mean = sum(rewards) / len(rewards)
    return sum(abs(reward - mean) for reward in rewards) / len(rewards)


def _lot(draw: str, group_id: int) -> bytes:
    return hashlib.blake2b(f"{draw}/{group_id}".encode(), digest_size=8).digest()
