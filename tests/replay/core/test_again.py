"""What a learner gets again after an automatic restart, and after a resume that begins a branch."""

from __future__ import annotations

import random
from dataclasses import replace

from asyncrl.replay.audit.report import audit
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.buffer import IN_JOURNAL
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.replay.journal.durable import open_core
from asyncrl.replay.journal.log import JournalSettings
from asyncrl.types import NO_VERSION, DropReason, StepPlan
from tests.replay.helpers import Clock, header, settings
from tests.replay.memory_disk import MemoryDisk
from tests.replay.play import Play

LONG = 44


def trained_long(steps: int = LONG, **changes) -> tuple[Play, list[StepPlan]]:
    """No checkpoint, and many more steps than a token may be old."""
    play = Play(max_staleness=4, pipeline_depth=2, **changes)
    plans = []
    for _ in range(steps):
        play.load()
        for order in play.acquire():
            play.insert(order)
        plans.append(play.train()[0])
    return play, plans


def back_to(play: Play, step: int | None, version: int, **how) -> None:
    restored = play.core.restore(step=step, policy_version=version, snapshot=None, incarnation="second", **how)
    play.core.publish(policy_version=restored.next_version, parent=version)
    play.step, play.version = restored.next_step, restored.next_version


def train_again(play: Play, steps: int) -> list[StepPlan]:
    return [play.train()[0] for _ in range(steps)]


def test_a_learner_that_died_forty_steps_after_its_checkpoint_gets_all_of_them_again_at_the_same_ages() -> None:
    play, plans = trained_long()
    dropped = dict(play.core.state.ledger.dropped)
    waiting = list(play.core.state.buffer.waiting)
    back_to(play, None, NO_VERSION)
    again = train_again(play, LONG)
    assert [plan.groups for plan in again] == [plan.groups for plan in plans]
    assert again == plans, "the ages too"
    assert play.core.state.ledger.dropped == dropped
    following = play.core.lease(LONG)
    assert following is not None, "what waited was made stale"
    assert [group.group_id for group in following.groups] == waiting[:2]
    assert max(following.staleness.values()) <= 4


def test_nothing_is_started_that_would_be_over_age_when_its_turn_comes() -> None:
    play, _ = trained_long()
    play.core.goodbye("w", "a")  # What it held is to be made again.
    back_to(play, None, NO_VERSION)
    play.core.hello("w", "b")
    play.core.served("w", "b", play.version, "f")
    reply = play.core.acquire("w", "b", 16)
    assert not reply.assignments and "repeats the steps" in reply.waiting_for
    assert not play.core.has_work()
    for _ in range(LONG):
        play.train()
    play.core.served("w", "b", play.version, "f")
    assert play.core.acquire("w", "b", 16).assignments


def branches(play: Play, how: dict) -> list[int]:
    """Prompts that the branch begins with, in order; the groups it can still use are trained before."""
    back_to(play, 9, 10, **how)
    while play.core.lease(play.step) is not None:
        play.train()
    play.load()
    return [order.prompt_index for order in play.acquire(64)]


def test_on_a_branch_the_distance_rules_and_the_prompts_of_the_dead_one_return_to_the_stream() -> None:
    for how in ({"branch": True}, {"settings": "others"}):
        play, plans = trained_long()
        dead = [group for plan in plans[10:] for group in plan.groups]
        new = branches(play, how)
        ledger = play.core.state.ledger
        steps = play.core.state.buffer.trained
        kept = {group.group_id for step in range(10, play.step) for group in steps[step].plan.groups}
        left = [group.prompt_index for group in dead if group.group_id not in kept]
        assert ledger.dropped[DropReason.DEAD_BRANCH] >= len(left) > 40
        assert ledger.dropped[DropReason.STALE] == 0
        returned = [*new, *play.core.state.readmitted]
        assert new and set(left) <= set(returned) and len(returned) == len(set(returned))


def test_a_branch_stays_one_when_its_learner_dies_before_it_has_published() -> None:
    play, _ = trained_long(12)
    play.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="first", settings="others")
    back_to(play, None, NO_VERSION, settings="others")
    tree = play.core.state.tree
    assert tree.distance(12, play.version) == 12 and not tree.leads_to(12, play.version)
    plan, _ = play.train()
    assert tree.distance(12, play.version) == 13, "a step of other settings is no step of the dead branch"
    restored = play.core.restore(
        step=None, policy_version=NO_VERSION, snapshot=None, incarnation="third", settings="others"
    )
    play.core.publish(policy_version=restored.next_version, parent=NO_VERSION)
    assert play.core.lease(0) == plan
    assert tree.distance(play.version, restored.next_version) == 1 and tree.distance(12, restored.next_version) == 12


def test_a_branch_makes_its_batches_anew_of_its_own_size() -> None:
    play = Play(groups_per_step=3, max_staleness=4, pipeline_depth=2)
    for _ in range(4):
        play.whole_step()
    for size in (1, 2):
        play.core.run.settings = replace(play.core.run.settings, groups_per_step=size)
        restored = play.core.restore(
            step=None, policy_version=NO_VERSION, snapshot=None, incarnation=f"of {size}", settings=f"{size}"
        )
        play.core.publish(policy_version=restored.next_version, parent=NO_VERSION)
        play.step, play.version = 0, restored.next_version
        assert [len(play.train()[0].groups) for _ in range(3)] == [size] * 3


def test_the_audit_judges_each_step_by_the_settings_in_force() -> None:
    events: list[ev.Event] = []
    play = Play(groups_per_step=3, max_staleness=4, pipeline_depth=2, journal=events.append)
    first = ev.Snapshotted({"settings": play.core.run.settings.plain()}, -1, ReplayState().image(), ())
    for _ in range(3):
        play.whole_step()
    smaller = replace(play.core.run.settings, groups_per_step=1, max_staleness=2)
    play.core.run.settings = smaller
    play.core.configure(smaller.plain())
    back_to(play, 1, 2, settings="smaller")
    train_again(play, 2)
    history = [first, *events]
    found = audit(enumerate(history))
    assert found.balances, found.violations
    silent = [event for event in history if not isinstance(event, ev.Configured)]
    assert any("has 1 groups, not 3" in text for text in audit(enumerate(silent)).violations)


def test_under_memory_pressure_the_payloads_come_back_from_the_journal() -> None:
    disk, events = MemoryDisk(), []
    small = 60

    def life() -> tuple:
        return open_core(
            disk,
            settings(max_staleness=4, pipeline_depth=2),
            Clock(),
            journal=JournalSettings(segment_bytes=2048),
            run={"run_id": "r", "run_digest": "d", "boot": "b"},
            max_bytes=small,
            listener=events.append,
        )

    core, writer = life()
    core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="first")
    core.publish(policy_version=0, parent=NO_VERSION)
    core.hello("w", "a")
    plans = []
    for step in range(12):
        core.served("w", "a", step, "f")
        for order in core.acquire("w", "a", 16).assignments:
            made = header(order, (step, 4))
            core.insert("w", "a", made, f"payload {order.group_id}".encode())
        writer.write_batch()
        plans.append(core.lease(step))
        core.trained(step=step, policy_version=step + 1)
        writer.write_batch()
        assert core.state.buffer.nbytes <= small
    assert not any(isinstance(event, ev.Evicted) for event in events)
    for again in (core, life()[0]):
        given = again.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation=f"{random.random()}")
        again.publish(policy_version=given.next_version, parent=NO_VERSION)
        assert again.state.buffer.nbytes <= small
        for step in range(12):
            plan = again.lease(step)
            assert plan == plans[step]
            entries = [again.state.ledger.entry(group.group_id) for group in plan.groups]
            again.bring_back(entries)
            assert [entry.payload for entry in entries] == [f"payload {e.group_id}".encode() for e in entries]
            again.trained(step=step, policy_version=given.next_version + step + 1)
            assert again.state.buffer.nbytes <= small + 40
        assert any(entry.payload is IN_JOURNAL for entry in again.state.ledger.entries.values())
        writer.write_batch()
