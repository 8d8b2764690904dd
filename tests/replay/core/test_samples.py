"""Admission by sample (`replay.admission=sample`): what a member of a group holds, and when all of them are a group."""

from __future__ import annotations

import pytest

from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.types import Assignment, DropReason, StalePolicy
from tests.replay.helpers import header, settings
from tests.replay.play import Play


def by_sample(**changes) -> Play:
    return Play(**{"by_sample": True, "groups_per_step": 1, "group_size": 4, "pipeline_depth": 1} | changes)


def insert(play: Play, order: Assignment, *runs: tuple[int, int]) -> str:
    made = header(order, *(runs or ((play.version, 4),)), group_size=1)
    return play.core.insert("w", "a", made, b"p").status


def ids(orders: list[Assignment]) -> list[int]:
    return [order.group_id for order in orders]


def test_members_are_ordered_by_themselves_under_one_prompt_each_with_a_seed_of_its_own() -> None:
    orders = by_sample().acquire()
    assert ids(orders) == list(range(8)) and all(order.single and order.attempt == 0 for order in orders)
    assert [order.prompt_index for order in orders] == [0] * 4 + [1] * 4
    assert len({order.seed for order in orders}) == 8


def test_a_straggler_holds_its_own_place_and_not_those_of_its_siblings() -> None:
    """Two groups may be in flight. With seven of eight members there by group one place would be free; by sample there
    are seven: a third group begins, and a fourth does not fit."""
    play = by_sample(max_in_flight=2, pipeline_depth=2, max_staleness=2, groups_per_step=2)
    orders = play.acquire()
    assert ids(orders) == list(range(8))
    for order in orders[1:4]:
        insert(play, order)
    assert play.acquire() == [], "three places, and a group begins with all of its own"
    insert(play, orders[4])
    assert ids(play.acquire()) == [8, 9, 10, 11]
    for order in orders[5:]:
        insert(play, order)
    assert play.acquire() == [], "the straggler and the third group: five of eight places"
    assert play.core.state.in_flight == 5


def test_a_group_keeps_its_slots_until_it_is_trained_even_if_it_lost_members() -> None:
    play = by_sample(min_group_size=2, max_attempts=1)
    for order in play.acquire()[:4]:
        if order.group_id % 2:
            play.core.fail("w", "a", order.group_id, order.attempt, DropReason.FAILED_REWARD)
        else:
            insert(play, order)
    assert play.acquire() == []
    plan, _ = play.train()
    assert [len(group.trajectories) for group in plan.groups] == [2]
    assert play.core.meter.missing_members == 2
    play.load()
    assert ids(play.acquire()) == [8, 9, 10, 11]


def test_siblings_of_several_workers_and_versions_are_one_group_in_the_order_of_their_ids() -> None:
    play = by_sample(max_staleness=3, groups_per_step=1)
    play.core.hello("v", "b", 0)
    first = play.acquire(2)
    others = [order for _ in range(3) for order in play.core.acquire("v", "b", 2).assignments]
    assert ids([*first, *others]) == list(range(8))
    straggler, second_group = first[0], others[2:]
    for order in reversed(second_group):
        assert play.core.insert("v", "b", header(order, (0, 2), group_size=1), b"p").status == "accepted"
    for order in others[:2]:
        assert play.core.insert("v", "b", header(order, (0, 3), group_size=1), b"p").status == "accepted"
    insert(play, first[1], (0, 4))
    plan, _ = play.train()
    assert [group.group_id for group in plan.groups] == [4], "whole before the one that began first"
    assert insert(play, straggler, (0, 2), (1, 5)) == "accepted"
    plan, _ = play.train()
    (group,) = plan.groups
    assert (group.group_id, group.prompt_index, group.worker) == (0, 0, "w")
    runs = [member.version_tokens for member in group.trajectories]
    assert runs == [((0, 2), (1, 5)), ((0, 4),), ((0, 3),), ((0, 3),)]
    assert plan.staleness == {0: 1, 1: 0}


@pytest.mark.parametrize("policy", [StalePolicy.MASK, StalePolicy.DROP])
def test_a_group_whose_members_straddle_the_bound_is_judged_as_one(policy: StalePolicy) -> None:
    """`mask`: an old member stays, for its reward, without a token. `drop`: all go."""
    play = by_sample(stale_policy=policy, max_staleness=1, pipeline_depth=1)
    for step in range(2):
        play.load()
        orders = play.acquire()
        mine = [order for order in orders if order.prompt_index != 0]
        if not step:
            early, late = orders[:3], orders[3]
            for order in early:
                insert(play, order, (0, 2))
        for order in mine:
            insert(play, order)
        play.train()
    assert insert(play, late, (0, 1), (1, 1)) == "accepted"
    plan = play.core.lease(play.step)
    if policy is StalePolicy.DROP:
        assert plan is None and play.core.state.ledger.dropped[DropReason.STALE] == 4
        return
    assert plan is not None
    assert [plan.fresh_tokens(member) for member in plan.groups[0].trajectories] == [0, 0, 0, 1]


def test_too_few_members_are_dropped_with_their_reason_and_what_they_held_is_free() -> None:
    play = by_sample(max_attempts=1, max_in_flight=2)
    orders = play.acquire()
    for order in orders[:3]:
        insert(play, order)
    play.core.fail("w", "a", orders[3].group_id, 0, DropReason.FAILED_GENERATION)
    assert play.core.lease(0) is None
    ledger = play.core.state.ledger
    assert ledger.dropped_by_name() == {"failed_generation": 1, "incomplete": 3}
    assert ids(play.acquire()) == [8, 9, 10, 11]


def test_a_dead_workers_members_go_to_another_and_what_they_finished_stays() -> None:
    play = by_sample(pipeline_depth=0, max_staleness=1)
    orders = play.acquire()
    for order in orders[:3]:
        insert(play, order)
    play.core.hello("v", "b", 0)
    play.core.hello("w", "c", 0)
    (again,) = play.core.acquire("v", "b", 8).assignments
    assert (again.group_id, again.attempt, again.single) == (3, 1, True)
    assert play.core.insert("v", "b", header(again, (0, 4), group_size=1), b"p").status == "accepted"
    plan, _ = play.train()
    assert [len(group.trajectories) for group in plan.groups] == [4]


def test_a_member_comes_alone() -> None:
    play = by_sample()
    reply = play.core.insert("w", "a", header(play.acquire()[0], (0, 4), group_size=2), b"p")
    assert (reply.status, reply.reason) == ("rejected", "a group has 1 members, not 2")


def test_a_restart_and_a_checkpoint_know_whose_sibling_each_is() -> None:
    play = by_sample()
    orders = play.acquire()
    for order in orders[1:5]:
        insert(play, order)
    again = ReplayState()
    again.load(play.core.state.image())
    assert again.image() | {"applied": 0} == play.core.state.image() | {"applied": 0}
    assert [entry.group_id for entry in again.ledger.together(2)] == [0, 1, 2, 3]
    for order in orders[:1] + orders[5:]:
        insert(play, order)
    play.train()
    fresh = by_sample()
    fresh.core.restore(step=0, policy_version=1, snapshot=play.core.snapshot(), incarnation="l2")
    fresh.core.publish(policy_version=2, parent=1)
    fresh.version, fresh.step = 2, 1
    fresh.load()
    orders = fresh.acquire(4)
    assert ids(orders) == [4, 5, 6, 7] and all(order.single for order in orders)
    for order in orders:
        insert(fresh, order)
    assert [group.group_id for group in fresh.train()[0].groups] == [4]


def test_a_run_that_is_resumed_by_group_or_by_sample_ends_what_it_began_the_other_way() -> None:
    for before, begun in ((True, 8), (False, 2)):
        play = by_sample(by_sample=before)
        orders = play.acquire()
        assert len(orders) == begun
        play.core.run.settings = settings(by_sample=not before, groups_per_step=1, group_size=4, pipeline_depth=1)
        assert play.acquire() == []
        for order in orders:
            made = header(order, (0, 4), group_size=1 if order.single else 4)
            assert play.core.insert("w", "a", made, b"p").status == "accepted"
        assert play.acquire() == [], "two groups are there, however they are counted"
        play.train()
        play.load()
        assert {order.single for order in play.acquire()} == {not before}
        assert [len(group.trajectories) for group in play.train()[0].groups] == [4]


def test_what_was_begun_by_sample_is_trained_once_even_if_the_resumed_run_uses_groups_again() -> None:
    """Its members have ages of their own: some could be used again when their siblings are too old for it."""
    play = by_sample(group_size=2, max_staleness=2)
    first, second = play.acquire(2)
    others = play.acquire()
    again = {"max_times_sampled": 3, "group_size": 2, "max_staleness": 2}
    play.core.run.settings = settings(groups_per_step=1, pipeline_depth=1, **again)
    insert(play, first)
    for order in others:
        insert(play, order)
    play.train()
    play.load()
    insert(play, second, (1, 4))
    assert play.core.lease(1) is not None
    play.core.trained(step=1, policy_version=2)
    assert not play.core.state.buffer.waiting
