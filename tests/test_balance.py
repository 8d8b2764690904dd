from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.balance import (
    EQUAL_AT,
    _piece,
    _split,
    balance,
    cost,
    lower_bound,
    minibatches,
    shard_step,
)
from asyncrl.types import GroupHeader, StepPlan, TrajectoryHeader
from benchmarks.balance import batch, over_bound, packed

LENGTHS = st.tuples(st.integers(1, 300), st.integers(1, 3000))


def header(prompt: int, completion: int, version: int = 1) -> TrajectoryHeader:
    return TrajectoryHeader(
        length=prompt + completion, prompt_length=prompt, reward=0.0, version_tokens=((version, completion),)
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(LENGTHS, min_size=1, max_size=8), max_size=12), st.integers(1, 9))
def test_every_trajectory_is_on_one_rank_and_none_is_fuller_than_whole_groups_would_make_it(groups, world: int) -> None:
    drawn = [{i: header(*lengths) for i, lengths in enumerate(group)} for group in groups]
    shards = balance(drawn, world)
    assert len(shards) == world
    assert sorted(itertools.chain(*shards)) == [(g, t) for g, members in enumerate(drawn) for t in members]
    assert all(shard == sorted(shard) for shard in shards)
    assert shards == balance(drawn, world)
    loads = [
        sum(cost(drawn[g][t] for _, t in members) for g, members in itertools.groupby(shard, lambda place: place[0]))
        for shard in shards
    ]
    # LPT of whole groups has no rank above an even share and the costliest group.
    costliest = max((cost(members.values()) for members in drawn), default=0)
    assert max(loads) <= lower_bound(drawn, world) + costliest


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize(("ranks", "count"), [(1, 32), (8, 32), (64, 256), (64, 64)])
def test_siblings_share_their_prompt_on_any_number_of_ranks(ranks: int, count: int, size: int) -> None:
    rng = np.random.default_rng(7)
    for _ in range(4):
        groups = batch(rng, count, size, 1024)
        shards = balance(groups, ranks)
        # A group per rank is the worst: about half of them are too much for a rank and are split.
        assert packed(groups, shards) <= (0.5 if count > ranks else 0.53)
        if count > ranks:
            assert over_bound(groups, shards) <= 1.05


def test_a_group_that_is_too_much_for_a_rank_is_split_and_the_others_are_not() -> None:
    groups = [{i: header(100, 1000) for i in range(8)}, *({0: header(100, 400)} for _ in range(4))]
    first, second = balance(groups, 2)
    assert {g for g, _ in first} & {g for g, _ in second} == {0}
    assert abs(len([1 for g, _ in first if g == 0]) - 4) <= 1


def test_a_group_goes_to_as_many_ranks_as_it_has_members_where_there_is_no_other() -> None:
    groups = [{i: header(10, 1000) for i in range(4)}]
    assert sorted(map(len, balance(groups, 4))) == [1, 1, 1, 1]
    assert sorted(map(len, balance(groups, 6))) == [0, 0, 1, 1, 1, 1]


def test_a_long_trajectory_costs_more_than_its_tokens_and_a_shared_prompt_once() -> None:
    assert cost([header(100, 20_000)]) > 2 * cost([header(100, 9_950)])
    together, alone = cost([header(1000, 10)] * 3), cost([header(1000, 10)])
    assert together < 1.2 * alone


def plan_of(groups: list[list[TrajectoryHeader]]) -> StepPlan:
    return StepPlan(
        step=0,
        policy_version=9,
        groups=tuple(
            GroupHeader(group_id=i, prompt_index=i, attempt=0, worker="w", trajectories=tuple(members))
            for i, members in enumerate(groups)
        ),
        staleness={0: 9, 1: 1},
        max_staleness=4,
        shards=(),
    )


def test_each_optimizer_step_of_a_batch_is_balanced_of_its_own() -> None:
    plan = plan_of([[header(50, 100 * (g + 1))] * 4 for g in range(16)])
    shards = shard_step(plan, 4, updates=4)
    assert minibatches(plan, 4) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    for groups in minibatches(plan, 4):
        tokens = [sum(plan.groups[g].trajectories[t].length for g, t in shard if g in groups) for shard in shards]
        assert max(tokens) <= 1.35 * sum(tokens) / 4, "one of the ranks keeps the others waiting in this step"


def test_a_trajectory_without_a_fresh_token_is_in_no_shard_and_its_group_in_no_step_for_its_sake() -> None:
    stale = header(5, 5, version=0)
    plan = plan_of([[header(5, 5), stale], [stale, stale], [header(5, 5)]])
    assert sorted(itertools.chain(*shard_step(plan, 2))) == [(0, 0), (2, 0)]
    assert minibatches(plan, 3) == [(0,), (2,)]
    assert shard_step(plan_of([[stale]]), 2) == ((), ())


@given(
    st.lists(st.tuples(st.integers(2, 60), st.integers(1, 3)), min_size=1, max_size=30),
    st.integers(0, 400),
)
def test_as_much_of_a_group_is_split_off_as_fits_by_what_all_of_it_costs(
    members: list[tuple[int, int]], room: int
) -> None:
    group = {
        position: TrajectoryHeader(length=length + prompt, prompt_length=prompt, reward=0.0, version_tokens=((0, 1),))
        for position, (length, prompt) in enumerate(members)
    }
    order = sorted(group, key=lambda position: (-group[position].length, position))
    fitting: list[int] = []
    for position in order:
        if cost([group[each] for each in (*fitting, position)]) <= room * EQUAL_AT:
            fitting.append(position)
    part, rest = _split(_piece(0, group, [group]), [group], room * EQUAL_AT)
    assert [position for _, position in part.members] == fitting if part else not fitting
    assert [position for _, position in rest.members] == [each for each in order if each not in fitting]
