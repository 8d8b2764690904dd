"""What do the ranks of a learner lose by sharing a batch: by waiting for the fullest rank, and by computing a prompt on
several ranks?

    python -m benchmarks.balance [--batches 1000] [--prompt 1024]

Splits batches of groups of log-normal completions with `asyncrl.balance`, as the replay server
does. `packed`: computed tokens over the tokens of the single trajectories, with a prompt counted once per rank and
group. `over_bound`: cost of the fullest rank over a lower bound of any split (an even share of the whole with no prompt
twice, or the costliest trajectory). `by_trajectory`: the same for a split of single trajectories, longest first, each
to the emptiest rank. `karmarkar_karp`: the same for a split of whole groups by the largest differencing method. `ms`:
processor time per batch. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import time
from collections.abc import Sequence

import numpy as np

from asyncrl.balance import balance, cost, lower_bound
from asyncrl.types import TrajectoryHeader
from benchmarks.parts.answer import answer, parse

Groups = Sequence[dict[int, TrajectoryHeader]]
Shards = list[list[tuple[int, int]]]
SHAPES = [(ranks, per_rank, size) for size in (8, 16) for ranks, per_rank in ((1, 32), (8, 4), (64, 4), (64, 1))]
"""Ranks, groups per rank, group size."""


def batch(rng: np.random.Generator, count: int, size: int, prompt: int) -> Groups:
    """Draw `count` groups. Prompts have 0.5 to 1.5 times `prompt` tokens; completions a median of half of `prompt`, at
    most 8 times that median."""
    groups = []
    for _ in range(count):
        asked = int(rng.uniform(0.5, 1.5) * prompt)
        lengths = np.clip(rng.lognormal(np.log(prompt / 2), 0.6, size), 1, prompt * 4).astype(int)
        groups.append({i: header(asked, int(length)) for i, length in enumerate(lengths)})
    return groups


def header(prompt: int, completion: int) -> TrajectoryHeader:
    return TrajectoryHeader(
        length=prompt + completion, prompt_length=prompt, reward=0.0, version_tokens=((0, completion),)
    )


def by_trajectory(groups: Groups, world: int) -> Shards:
    shards: Shards = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world)]
    places = [(-member.length, group, place) for group, of in enumerate(groups) for place, member in of.items()]
    for negative, group, place in sorted(places):
        load, rank = heapq.heappop(loads)
        shards[rank].append((group, place))
        heapq.heappush(loads, (load - negative, rank))
    return shards


def karmarkar_karp(groups: Groups, world: int) -> Shards:
    """Split whole groups over ranks. Starts with one partition per group, and always merges the two partitions whose
    ranks are furthest apart in cost: the costliest rank of one with the cheapest rank of the other."""
    of = [[(0, [])] * (world - 1) + [(cost(group.values()), [index])] for index, group in enumerate(groups)]
    heap = [(-ranks[-1][0], index, ranks) for index, ranks in enumerate(of)]
    heapq.heapify(heap)
    for merged in range(len(groups), 2 * len(groups) - 1):
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        ranks = sorted((a + b, m + n) for (a, m), (b, n) in zip(one, reversed(other), strict=True))
        heapq.heappush(heap, (ranks[0][0] - ranks[-1][0], merged, ranks))
    return [[(group, place) for group in rank for place in groups[group]] for _, rank in heap[0][2]]


def siblings(groups: Groups, shard: Sequence[tuple[int, int]]) -> list[list[TrajectoryHeader]]:
    of: dict[int, list[TrajectoryHeader]] = {}
    for group, place in shard:
        of.setdefault(group, []).append(groups[group][place])
    return list(of.values())


def packed(groups: Groups, shards: Shards) -> float:
    together = [each for shard in shards for each in siblings(groups, shard)]
    tokens = sum(each[0].prompt_length + sum(h.length - h.prompt_length for h in each) for each in together)
    return tokens / sum(h.length for of in groups for h in of.values())


def over_bound(groups: Groups, shards: Shards) -> float:
    fullest = max(sum(cost(each) for each in siblings(groups, shard)) for shard in shards)
    return fullest / lower_bound(groups, len(shards))


def measure(ranks: int, per_rank: int, size: int, given: argparse.Namespace) -> dict[str, float]:
    rng = np.random.default_rng(0)
    rows: list[tuple[float, ...]] = []
    for _ in range(max(2, given.batches // (1 if ranks < 64 else 4))):
        groups = batch(rng, ranks * per_rank, size, given.prompt)
        start = time.process_time()
        shards = balance(groups, ranks)
        seconds = time.process_time() - start
        single = by_trajectory(groups, ranks)
        figures = packed(groups, shards), over_bound(groups, shards), packed(groups, single), over_bound(groups, single)
        rows.append((*figures, over_bound(groups, karmarkar_karp(groups, ranks)), seconds))
    columns = list(zip(*rows, strict=True))
    means = [statistics.mean(column) for column in columns]
    return {
        "packed": round(means[0], 3),
        "over_bound": round(means[1], 3),
        "over_bound_p99": round(float(np.quantile(columns[1], 0.99)), 3),
        "by_trajectory_packed": round(means[2], 3),
        "by_trajectory_over_bound": round(means[3], 3),
        "karmarkar_karp_over_bound": round(means[4], 3),
        "ms": round(1000 * means[5], 2),
        "batches": len(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1000, help="of each shape; of 64 ranks a quarter")
    parser.add_argument("--prompt", type=int, default=1024, help="mean tokens")
    given = parse(parser, {"batches": 2})
    shapes = {f"ranks={r} groups={r * n} size={size}": measure(r, n, size, given) for r, n, size in SHAPES}
    answer("balance", shapes, smoke=given.smoke)


if __name__ == "__main__":
    main()
