"""Which trajectories go into which optimizer step and micro-batch: pure arithmetic on headers, the same on every rank.

Example: 2 ranks, 4 groups, 2 updates per batch. Each minibatch has two whole groups. Each rank packs its own share of
them into as many micro-batches as the rank that needs most, so that the collectives match; a rank that has fewer runs
empty ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.balance import minibatches
from asyncrl.losses.inputs import Denominators
from asyncrl.schema import LearnerConfig
from asyncrl.types import StepPlan

Member = tuple[int, int]
"""`(group position, trajectory position)` in a StepPlan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchPlan:
    """This rank's part of one optimizer step."""

    micro_batches: tuple[tuple[Member, ...], ...]
    """The same number on every rank; siblings are in the same one if they fit. Some may be empty."""
    denominators: Denominators
    """Counts over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a micro-batch. A single trajectory may exceed them."""

    tokens: int
    """Tokens that go through the layers; a prompt counts once for the siblings that share it."""
    attention: int
    """Tokens of all its sequences, each with its prompt: those that attention holds queries, keys and values for."""

    @classmethod
    def of(cls, config: LearnerConfig) -> Budget:
        return cls(tokens=config.max_tokens_per_microbatch, attention=config.attention_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Siblings that are packed together and share their prompt."""

    members: tuple[Member, ...]
    tokens: int
    attention: int


def plan_minibatches(
    plan: StepPlan, *, rank: int, updates: int, budget: Budget, in_rows: bool = False
) -> tuple[MinibatchPlan, ...]:
    """Split a step into at most `updates` minibatches of whole groups, and those into micro-batches within `budget`.

    Trajectories without a fresh loss token are left out; a single one longer than the budget gets a micro-batch of its
    own. Groups without any fresh token count in no denominator.

    Args:
        in_rows: every trajectory runs in a row of its own (`Layout.ROWS`), which costs rows times longest row in
            tokens.
    """
    fresh = [[plan.fresh_tokens(trajectory) for trajectory in group.trajectories] for group in plan.groups]
    made = []
    for chosen in minibatches(plan, updates):
        made.append(
            MinibatchPlan(
                micro_batches=micro_batches(plan, chosen, rank=rank, budget=budget, in_rows=in_rows),
                denominators=Denominators(
                    tokens=float(sum(sum(fresh[g]) for g in chosen)),
                    sequences=float(sum(count > 0 for g in chosen for count in fresh[g])),
                    groups=float(len(chosen)),
                ),
            )
        )
    return tuple(made)


def micro_batches(
    plan: StepPlan, groups: Sequence[int], *, rank: int, budget: Budget, in_rows: bool
) -> tuple[tuple[Member, ...], ...]:
    """Micro-batches of `rank` from the trajectories of these groups with a fresh token."""
    fresh: list[dict[int, list[Member]]] = [{g: [] for g in groups} for _ in plan.shards]
    for mine, shard in zip(fresh, plan.shards, strict=True):
        for g, t in shard:
            if g in mine and plan.fresh_tokens(plan.groups[g].trajectories[t]):
                mine[g].append((g, t))

    shares = [[member for g in groups for member in mine[g]] for mine in fresh]
    return _in_rows(plan, shares, rank, budget) if in_rows else _packed(plan, shares, rank, budget)


def _packed(
    plan: StepPlan, shares: Sequence[Sequence[Member]], rank: int, budget: Budget
) -> tuple[tuple[Member, ...], ...]:
    """Micro-batches of `rank`, as many as the rank that needs most."""
    units = [_units(plan, members, budget) for members in shares]
    return _fill(units[rank], max(_bins_needed(each, budget) for each in units))


def _in_rows(
    plan: StepPlan, shares: Sequence[Sequence[Member]], rank: int, budget: Budget
) -> tuple[tuple[Member, ...], ...]:
    """The same for rows that are padded to the longest: rows of similar length go together."""
    cuts = [_cut(plan, members, budget.tokens) for members in shares]
    return (*cuts[rank], *((),) * (max(1, *map(len, cuts)) - len(cuts[rank])))


def _cut(plan: StepPlan, members: Sequence[Member], budget: int) -> list[tuple[Member, ...]]:
    """Split the trajectories, longest first, where one more row would exceed the budget."""

    def length(member: Member) -> int:
        return plan.groups[member[0]].trajectories[member[1]].length

    parts: list[list[Member]] = []
    for member in sorted(members, key=lambda member: (-length(member), member)):
        if not parts or (len(parts[-1]) + 1) * length(parts[-1][0]) > budget:
            parts.append([])
        parts[-1].append(member)
    return [tuple(part) for part in parts]


def _units(plan: StepPlan, members: Sequence[Member], budget: Budget) -> list[_Unit]:
    """Group siblings until the budget is full; the prompt is counted once per unit."""
    units: list[_Unit] = []
    open_members: list[Member] = []
    tokens = attention = 0

    def close() -> None:
        if open_members:
            units.append(_Unit(members=tuple(open_members), tokens=tokens, attention=attention))
            open_members.clear()

    for group, trajectory in sorted(members):
        header = plan.groups[group].trajectories[trajectory]
        completion = header.length - header.prompt_length
        full = tokens + completion > budget.tokens or attention + header.length > budget.attention
        if open_members and (open_members[-1][0] != group or full):
            close()
        tokens = tokens + completion if open_members else header.length
        attention = attention + header.length if open_members else header.length
        open_members.append((group, trajectory))
    close()
    return units


def _bins_needed(units: Sequence[_Unit], budget: Budget) -> int:
    """Smallest number of bins for which longest-first packing keeps every bin of several units within the budget."""
    tokens, attention = sum(unit.tokens for unit in units), sum(unit.attention for unit in units)
    count = max(1, -(-tokens // budget.tokens), -(-attention // budget.attention))
    while count < len(units) and not all(_fits(bin_, budget) for bin_ in _bins(units, count)):
        count += 1
    return min(count, max(1, len(units)))


def _fits(units: Sequence[_Unit], budget: Budget) -> bool:
    tokens, attention = sum(unit.tokens for unit in units), sum(unit.attention for unit in units)
    return len(units) < 2 or (tokens <= budget.tokens and attention <= budget.attention)


def _bins(units: Sequence[_Unit], count: int) -> list[list[_Unit]]:
    """Longest first, each into the bin with the lowest load (LPT)."""
    bins: list[list[_Unit]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for unit in sorted(units, key=lambda unit: (-unit.tokens, unit.members)):
        load, i = heapq.heappop(heap)
        bins[i].append(unit)
        heapq.heappush(heap, (load + unit.tokens, i))
    return bins


def _fill(units: Sequence[_Unit], count: int) -> tuple[tuple[Member, ...], ...]:
    return tuple(tuple(member for unit in bin_ for member in unit.members) for bin_ in _bins(units, count))
