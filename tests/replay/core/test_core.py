"""The workers' side of the core, and what both sides share."""

from __future__ import annotations

import pytest

from asyncrl.errors import FencedError, LedgerError, ReplayError
from asyncrl.evaluation.orders import EvalResult
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.ledger import Entry, GroupState, Ledger
from asyncrl.replay.core.requests.rollouts import UnknownPeer
from asyncrl.types import DropReason
from tests.replay.helpers import Clock, header, settings
from tests.replay.play import Play


def test_nothing_is_admitted_before_weights_are_published() -> None:
    core = ReplayCore(settings(), Clock())
    core.hello("w", "a")
    assert "not published" in core.acquire("w", "a", 4).waiting_for
    assert core.lease(0) is None


def test_the_window_is_one_step_and_the_depth() -> None:
    play = Play(groups_per_step=2, pipeline_depth=1)
    orders = play.acquire()
    assert [order.group_id for order in orders] == [0, 1, 2, 3]
    assert [order.prompt_index for order in orders] == [0, 1, 2, 3]
    assert "learner" in play.core.acquire("w", "a", 4).waiting_for or play.acquire() == []


def test_seeds_depend_on_run_group_and_attempt_only() -> None:
    first, again, other = Play(seed=1).acquire(), Play(seed=1).acquire(), Play(seed=2).acquire()
    assert first == again
    assert len({order.seed for order in (*first, *other)}) == len(first) + len(other)


def test_a_worker_that_lags_gets_nothing_until_it_has_loaded() -> None:
    play = Play(max_staleness=1, pipeline_depth=1, groups_per_step=1)
    play.insert(play.acquire(1)[0])
    play.train()
    assert "version 1" in play.core.acquire("w", "a", 4).waiting_for
    play.load()
    assert play.acquire()


def test_the_first_of_two_workers_to_ask_does_not_take_everything() -> None:
    play = Play(groups_per_step=4, pipeline_depth=1)
    play.core.hello("v", "b", 0)
    play.core.served("v", "b", 0, "f")
    assert len(play.acquire(8)) == 4
    assert len(play.core.acquire("v", "b", 8).assignments) == 4


def test_an_insert_may_be_repeated_but_not_by_another_attempt() -> None:
    play = Play()
    order = play.acquire(1)[0]
    assert play.insert(order) == "accepted"
    assert play.insert(order) == "duplicate"
    play.core.hello("w2", "b")
    assert play.core.insert("w2", "b", header(order, (0, 4)), b"p").status == "fenced"


def test_a_replaced_worker_is_fenced_and_its_groups_go_on_under_the_same_ids() -> None:
    play = Play()
    order = play.acquire(1)[0]
    play.core.hello("w", "newer")
    with pytest.raises(FencedError):
        play.insert(order)
    with pytest.raises(FencedError):
        play.core.hello("w", "a")
    play.core.served("w", "newer", 0, "f")
    again = play.core.acquire("w", "newer", 1).assignments[0]
    assert (again.group_id, again.prompt_index, again.attempt) == (order.group_id, order.prompt_index, 1)
    assert again.seed != order.seed
    assert play.core.insert("w", "newer", header(order, (0, 4)), b"p").status == "fenced"
    assert play.core.insert("w", "newer", header(again, (0, 4)), b"p").status == "accepted"


def test_a_silent_worker_loses_its_groups_and_may_come_back() -> None:
    play = Play()
    order = play.acquire(1)[0]
    play.clock.now = 11.0
    assert play.core.expire() == ["w"]
    with pytest.raises(UnknownPeer):
        play.insert(order)
    play.core.hello("w", "a", 0)
    assert play.insert(order) == "fenced"
    assert play.acquire(1)[0].attempt == 1


@pytest.mark.parametrize("reason", [DropReason.FAILED_GENERATION, DropReason.FAILED_REWARD, DropReason.FAILED_FILTER])
def test_a_group_is_dropped_after_the_last_attempt_with_what_was_said_of_it(reason: DropReason) -> None:
    events: list[ev.Event] = []
    play = Play(max_attempts=2, journal=events.append)
    for _ in range(2):
        order = play.acquire(1)[0]
        for late in (False, True):  # The second report is late and changes nothing.
            text = "late" if late else f"attempt {order.attempt}: " + 400 * "x"
            play.core.fail("w", "a", order.group_id, order.attempt, reason, text)
    assert play.core.state.ledger.dropped[reason] == 1
    (dropped,) = [event for event in events if isinstance(event, ev.Dropped)]
    assert dropped.reason is reason and dropped.detail.startswith("attempt 1: xx") and len(dropped.detail) == 200
    assert play.acquire(1)[0].group_id == 1


def test_a_reason_that_no_retry_cures_drops_at_once() -> None:
    play = Play()
    order = play.acquire(1)[0]
    play.core.fail("w", "a", order.group_id, order.attempt, DropReason.OVER_LENGTH)
    assert play.core.state.ledger.dropped[DropReason.OVER_LENGTH] == 1


def test_leaving_in_order_does_not_count_as_a_failed_attempt() -> None:
    play = Play(max_attempts=1)
    play.acquire(1)
    play.core.goodbye("w", "a")
    play.core.goodbye("w", "a")
    assert play.core.state.in_flight == 1
    assert not play.core.members()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"runs": ((9, 4),)}, "never published"),
        ({"group_size": 3}, "members"),
        ({"prompt": 5}, "prompt"),
        ({"runs": ()}, "no trajectory"),
    ],
)
def test_a_group_that_cannot_be_right_is_rejected_and_dropped(change, complaint) -> None:
    play = Play()
    order = play.acquire(1)[0]
    made = header(order, *change.get("runs", ((0, 4),)), group_size=change.get("group_size", 2))
    if "prompt" in change:
        made = header(type(order)(**{n: getattr(order, n) for n in order.__slots__} | {"prompt_index": 5}), (0, 4))
    reply = play.core.insert("w", "a", made, b"p")
    assert reply.status == "rejected"
    assert complaint in reply.reason
    assert play.core.state.ledger.dropped[DropReason.REJECTED] == 1


def test_evaluation_goes_out_first_in_chunks_to_workers_that_serve_the_version() -> None:
    play = Play()
    job = play.core.evaluate(step=0, policy_version=0, eval_set="heldout", rows=5, chunk=3)
    play.core.hello("late", "b")
    assert not play.core.acquire("late", "b", 1).evaluations
    first = play.core.acquire("w", "a", 1)
    assert not first.assignments
    order = first.evaluations[0]
    assert (order.start, order.stop, order.attempt) == (0, 3, 0)
    assert play.core.finished_evaluations() is None
    result = EvalResult(job_id=job, chunk=0, attempt=0, version_min=0, version_max=0, scores=(1.0, 0.0), failed=1)
    with pytest.raises(ReplayError, match="must cover its rows"):
        play.core.report_evaluation(
            "w", "a", EvalResult(job_id=job, chunk=0, attempt=0, version_min=0, version_max=0, scores=(1.0,))
        )
    for _ in range(2):
        play.core.report_evaluation("w", "a", result)
    assert play.core.evaluations.waiting_rows() == 2
    for _ in range(3):  # Three workers die over the last chunk.
        play.core.acquire("w", "a", 1)
        play.core.goodbye("w", "a")
        play.core.hello("w", "a", 0)
    (summary,) = play.core.finished_evaluations() or [None]
    assert summary is not None
    assert (summary.count, summary.failed, summary.mean) == (2, 3, 0.5)
    assert play.core.finished_evaluations() == ()
    with pytest.raises(ReplayError):
        play.core.evaluate(step=0, policy_version=0, eval_set="heldout", rows=0, chunk=3)


def test_finish_drops_what_is_open_and_stops_the_workers() -> None:
    play = Play()
    orders = play.acquire()
    play.insert(orders[0])
    play.insert(orders[1])
    play.core.lease(0)
    play.core.finish()
    play.core.finish()
    assert play.core.state.ledger.dropped[DropReason.SHUTDOWN] == 4
    assert play.core.acquire("w", "a", 1).stop
    assert play.insert(orders[2]) == "closed"
    with pytest.raises(ReplayError, match="finished"):
        play.core.lease(0)


def test_the_board_merges_and_counts_revisions() -> None:
    play = Play()
    play.core.announce({"a": 1, "b": 1})
    play.core.announce({"b": 2})
    assert (play.core.board.revision, play.core.board.values) == (2, {"a": 1, "b": 2})


def test_a_worker_cannot_serve_what_was_never_published() -> None:
    play = Play()
    with pytest.raises(ReplayError, match="never published"):
        play.load(12)


def test_completions_without_a_reward_and_over_long_prompts_are_metrics_by_reason_over_all_workers() -> None:
    play = Play()
    play.core.heartbeat(
        "w", "a", {"rewards_failed": 3.0, "rewards_failed_raised": 2.0, "rewards_failed_timed_out": 1.0}
    )
    play.core.heartbeat(
        "w", "a", {"rewards_failed": 4.0, "rewards_failed_raised": 3.0, "rewards_failed_timed_out": 1.0}
    )
    play.core.hello("v", "b")
    play.core.heartbeat("v", "b", {"rewards_failed": 1.0, "rewards_failed_raised": 1.0, "overlong_prompts": 2.0})
    row = {name: value for name, value in play.core.run.metrics().items() if "reward" in name or "data" in name}
    assert row == {
        "reward/failed": 5.0,
        "reward/failed_raised": 4.0,
        "reward/failed_timed_out": 1.0,
        "data/overlong": 2.0,
    }


def test_rollout_rates_are_taken_over_some_heartbeats_and_held_in_between() -> None:
    play = Play()
    play.core.heartbeat("w", "a", {"generated_tokens": 100.0, "waiting_s": 2.0})
    play.clock.now = 4.0
    row = play.core.run.metrics()
    assert row["perf/generated_tokens_per_s"] == 25.0
    assert row["idle/rollout"] == 0.5
    play.core.hello("w", "next")  # What the predecessor generated is not lost.
    play.core.heartbeat("w", "next", {"generated_tokens": 40.0, "waiting_s": 0.0})
    play.clock.now = 5.0
    assert play.core.run.metrics()["perf/generated_tokens_per_s"] == 25.0
    play.clock.now = 8.0
    assert play.core.run.metrics()["perf/generated_tokens_per_s"] == 10.0


def test_what_a_silent_worker_did_counts_once_when_it_comes_back() -> None:
    play = Play()
    play.core.heartbeat("w", "a", {"generated_tokens": 100.0, "busy_s": 5.0, "decode_steps": 7.0})
    play.clock.now += 1000.0
    assert play.core.expire() == ["w"]
    assert play.core.run.metrics()["goodput/generated_tokens"] == 100.0
    play.core.hello("w", "a")
    assert play.core.run.metrics()["goodput/generated_tokens"] == 100.0, "it has not told anything again yet"
    play.core.heartbeat("w", "a", {"generated_tokens": 130.0, "busy_s": 6.0, "decode_steps": 9.0})
    row = play.core.run.metrics()
    assert (row["goodput/generated_tokens"], row["idle/rollout_busy_s"], row["engine/decode_steps"]) == (130, 6, 9)
    play.core.hello("w", "next")
    play.core.heartbeat("w", "next", {"generated_tokens": 1.0})
    assert play.core.run.metrics()["goodput/generated_tokens"] == 131.0


def test_the_ledger_refuses_what_would_break_the_law() -> None:
    ledger = Ledger()
    entry = Entry(group_id=1, prompt_index=0)
    ledger.admit(entry)
    with pytest.raises(LedgerError, match="admitted twice"):
        ledger.admit(entry)
    with pytest.raises(LedgerError, match="cannot go"):
        ledger.move(entry, GroupState.TRAINED)
    with pytest.raises(LedgerError, match="cannot be committed"):
        ledger.commit(entry)
    with pytest.raises(LedgerError, match="not open"):
        ledger.entry(2)
    ledger.move(entry, GroupState.INSERTED)
    ledger.move(entry, GroupState.LEASED)
    ledger.move(entry, GroupState.TRAINED)
    entry.trained = 1
    with pytest.raises(LedgerError, match="cannot be dropped"):
        ledger.drop(entry, DropReason.STALE)
    with pytest.raises(LedgerError, match="conservation"):
        ledger.check(in_flight=0, inserted=0, leased=0, trained=0)
