from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.balance import shard_step
from asyncrl.learner.batch.plan import Budget, plan_minibatches
from asyncrl.learner.step.metrics import plan_metrics
from asyncrl.schema import LearnerConfig
from asyncrl.types import GroupHeader, StepPlan, TrajectoryHeader


@st.composite
def step_plans(draw: st.DrawFn) -> StepPlan:
    def trajectory() -> TrajectoryHeader:
        runs = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=3))
        prompt = draw(st.integers(1, 12))
        tokens = sum(count for _, count in runs)
        return TrajectoryHeader(length=prompt + tokens, prompt_length=prompt, reward=0.0, version_tokens=tuple(runs))

    groups = tuple(
        GroupHeader(
            group_id=i,
            prompt_index=i,
            attempt=0,
            worker="w",
            trajectories=tuple(trajectory() for _ in range(draw(st.integers(1, 4)))),
        )
        for i in range(draw(st.integers(0, 6)))
    )
    plan = StepPlan(
        step=3,
        policy_version=5,
        groups=groups,
        staleness={version: 5 - version for version in range(6)},
        max_staleness=draw(st.integers(0, 5)),
        shards=(),
    )
    return replace(plan, shards=shard_step(plan, draw(st.integers(1, 3))))


def bounded(tokens: int) -> Budget:
    return Budget(tokens=tokens, attention=2 * tokens)


@settings(max_examples=100, deadline=None)
@given(step_plans(), st.integers(1, 4), st.integers(4, 60))
def test_every_fresh_trajectory_is_trained_exactly_once_over_all_ranks(plan: StepPlan, updates: int, budget: int):
    trained = [
        member
        for rank in range(len(plan.shards))
        for minibatch in plan_minibatches(plan, rank=rank, updates=updates, budget=bounded(budget))
        for members in minibatch.micro_batches
        for member in members
    ]
    fresh = [
        (g, t)
        for g, group in enumerate(plan.groups)
        for t, trajectory in enumerate(group.trajectories)
        if plan.fresh_tokens(trajectory)
    ]
    assert sorted(trained) == fresh


@settings(max_examples=100, deadline=None)
@given(step_plans(), st.integers(1, 4), st.integers(4, 60))
def test_ranks_agree_on_micro_batch_counts_and_denominators(plan: StepPlan, updates: int, budget: int):
    by_rank = [
        plan_minibatches(plan, rank=rank, updates=updates, budget=bounded(budget)) for rank in range(len(plan.shards))
    ]
    shapes = [[(len(m.micro_batches), m.denominators) for m in minibatches] for minibatches in by_rank]
    assert all(shape == shapes[0] for shape in shapes)


@settings(max_examples=100, deadline=None)
@given(step_plans(), st.integers(1, 4), st.integers(4, 60))
def test_denominators_are_the_counts_of_what_is_trained(plan: StepPlan, updates: int, budget: int):
    by_rank = [
        plan_minibatches(plan, rank=rank, updates=updates, budget=bounded(budget)) for rank in range(len(plan.shards))
    ]
    for parts in zip(*by_rank, strict=True):
        members = [member for part in parts for micro_batch in part.micro_batches for member in micro_batch]
        tokens = [plan.fresh_tokens(plan.groups[g].trajectories[t]) for g, t in members]
        counts = parts[0].denominators
        assert (counts.tokens, counts.sequences) == (sum(tokens), len(members))
        assert counts.groups == len({g for g, _ in members})


@settings(max_examples=100, deadline=None)
@given(step_plans(), st.integers(1, 4), st.integers(4, 60))
def test_a_group_is_never_split_over_two_minibatches(plan: StepPlan, updates: int, budget: int):
    homes: dict[int, set[int]] = {}
    for rank in range(len(plan.shards)):
        for i, minibatch in enumerate(plan_minibatches(plan, rank=rank, updates=updates, budget=bounded(budget))):
            for members in minibatch.micro_batches:
                for g, _ in members:
                    homes.setdefault(g, set()).add(i)
    assert all(len(home) == 1 for home in homes.values())


@settings(max_examples=100, deadline=None)
@given(step_plans(), st.integers(4, 60))
def test_a_micro_batch_is_over_budget_only_if_one_trajectory_is(plan: StepPlan, budget: int):
    for rank in range(len(plan.shards)):
        for minibatch in plan_minibatches(plan, rank=rank, updates=1, budget=bounded(budget)):
            for members in minibatch.micro_batches:
                headers = [(g, plan.groups[g].trajectories[t]) for g, t in members]
                shared = {g: max(h.prompt_length for k, h in headers if k == g) for g, _ in members}
                tokens = sum(shared.values()) + sum(h.length - h.prompt_length for _, h in headers)
                assert len(members) == 1 or tokens <= budget or _prompts_differ(headers)
                assert len(members) == 1 or sum(header.length for _, header in headers) <= 2 * budget


def test_a_long_prompt_of_many_completions_is_cut_by_what_attention_holds():
    """64 rows of 8 k tokens in one micro-batch, half a million slots in every layer, were within a budget of 16 k."""
    header = TrajectoryHeader(length=8192 + 100, prompt_length=8192, reward=0.0, version_tokens=((5, 100),))
    group = GroupHeader(group_id=0, prompt_index=0, attempt=0, worker="w", trajectories=(header,) * 64)
    shards = (tuple((0, place) for place in range(64)),)
    plan = StepPlan(step=0, policy_version=5, groups=(group,), staleness={5: 0}, max_staleness=0, shards=shards)
    for given_settings, most in ((LearnerConfig(), 7), (LearnerConfig(max_attention_per_microbatch=1 << 20), 64)):
        (minibatch,) = plan_minibatches(plan, rank=0, updates=1, budget=Budget.of(given_settings))
        assert max(map(len, minibatch.micro_batches)) == most
        assert sum(map(len, minibatch.micro_batches)) == 64


@settings(max_examples=100, deadline=None)
@given(step_plans(), st.integers(1, 4), st.integers(4, 60))
def test_in_rows_a_micro_batch_is_bounded_by_rows_times_the_longest_and_nothing_is_lost(
    plan: StepPlan, updates: int, budget: int
):
    shapes, trained = set(), []
    for rank in range(len(plan.shards)):
        minibatches = plan_minibatches(plan, rank=rank, updates=updates, budget=bounded(budget), in_rows=True)
        shapes.add(tuple(len(minibatch.micro_batches) for minibatch in minibatches))
        for members in (members for minibatch in minibatches for members in minibatch.micro_batches):
            lengths = [plan.groups[g].trajectories[t].length for g, t in members]
            assert len(members) < 2 or len(members) * max(lengths) <= budget
            trained += members
    packed = [
        member
        for rank in range(len(plan.shards))
        for minibatch in plan_minibatches(plan, rank=rank, updates=updates, budget=bounded(budget))
        for members in minibatch.micro_batches
        for member in members
    ]
    assert len(shapes) == 1
    assert sorted(trained) == sorted(packed)


def _prompts_differ(headers: list[tuple[int, TrajectoryHeader]]) -> bool:
    """Drawn siblings may disagree on their prompt's length, which no real group does."""
    lengths: dict[int, set[int]] = {}
    for group, header in headers:
        lengths.setdefault(group, set()).add(header.prompt_length)
    return any(len(different) > 1 for different in lengths.values())


def test_a_step_without_fresh_tokens_has_no_minibatch():
    stale = TrajectoryHeader(length=4, prompt_length=2, reward=1.0, version_tokens=((0, 2),))
    group = GroupHeader(group_id=0, prompt_index=0, attempt=0, worker="w", trajectories=(stale,))
    plan = StepPlan(step=0, policy_version=9, groups=(group,), staleness={0: 9}, max_staleness=4, shards=((),))
    assert plan_minibatches(plan, rank=0, updates=2, budget=bounded(10)) == ()


def test_the_length_of_a_completion_is_what_was_sampled_and_no_observation():
    header = TrajectoryHeader(length=50, prompt_length=3, reward=1.0, version_tokens=((0, 4), (1, 3)))
    group = GroupHeader(group_id=0, prompt_index=0, attempt=0, worker="w", trajectories=(header,))
    plan = StepPlan(step=0, policy_version=1, groups=(group,), staleness={0: 1, 1: 0}, max_staleness=1, shards=())
    assert plan_metrics(plan)["completion/length_mean"] == 7.0


def test_three_equal_rewards_are_alike_though_their_mean_is_rounded() -> None:
    headers = tuple(
        TrajectoryHeader(length=4, prompt_length=3, reward=0.05, version_tokens=((0, 1),)) for _ in range(3)
    )
    group = GroupHeader(group_id=0, prompt_index=0, attempt=0, worker="w", trajectories=headers)
    plan = StepPlan(step=0, policy_version=0, groups=(group,), staleness={0: 0}, max_staleness=0, shards=())
    assert plan_metrics(plan)["reward/zero_variance_groups"] == 1.0
