"""Which waiting groups are trained, how often, and when a straggler's assignment goes to another worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncrl.replay.core.batches.order import Waiting, ordered
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.ledger import Entry
from asyncrl.types import Assignment, DropReason, GroupHeader
from tests.replay.helpers import header
from tests.replay.play import Play

ORDER = Assignment(group_id=0, prompt_index=0, attempt=0, seed=0, policy_version=0)


def rewarded(assignment: Assignment, *rewards: float, version: int = 0) -> GroupHeader:
    made = header(assignment, (version, 4))
    trajectories = tuple(replace(made.trajectories[0], reward=reward) for reward in rewards)
    return replace(made, trajectories=trajectories)


def waiting(group_id: int, staleness: int, *rewards: float) -> Waiting:
    made = rewarded(replace(ORDER, group_id=group_id), *rewards)
    entry = Entry(group_id=group_id, prompt_index=group_id, header=made)
    return Waiting(entry=entry, staleness=staleness, slack=4 - staleness)


GROUPS = [waiting(0, 2, 1, 1), waiting(1, 0, 0, 1), waiting(2, 1, 0, 3), waiting(3, 0, 1, 0)]


@pytest.mark.parametrize(("order", "ids"), [("fifo", [0, 1, 2, 3]), ("freshest", [1, 3, 2, 0])])
def test_each_order_puts_first_what_it_says(order, ids) -> None:
    chosen = ordered(GROUPS, order)
    assert [group.entry.group_id for group in chosen] == ids


class Filled(Play):
    """The worker makes every group at the newest version, each with rewards of its own."""

    def __init__(self, **changes) -> None:
        self.events: list[ev.Event] = []
        super().__init__(**changes, journal=self.events.append)

    def fill(self) -> int:
        self.load()
        orders = self.acquire(64)
        for order in orders:
            self.core.insert("w", "a", rewarded(order, 0.0, float(order.group_id), version=self.version), b"p")
        return len(orders)

    def train_ids(self) -> list[int]:
        plan = self.core.lease(self.step)
        if plan is None:  # What waited was over-age, and is retired or dropped now.
            assert self.fill()
            plan = self.core.lease(self.step)
        assert plan is not None
        self.step, self.version = self.step + 1, self.version + 1
        self.core.trained(step=self.step - 1, policy_version=self.version)
        return [group.group_id for group in plan.groups]


def test_a_group_is_trained_as_often_as_asked_and_the_rollouts_slow_down_to_that() -> None:
    play = Filled(max_times_sampled=3, max_staleness=8, groups_per_step=2)
    made, trained = 0, []
    for _ in range(30):
        made += play.fill()
        trained += play.train_ids()
        if play.step % 4 == 0:
            play.core.commit(play.step - 1)
    uses = [trained.count(group_id) for group_id in range(max(trained) - 6)]
    assert set(uses) == {3}
    assert made <= len(trained) / 3 + 4
    assert play.core.state.ledger.admitted == made


def test_a_group_that_gets_over_age_between_two_uses_counts_as_trained_and_not_as_dropped() -> None:
    play = Filled(max_times_sampled=9, max_staleness=1, pipeline_depth=1, groups_per_step=2)
    for _ in range(12):
        play.fill()
        play.train_ids()
    assert sum(isinstance(event, ev.Retired) for event in play.events) >= 2
    assert play.core.state.ledger.dropped[DropReason.STALE] == 0
    assert sum(play.core.state.ledger.counts.values()) == play.core.state.ledger.admitted


def test_a_restored_learner_gets_reused_groups_in_the_same_steps_again() -> None:
    play = Filled(max_times_sampled=2, max_staleness=8, groups_per_step=2)
    play.fill()
    play.train_ids()
    play.core.commit(0)
    before = []
    for _ in range(6):
        play.fill()
        before.append(play.train_ids())
    assert len({group_id for step in before for group_id in step}) < 12, "nothing was used twice"
    play.core.restore(step=0, policy_version=1, snapshot=None, incarnation="second")
    play.version = play.core.state.tree.newest + 1
    play.core.publish(policy_version=play.version, parent=1)
    play.step = 1
    again = []
    for _ in range(6):
        play.fill()
        again.append(play.train_ids())
    assert again == before


def test_a_run_that_is_resumed_with_fewer_uses_trains_none_more_often() -> None:
    play = Filled(max_times_sampled=2, max_staleness=8, groups_per_step=2)
    play.fill()
    assert play.train_ids() == [0, 1]
    play.core.run.settings = replace(play.core.run.settings, max_times_sampled=1)
    play.core.restore(step=0, policy_version=1, snapshot=None, incarnation="second", settings="others")
    play.version = play.core.state.tree.newest + 1
    play.core.publish(policy_version=play.version, parent=1)
    trained = []
    for _ in range(4):
        play.fill()
        trained += play.train_ids()
    assert trained == [2, 3, 4, 5, 6, 7, 8, 9]
    assert {event.group_id for event in play.events if isinstance(event, ev.Retired)} == {0, 1}


def test_a_payload_is_kept_until_the_last_step_with_it_is_committed() -> None:
    play = Filled(max_times_sampled=2, max_staleness=8, pipeline_depth=0, groups_per_step=2)
    play.fill()
    assert play.train_ids() == play.train_ids() == [0, 1]
    play.core.commit(0)
    assert play.core.state.buffer.nbytes == 20
    play.core.commit(1)
    assert play.core.state.buffer.nbytes == 0
    assert play.core.state.ledger.committed == 2


def test_an_order_held_for_too_long_goes_to_another_and_the_late_group_is_fenced() -> None:
    play = Filled(group_timeout_s=30.0, max_attempts=2)
    play.core.served("w", "a", 0, "f")
    (slow,) = play.core.acquire("w", "a", 1).assignments
    play.core.expire()
    play.clock.now = 29.0
    play.core.heartbeat("w", "a", {})
    play.core.expire()
    assert play.core.state.pending == {}
    play.clock.now = 31.0
    play.core.heartbeat("w", "a", {})
    play.core.expire()
    play.core.hello("other", "b")
    play.core.served("other", "b", 0, "f")
    again = play.core.acquire("other", "b", 1).assignments[0]
    assert (again.group_id, again.attempt) == (slow.group_id, 1)
    play.core.expire()
    assert play.core.insert("w", "a", header(slow, (0, 4)), b"late").status == "fenced"
    assert play.core.state.ledger.dropped[DropReason.INCOMPLETE] == 0, "each attempt has the whole time"
    play.clock.now = 62.0
    play.core.heartbeat("other", "b", {})
    play.core.expire()
    assert play.core.state.ledger.dropped[DropReason.INCOMPLETE] == 1
