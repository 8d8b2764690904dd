"""Dynamic sampling: what filters drop is refilled exactly, over long runs and whatever the window."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from asyncrl.types import DropReason
from tests.replay.helpers import header
from tests.replay.play import Play

FILTERS = (DropReason.FILTERED_ZERO_VARIANCE, DropReason.OVER_LENGTH, DropReason.FILTERED)


class Refill(Play):
    """Asks for all there is, and drops a share of it."""

    def __init__(self, seed: int, share: float, **changes) -> None:
        super().__init__(seed=seed, **changes)
        self.random, self.share = Random(seed), share
        self.dropped = dict.fromkeys(FILTERS, 0)
        self.seen: list[int] = []
        """Prompts, in the order they were handed out."""

    def fill(self) -> None:
        """Until nothing more may be started."""
        while orders := self.acquire(self.random.randint(1, 5)):
            self.seen += [order.prompt_index for order in orders]
            self.random.shuffle(orders)
            for order in orders:
                if self.random.random() < self.share:
                    reason = self.random.choice(FILTERS)
                    self.dropped[reason] += 1
                    self.core.fail("w", "a", order.group_id, order.attempt, reason, "keep: dull")
                else:
                    assert self.insert(order) == "accepted"


@pytest.mark.parametrize(
    ("share", "changes"),
    [
        (0.0, {}),
        (0.3, {"pipeline_depth": 0}),
        (0.5, {}),
        (0.9, {"groups_per_step": 3, "pipeline_depth": 2}),
        (0.5, {"groups_per_step": 5, "max_in_flight": 2}),
    ],
)
def test_every_filtered_group_is_replaced_by_exactly_one_other(share: float, changes: dict) -> None:
    play = Refill(3, share, **changes)
    settings, ledger = play.core.run.settings, play.core.state.ledger
    window = (1 + settings.pipeline_depth) * settings.groups_per_step
    for step in range(400):
        play.fill()
        dropped = sum(play.dropped.values())
        assert {reason: ledger.dropped[reason] for reason in FILTERS} == play.dropped
        assert ledger.admitted - dropped == step * settings.groups_per_step + window, "refilled too much or too little"
        plan, reply = play.train()
        play.load()
        assert len(plan.groups) == settings.groups_per_step
    assert play.seen == list(range(ledger.admitted)), "a prompt was skipped or came twice"
    assert reply.metrics["replay/admitted"] == ledger.admitted
    named = reply.metrics.get("replay/filtered_by_keep", 0.0)
    assert named == reply.metrics.get("replay/dropped_filtered", 0.0) == play.dropped[DropReason.FILTERED]


def test_a_prompt_that_was_filtered_is_not_put_back() -> None:
    """A prompt whose answers are all right is filtered each time: put back, it would come round for ever."""
    play = Play()
    first, *others = play.acquire()
    play.core.fail("w", "a", first.group_id, first.attempt, DropReason.FILTERED, "keep")
    assert not play.core.state.readmitted
    assert [order.prompt_index for order in play.acquire()] == [max(order.prompt_index for order in others) + 1]


def test_names_that_a_worker_invents_are_not_counted_without_end() -> None:
    play = Play()
    for number in range(100):
        for order in play.acquire():
            name = f"filter_{number}" if number % 2 else f"replay/admitted {number}"
            play.core.fail("w", "a", order.group_id, order.attempt, DropReason.FILTERED, name)
    filtered = play.core.meter.filtered
    assert len(filtered) == 16
    assert all(name.startswith("filter_") for name in filtered)


def test_a_worker_s_word_incomplete_is_final_and_the_server_s_own_is_not() -> None:
    """The worker has tried the members as often as a group may be tried; a deadline that passed may be its fault."""
    play = Play(group_timeout_s=5.0)
    first, second = play.acquire()[:2]
    play.core.fail("w", "a", first.group_id, first.attempt, DropReason.INCOMPLETE, "1 of 2")
    assert play.core.state.ledger.dropped[DropReason.INCOMPLETE] == 1
    play.core.expire()
    play.clock.now = 6.0
    play.core.heartbeat("w", "a", {})
    play.core.expire()
    again = next(order for order in play.acquire() if order.group_id == second.group_id)
    assert again.attempt == second.attempt + 1


@pytest.mark.parametrize(("members", "status"), [(1, "rejected"), (2, "accepted"), (3, "accepted"), (4, "rejected")])
def test_a_group_may_be_short_of_the_members_that_the_settings_allow(members: int, status: str) -> None:
    play = Play(group_size=3, min_group_size=2)
    order = play.acquire(1)[0]
    made = header(order, (0, 4), group_size=members)
    reply = play.core.insert("w", "a", made, b"p")
    assert reply.status == status
    if status == "rejected":
        assert f"a group has 2 to 3 members, not {members}" in reply.reason
    else:
        assert play.core.run.metrics()["replay/missing_members"] == 3 - members


@pytest.mark.parametrize("branched", [(0, 0, 1), (0, 1, 1, 1, 0)])
def test_branches_are_no_members(branched: tuple[int, ...]) -> None:
    """Two are wanted, and two there are, however many conversations each had."""
    play = Play(group_size=2)
    order = play.acquire(1)[0]
    (one, _) = header(order, (0, 4)).trajectories
    made = replace(header(order, (0, 4)), trajectories=tuple(replace(one, branch=bool(each)) for each in branched))
    reply = play.core.insert("w", "a", made, b"p")
    assert (reply.status, made.members) == ("accepted", 2)
    assert play.core.run.metrics()["replay/missing_members"] == 0
    alone = replace(made, trajectories=(one, *[replace(one, branch=True)] * 4), group_id=play.acquire(1)[0].group_id)
    assert play.core.insert("w", "a", replace(alone, prompt_index=1), b"p").reason == "a group has 2 members, not 1"
