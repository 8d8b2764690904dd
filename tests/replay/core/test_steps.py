"""The learner's side of the core: batches, staleness, going back, memory."""

from __future__ import annotations

import pytest

from asyncrl.errors import FencedError, ReplayError
from asyncrl.replay.core.core import ReplayCore
from asyncrl.types import NO_VERSION, DropReason, StalePolicy
from tests.replay.helpers import Clock, settings
from tests.replay.play import Play


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
    with pytest.raises(ReplayError, match="no longer kept"):
        play.core.lease(0)


def test_a_learner_without_a_checkpoint_is_refused_by_a_run_that_has_one() -> None:
    play = Play()
    play.whole_step()
    play.core.commit(0)
    with pytest.raises(ReplayError, match=r"begins at step 0, but .* with 1 trained steps"):
        play.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="second")
    play.whole_step()


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
        play.whole_step(1)
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


def test_policy_drop_drops_the_late_group_whole() -> None:
    play, (slow,) = slow_group_play(StalePolicy.DROP)
    for _ in range(2):
        play.whole_step(1)
    play.insert(slow, (0, 6), (play.version, 2))
    assert play.core.lease(play.step) is None
    assert play.core.state.ledger.dropped[DropReason.STALE] == 1
    play.load()
    prompts = [order.prompt_index for order in play.acquire()]
    assert slow.prompt_index not in prompts
    assert play.core.run.metrics()["waste/tokens"] == 16
    assert goodput(play)["lost_stale"] == 16 and goodput(play)["trained_tokens"] == 24


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
        play.whole_step()
        if play.step == 1:
            play.core.commit(0)
    first = [play.leased(1), play.leased(2)]
    restored = play.core.restore(step=0, policy_version=1, snapshot=None, incarnation="second")
    assert (restored.next_step, restored.next_version) == (1, 4)
    assert play.core.restore(step=0, policy_version=1, snapshot=None, incarnation="second") == restored
    play.core.publish(policy_version=4, parent=1)
    again = play.leased(1)
    assert [g.group_id for g in again.groups] == [g.group_id for g in first[0].groups]
    assert again.staleness == first[0].staleness, "version 4 has the weights of version 1"
    play.step, play.version = 1, 4
    play.train()
    assert [g.group_id for g in play.leased(2).groups] == [g.group_id for g in first[1].groups]
    with pytest.raises(FencedError):
        play.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="")
    with pytest.raises(FencedError):
        play.core.check_learner("")
    with pytest.raises(ReplayError, match="Restart the learner"):
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
    with pytest.raises(ReplayError, match="no replay snapshot"):
        core.restore(step=0, policy_version=1, snapshot=None)
    with pytest.raises(ReplayError, match="of step 0, but the checkpoint is of step 3"):
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
        play.whole_step()
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
        play.whole_step()
    play.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="second")
    play.core.publish(policy_version=10, parent=NO_VERSION)
    play.load(10)
    assert play.core.lease(0) is None
    assert play.core.state.buffer.untrained and play.core.credit() > 0


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda play: play.core.goodbye("w", "a"), "no rollout worker"),
        (
            lambda play: play.core.hello("w", "b"),
            "holds 0). None has received weights yet. See their logs, and check that they can reach weights.host",
        ),
        (lambda play: play.acquire(), "holds 4"),
        (lambda play: play.core.restore(step=None, policy_version=-1, snapshot=None, incarnation="x"), "not published"),
    ],
)
def test_a_starving_learner_is_told_whom_it_waits_for(prepare, reason) -> None:
    play = Play()
    prepare(play)
    assert reason in play.core.explain(0)


def test_the_queue_is_told_by_how_long_ago_its_groups_were_begun() -> None:
    play = Play(groups_per_step=1, pipeline_depth=3, max_staleness=100)
    for order in play.acquire()[:4]:
        play.insert(order)

    def queue(row: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in row.items() if name.startswith("replay/inserted_age_")}

    assert queue(play.core.run.metrics()) == {"replay/inserted_age_0": 4.0}
    assert queue(play.train()[1].metrics) == {"replay/inserted_age_1": 3.0}
    play.load()
    play.insert(play.acquire(1)[0])
    assert queue(play.train()[1].metrics) == {"replay/inserted_age_1": 1.0, "replay/inserted_age_2": 2.0}
    play.core.publish(policy_version=play.version + 80, parent=play.version)
    assert queue(play.core.run.metrics()) == {"replay/inserted_age_64": 3.0}


def goodput(play: Play) -> dict[str, float]:
    return {
        name.removeprefix("goodput/"): value
        for name, value in play.core.run.metrics().items()
        if name.startswith("goodput/")
    }


def test_every_sampled_token_is_trained_or_lost_for_a_reason_or_under_way() -> None:
    """A late group of 2 x (6 + 2) tokens whose first 12 are masked, three groups of 8, and what a worker tells."""
    play, (slow,) = slow_group_play(StalePolicy.MASK)
    for _ in range(2):
        play.whole_step(1)
    play.insert(slow, (0, 6), (play.version, 2))
    play.load()
    play.train()
    told = {
        "generated_tokens": 75.0,
        "tokens_inserted": 40.0,
        "tokens_lost_filtered": 20.0,
        "tokens_lost_evaluation": 5.0,
    }
    play.core.heartbeat("w", "a", told)
    known = {"generated_tokens": 75, "trained_tokens": 28, "lost_masked": 12, "lost_filtered": 20, "lost_evaluation": 5}
    assert goodput(play) == known | {"share": 28 / 65}
    play.core.goodbye("w", "a")
    assert goodput(play)["lost_unfinished"] == 10, "what it had under way"
    assert goodput(play)["share"] == 28 / 75


def test_what_is_trained_again_after_a_restore_or_used_again_counts_once() -> None:
    play = Play(groups_per_step=1, max_times_sampled=2, pipeline_depth=0)
    for _ in range(3):
        play.whole_step()
    counted = goodput(play)["trained_tokens"]
    groups = {group.group_id for step in range(3) for group in play.leased(step).groups}
    assert counted == 8 * len(groups) < 8 * 3, "some group was used twice"
    play.core.commit(0)
    assert goodput(play)["trained_tokens"] == counted
    play.core.restore(step=0, policy_version=1, snapshot=None, incarnation="second")
    assert goodput(play)["trained_tokens"] == 8
    play.core.publish(policy_version=4, parent=1)
    play.step, play.version = 1, 4
    play.train()
    play.train()
    assert goodput(play)["trained_tokens"] == counted
