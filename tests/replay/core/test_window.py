"""Windowed FIFO (`replay.window`): what may pass a straggler, how old that makes it, and for whom the learner waits."""

from __future__ import annotations

import pytest

from asyncrl.replay.core.batches.order import Waiting, within_window
from asyncrl.replay.core.durable.ledger import Entry
from tests.replay.play import Play


def ids(order: list[int], unfinished: list[int], window: int) -> list[int]:
    waiting = [Waiting(entry=Entry(group_id=group, prompt_index=0), staleness=0, slack=0) for group in order]
    return [group.entry.group_id for group in within_window(waiting, unfinished, window)]


@pytest.mark.parametrize(
    ("order", "unfinished", "window", "taken"),
    [
        ([0, 1, 3, 4, 5], [2], 1, [0, 1]),
        ([0, 1, 3, 4, 5], [2], 3, [0, 1, 3, 4]),
        ([3, 4, 5], [2], 3, [3, 4]),
        ([9, 12], [2], 3, []),
        ([5, 3, 1], [], 1, [1, 3, 5]),
        # What is passed over by another order holds the window too: 6 is in only once 4 and 5 are taken.
        ([6, 5, 4, 7], [], 2, [5, 4, 6, 7]),
        ([], [1], 2, []),
    ],
)
def test_the_window_begins_at_the_oldest_open_group_and_taking_another_moves_it_not(
    order, unfinished, window, taken
) -> None:
    assert ids(order, unfinished, window) == taken


def test_a_straggler_is_passed_by_two_and_trained_at_the_bound_exactly() -> None:
    """B = 2, depth 1, hence A = 4; W = 3: a group may be floor((4 + 3 - 2) / 2) = 2 steps old."""
    play = Play(groups_per_step=2, pipeline_depth=1, max_staleness=2, window=3)
    *older, straggler = play.acquire()
    assert [order.group_id for order in (*older, straggler)] == [0, 1, 2, 3]
    for order in older:
        play.insert(order)
    play.train()
    play.load()
    passing = play.acquire()
    assert [order.group_id for order in passing] == [4, 5]
    for order in passing:
        play.insert(order)
    plan, _ = play.train()
    assert [group.group_id for group in plan.groups] == [2, 4]
    play.load()
    blocked = play.acquire()
    for order in blocked:
        play.insert(order)
    assert play.core.lease(2) is None, "6 and 7 are beyond the window"
    assert "window=3 holds the step for groups in flight" in play.core.explain(2)
    play.insert(straggler, (0, 4))
    plan, _ = play.train()
    assert [group.group_id for group in plan.groups] == [3, 5]
    assert plan.staleness[0] == 2


def test_a_worker_whose_weights_lag_by_what_the_window_needs_gets_no_order() -> None:
    for window, given in ((0, 2), (1, 2), (3, 0)):
        play = Play(groups_per_step=2, pipeline_depth=1, max_staleness=2, window=window)
        play.whole_step()
        assert len(play.acquire()) == given, window
