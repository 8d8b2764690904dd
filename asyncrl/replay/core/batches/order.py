"""The order in which waiting groups are trained (`replay.order`), and the window (`replay.window`) that keeps any such
order close to the order of admission.

The order matters only while more groups wait than a batch needs, that is with `pipeline_depth` > 0. For every order,
groups over the staleness bound are removed first, and ties go to the group that came first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from asyncrl.replay.core.durable.ledger import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A group that may be trained."""

    entry: Entry
    staleness: int
    """Staleness of its oldest loss token at the time of training, in versions."""
    slack: int
    """Steps that it can still wait and be within the bound."""


def ordered(waiting: Sequence[Waiting], order: str) -> list[Waiting]:
    """Return the groups in the order in which they should be trained: `fifo` keeps them as they came, `freshest` puts
    the least stale first, so that those passed over age until they are dropped: less bias, more waste."""
    return sorted(waiting, key=lambda group: group.staleness) if order == "freshest" else list(waiting)


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
