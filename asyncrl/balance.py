"""Split a batch over learner ranks so that each computes for about the same time and siblings stay together: on one
rank they share the tokens of their prompt.

The shards are not stored: each lease of a plan computes them again from its headers, with the same result.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncrl.types import StepPlan, TrajectoryHeader

Place = tuple[int, int]
"""`(group position, trajectory position)` in a StepPlan."""

UPDATES = "updates_per_batch"
"""Key under which the learner announces this setting on the board, which the journal keeps."""
EQUAL_AT = 40_000
"""Sequence length in tokens at which attention takes as long as all the rest: 12 widths of the model, by operations
(24 w^2 and 2 w L per token and layer). The value for a 7 B model: the replay does not know the model."""
SLACK = (1.02, 1.03, 1.05, 1.08, 1.1, 1.12, 1.14, 1.16, 1.18, 1.25, 1.35, 1.5, 1.75)
"""Factors by which the fullest rank may exceed the lower bound of any split; the first that is feasible is used."""


def shard_step(plan: StepPlan, world: int, updates: int = 1) -> tuple[tuple[Place, ...], ...]:
    """Return the places that each rank trains, ascending; a trajectory without a fresh token is in no shard.

    Args:
        updates: optimizer steps of the batch: each is balanced separately, since the ranks synchronize in it.
    """
    if world == 1:
        return (tuple((group, position) for group in range(len(plan.groups)) for position in _fresh(plan, group)),)
    shards: list[list[Place]] = [[] for _ in range(world)]
    for minibatch in minibatches(plan, updates):
        parts = balance([_fresh(plan, group) for group in minibatch], world)
        for shard, part in zip(shards, parts, strict=True):
            shard += [(minibatch[group], position) for group, position in part]
    return tuple(tuple(sorted(shard)) for shard in shards)


def minibatches(plan: StepPlan, updates: int) -> list[tuple[int, ...]]:
    """Group positions of each of at most `updates` optimizer steps; groups without a fresh token are in none."""
    useful = [place for place, group in enumerate(plan.groups) if any(map(plan.fresh_tokens, group.trajectories))]
    count = min(max(1, updates), len(useful))
    size, longer = divmod(len(useful), count) if count else (0, 0)
    starts = [i * size + min(i, longer) for i in range(count + 1)]
    return [tuple(useful[start:stop]) for start, stop in itertools.pairwise(starts)]


def _fresh(plan: StepPlan, group: int) -> dict[int, TrajectoryHeader]:
    members = enumerate(plan.groups[group].trajectories)
    if plan.all_fresh:
        return {position: trajectory for position, trajectory in members if trajectory.version_tokens}
    return {position: trajectory for position, trajectory in members if plan.fresh_tokens(trajectory) > 0}


def cost(siblings: Iterable[TrajectoryHeader]) -> int:
    """The cost of training siblings on one rank, in tokens times `EQUAL_AT`."""
    tokens, pairs, prompts = 0, 0, set()
    for header in siblings:
        tokens += header.length - header.prompt_length
        pairs += header.length**2
        prompts.add(header.prompt_length)
    return (tokens + sum(prompts)) * EQUAL_AT + pairs


@dataclass(frozen=True, slots=True)
class _Piece:
    """Siblings that stay together, longest first."""

    cost: int
    members: tuple[Place, ...]

    @property
    def order(self) -> tuple[int, tuple[Place, ...]]:
        return -self.cost, self.members


def balance(groups: Sequence[dict[int, TrajectoryHeader]], world: int) -> list[list[Place]]:
    """Return `[world]` lists of places, ascending; `groups[g][t]` is the header at the place `(g, t)`.

    Whole groups go, the costliest first, to the least loaded rank (LPT). A group that would lift a rank above the cap
    is split, and only such groups are; the cap is the lowest multiple of the lower bound in `SLACK` that is feasible.
    Ranks may be left empty. Deterministic: the same headers always give the same result.
    """
    pieces = [_piece(group, members, groups) for group, members in enumerate(groups) if members]
    if world == 1 or not pieces:
        return [sorted(place for piece in pieces for place in piece.members), *([] for _ in range(world - 1))]
    least = lower_bound(groups, world)
    for slack in SLACK:
        shards = _filled(pieces, groups, world, int(least * slack))
        if shards is not None:
            return shards
    whole = _filled(pieces, groups, world, None)
    assert whole is not None
    return whole


def lower_bound(groups: Sequence[dict[int, TrajectoryHeader]], world: int) -> int:
    """Lower bound on the load of the fullest rank: an even share of the total cost with whole groups, or the costliest
    single trajectory."""
    total = sum(cost(members.values()) for members in groups)
    single = max((cost([header]) for members in groups for header in members.values()), default=0)
    return max(-(-total // world), single)


def _piece(group: int, members: Iterable[int], groups: Sequence[dict[int, TrajectoryHeader]]) -> _Piece:
    headers = groups[group]
    ordered = sorted(members, key=lambda position: (-headers[position].length, position))
    return _Piece(cost([headers[position] for position in ordered]), tuple((group, position) for position in ordered))


def _filled(
    pieces: Sequence[_Piece], groups: Sequence[dict[int, TrajectoryHeader]], world: int, cap: int | None
) -> list[list[Place]] | None:
    """Return shards with no rank above `cap`; None if none were found."""
    shards: list[list[Place]] = [[] for _ in range(world)]
    ranks = [(0, 0, rank) for rank in range(world)]
    queue = [(piece.order, piece) for piece in pieces]
    heapq.heapify(queue)
    while queue:
        _, piece = heapq.heappop(queue)
        load, count, rank = heapq.heappop(ranks)
        if cap is not None and load + piece.cost > cap:
            part, rest = _split(piece, groups, cap - load)
            if part is None:
                return None
            heapq.heappush(queue, (rest.order, rest))
            piece = part
        shards[rank] += piece.members
        heapq.heappush(ranks, (load + piece.cost, count + len(piece.members), rank))
    return [sorted(shard) for shard in shards]


def _split(piece: _Piece, groups: Sequence[dict[int, TrajectoryHeader]], room: int) -> tuple[_Piece | None, _Piece]:
    """Return the part of `piece` that fits into `room`, longest first, and the rest."""
    group = piece.members[0][0]
    taken: list[int] = []
    left: list[int] = []
    prompts: set[int] = set()
    for _, position in piece.members:
        header = groups[group][position]
        alone = cost([header])
        # Updated incrementally: `cost` of all taken siblings for each candidate takes seconds for 4096 siblings.
        more = alone - header.prompt_length * EQUAL_AT if header.prompt_length in prompts else alone
        if more <= room:
            room -= more
            prompts.add(header.prompt_length)
            taken.append(position)
        else:
            left.append(position)
    if not taken:
        return None, piece
    return _piece(group, taken, groups), _piece(group, left, groups)
