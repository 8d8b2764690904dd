from __future__ import annotations

import pytest

from asyncrl.errors import FencedError, LedgerError, ReplayError
from asyncrl.replay import events as ev
from asyncrl.replay.core import ReplayCore
from asyncrl.replay.ledger import Entry, GroupState, Ledger
from asyncrl.replay.rollout_side import UnknownPeer
from asyncrl.types import NO_VERSION, DropReason, EvalResult, StalePolicy

from .helpers import Clock, header, settings


class Play:
    """A core with one worker `w` (incarnation `a`) and a learner, played by hand."""

    def __init__(self, **changes) -> None:
        core_options = {name: changes.pop(name) for name in ("max_bytes", "seed", "journal") if name in changes}
        self.clock = Clock()
        self.core = ReplayCore(settings(**changes), self.clock, **core_options)
        self.core.hello("w", "a")
        self.version = self.core.restore(step=None, policy_version=NO_VERSION, snapshot=None).next_version
        self.core.publish(policy_version=0, parent=NO_VERSION)
        self.load()
        self.step = 0

    def load(self, version: int | None = None) -> None:
        self.core.served("w", "a", self.version if version is None else version, "f")

    def acquire(self, slots: int = 16):
        return list(self.core.acquire("w", "a", slots).assignments)

    def insert(self, order, *runs: tuple[int, int], payload=b"p", nbytes: int = 10) -> str:
        return self.core.insert("w", "a", header(order, *(runs or ((self.version, 4),)), nbytes=nbytes), payload).status

    def train(self):
        plan = self.core.lease(self.step)
        assert plan is not None
        reply = self.core.trained(step=self.step, policy_version=self.version + 1)
        self.step += 1
        self.version += 1
        return plan, reply


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
        ({"group_size": 3}, "trajectories"),
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


def test_a_lease_gives_the_same_plan_every_time_and_one_step_ahead() -> None:
    play = Play()
    for order in play.acquire():
        play.insert(order)
    plan, ahead = play.core.lease(0), play.core.lease(1)
    assert plan is not None and ahead is not None
    assert play.core.lease(0) is plan
    assert [g.group_id for g in plan.groups + ahead.groups] == [0, 1, 2, 3]
    assert (plan.staleness, ahead.staleness) == ({0: 0}, {0: 1})
    with pytest.raises(ReplayError, match="step 0 is not trained"):
        play.core.lease(2)


def test_steps_are_trained_in_order_and_a_repeated_report_changes_nothing() -> None:
    play = Play()
    for order in play.acquire():
        play.insert(order)
    with pytest.raises(ReplayError):
        play.core.trained(step=0, policy_version=1)
    _, reply = play.train()
    assert play.core.trained(step=0, policy_version=1) is reply
    assert play.core.lease(0) is not None
    with pytest.raises(ReplayError):
        play.core.trained(step=5, policy_version=9)
    play.core.lease(1)
    with pytest.raises(ReplayError, match="never reused"):
        play.core.trained(step=1, policy_version=1)


def test_a_committed_step_is_forgotten() -> None:
    play = Play()
    for order in play.acquire():
        play.insert(order)
    play.train()
    with pytest.raises(ReplayError):
        play.core.commit(1)
    before = play.core.state.buffer.nbytes
    play.core.commit(0)
    play.core.commit(0)
    assert play.core.state.buffer.nbytes == before - 20
    assert play.core.state.ledger.committed == 2
    with pytest.raises(ReplayError, match="forgotten"):
        play.core.lease(0)


def slow_group_play(policy: StalePolicy, **changes) -> tuple[Play, list]:
    """Group 0 is slow: it starts at version 0 and is here when step 2 is due; the bound is 1."""
    play = Play(stale_policy=policy, max_staleness=1, pipeline_depth=1, groups_per_step=1, **changes)
    slow, fast = play.acquire()
    play.insert(fast)
    play.train()
    return play, [slow]


def test_policy_mask_trains_what_is_fresh_of_a_late_group_and_counts_the_rest() -> None:
    play, (slow,) = slow_group_play(StalePolicy.MASK)
    for _ in range(2):
        play.load()
        order = play.acquire(1)[0]
        play.insert(order)
        play.train()
    play.insert(slow, (0, 6), (play.version, 2))
    play.load()
    plan, reply = play.train()
    assert plan.groups[0].group_id == slow.group_id
    assert [plan.fresh_tokens(t) for t in plan.groups[0].trajectories] == [2, 2]
    assert reply.metrics["staleness/masked_tokens"] == 12
    assert reply.metrics["waste/tokens"] == 12
    assert reply.metrics["waste/tokens_by_position_q1"] == 4
    assert reply.metrics["waste/tokens_by_position_q4"] == 0
    assert reply.metrics["staleness/max"] == 0


@pytest.mark.parametrize("readmit", [False, True])
def test_policy_drop_drops_the_late_group_whole(readmit) -> None:
    play, (slow,) = slow_group_play(StalePolicy.DROP, readmit_dropped=readmit)
    for _ in range(2):
        play.load()
        play.insert(play.acquire(1)[0])
        play.train()
    play.insert(slow, (0, 6), (play.version, 2))
    assert play.core.lease(play.step) is None
    assert play.core.state.ledger.dropped[DropReason.STALE] == 1
    play.load()
    prompts = [order.prompt_index for order in play.acquire()]
    assert (slow.prompt_index in prompts) == readmit
    assert play.core.metrics()["waste/tokens"] == 16


def test_policy_wait_holds_the_learner_for_the_late_group() -> None:
    play, (slow,) = slow_group_play(StalePolicy.WAIT)
    play.load()
    play.insert(play.acquire(1)[0])
    play.clock.now = 1.0
    assert play.core.lease(1) is None, "sealing without the slow group would make it over-age"
    play.clock.now = 4.0
    assert "stale_policy=wait" in play.core.explain(1)
    play.insert(slow, (0, 6))
    plan, reply = play.train()
    assert [g.group_id for g in plan.groups] == [slow.group_id]
    assert reply.metrics["idle/learner_s_stale_wait"] == 3.0
    assert reply.metrics["staleness/max"] == 1
    assert reply.metrics["waste/tokens"] == 0


def test_at_max_staleness_0_every_trained_token_is_of_the_newest_version() -> None:
    play = Play(max_staleness=0, pipeline_depth=0)
    for _ in range(3):
        play.load()
        orders = play.acquire()
        assert len(orders) == 2
        for order in orders:
            play.insert(order)
        assert play.core.lease(play.step) is not None
        assert play.core.lease(play.step + 1) is None
        plan, _ = play.train()
        assert set(plan.staleness.values()) == {0}


def test_a_restored_learner_gets_the_same_batches_again() -> None:
    play = Play()
    for _ in range(3):
        play.load()
        for order in play.acquire():
            play.insert(order)
        play.train()
        if play.step == 1:
            play.core.commit(0)
    first = [play.core.lease(1), play.core.lease(2)]
    restored = play.core.restore(step=0, policy_version=1, snapshot=None, incarnation="second")
    assert (restored.next_step, restored.next_version) == (1, 4)
    assert play.core.restore(step=0, policy_version=1, snapshot=None, incarnation="second") == restored
    play.core.publish(policy_version=4, parent=1)
    again = play.core.lease(1)
    assert [g.group_id for g in again.groups] == [g.group_id for g in first[0].groups]
    assert again.staleness == first[0].staleness, "version 4 has the weights of version 1"
    play.step, play.version = 1, 4
    play.train()
    assert [g.group_id for g in play.core.lease(2).groups] == [g.group_id for g in first[1].groups]
    with pytest.raises(FencedError):
        play.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="")
    with pytest.raises(FencedError):
        play.core.check_learner("")
    with pytest.raises(ReplayError, match="restart the learner"):
        play.core.check_learner("never seen")
    play.core.check_learner("second")


def test_a_server_without_memory_is_filled_from_the_checkpoint() -> None:
    play = Play()
    for order in play.acquire():
        play.insert(order)
    play.train()
    play.load()
    play.acquire()
    snapshot = play.core.snapshot()
    core = ReplayCore(settings(), Clock())
    with pytest.raises(ReplayError, match="no snapshot"):
        core.restore(step=0, policy_version=1, snapshot=None)
    with pytest.raises(ReplayError, match="of step 0, the checkpoint of step 3"):
        core.restore(step=3, policy_version=1, snapshot=snapshot)
    with pytest.raises(ReplayError, match="cannot be read"):
        core.restore(step=0, policy_version=1, snapshot=snapshot | {"open": 3})
    restored = core.restore(step=0, policy_version=1, snapshot=snapshot)
    assert restored.next_step == 1
    core.publish(policy_version=restored.next_version, parent=1)
    core.hello("w", "a")
    core.served("w", "a", restored.next_version, "f")
    orders = core.acquire("w", "a", 16).assignments
    assert [order.prompt_index for order in orders] == [2, 3, 4, 5]
    assert core.state.ledger.admitted == 6
    with pytest.raises(ReplayError, match="never published"):
        core.restore(step=0, policy_version=50, snapshot=snapshot, incarnation="x")


def test_memory_is_freed_by_giving_up_payloads_that_only_a_restore_would_need() -> None:
    play = Play(max_bytes=60)
    for _ in range(4):
        play.load()
        for order in play.acquire():
            play.insert(order)
        play.train()
    assert play.core.state.buffer.nbytes <= 60
    assert play.core.state.buffer.trained[0].evicted
    play.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="second")
    play.core.publish(policy_version=10, parent=NO_VERSION)
    play.load(10)
    remade = play.acquire()
    assert [(order.group_id, order.attempt) for order in remade[:2]] == [(0, 1), (1, 1)]


def test_credit_is_never_zero_while_the_learner_has_no_batch() -> None:
    play = Play(max_bytes=5)
    orders = play.acquire()
    play.insert(orders[0])
    assert play.core.credit() == 1
    play.insert(orders[1])
    play.core.lease(0)
    assert play.core.credit() == 0


def test_a_rollback_to_steps_whose_payloads_are_gone_leaves_credit_to_make_them_again() -> None:
    play = Play(max_bytes=60)
    for _ in range(4):
        play.load()
        for order in play.acquire():
            play.insert(order)
        play.train()
    play.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="second")
    play.core.publish(policy_version=10, parent=NO_VERSION)
    play.load(10)
    assert play.core.lease(0) is None
    assert play.core.state.buffer.untrained and play.core.credit() > 0


def test_evaluation_goes_out_first_in_chunks_to_workers_that_serve_the_version() -> None:
    play = Play()
    job = play.core.evaluate(step=0, policy_version=0, eval_set="heldout", rows=5, chunk=3)
    play.core.hello("late", "b")
    assert not play.core.acquire("late", "b", 1).evaluations
    first = play.core.acquire("w", "a", 1)
    assert not first.assignments
    order = first.evaluations[0]
    assert (order.start, order.stop, order.policy_version) == (0, 3, 0)
    assert play.core.finished_evaluations() is None
    result = EvalResult(job_id=job, chunk=0, attempt=0, policy_version=0, scores=(1.0, 0.0), failed=1)
    with pytest.raises(ReplayError, match="must be its rows"):
        play.core.report_evaluation(
            "w", "a", EvalResult(job_id=job, chunk=0, attempt=0, policy_version=0, scores=(1.0,))
        )
    for _ in range(2):
        play.core.report_evaluation("w", "a", result)
    assert play.core.evaluations.waiting_rows() == 2
    for _ in range(3):  # Three workers die over the last chunk.
        play.core.acquire("w", "a", 1)
        play.core.goodbye("w", "a")
        play.core.hello("w", "a", 0)
    (summary,) = play.core.finished_evaluations()
    assert (summary.count, summary.failed, summary.accuracy) == (2, 3, 0.5)
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


def test_rollout_rates_are_taken_over_some_heartbeats_and_held_in_between() -> None:
    play = Play()
    play.core.heartbeat("w", "a", {"generated_tokens": 100.0, "waiting_s": 2.0})
    play.clock.now = 4.0
    row = play.core.metrics()
    assert row["perf/generated_tokens_per_s"] == 25.0
    assert row["idle/rollout"] == 0.5
    play.core.hello("w", "next")  # What the predecessor generated is not lost.
    play.core.heartbeat("w", "next", {"generated_tokens": 40.0, "waiting_s": 0.0})
    play.clock.now = 5.0
    assert play.core.metrics()["perf/generated_tokens_per_s"] == 25.0
    play.clock.now = 8.0
    assert play.core.metrics()["perf/generated_tokens_per_s"] == 10.0


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda play: play.core.goodbye("w", "a"), "no rollout worker"),
        (lambda play: play.core.hello("w", "b"), "serves -1"),
        (lambda play: play.acquire(), "holds 4"),
        (lambda play: play.core.restore(step=None, policy_version=-1, snapshot=None, incarnation="x"), "not published"),
    ],
)
def test_a_starving_learner_is_told_whom_it_waits_for(prepare, reason) -> None:
    play = Play()
    prepare(play)
    assert reason in play.core.explain(0)


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
