"""Random schedules of the whole replay, judged by an oracle; see `simulator.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.replay.journal.records import KINDS
from asyncrl.types import DropReason, StalePolicy
from tests.replay import schedules
from tests.replay.liveness import run_schedule
from tests.replay.simulator import Simulation
from tests.seeds import run_seeds

FAST, SLOW, LONG = 300, 3_000, 100_000
OUTSIDE = {ev.Finished, ev.Snapshotted, ev.Announced}
"""Events that no schedule makes."""
INSIDE = set(KINDS.values()) - OUTSIDE
DROPPED = set(DropReason) - {DropReason.REJECTED, DropReason.SHUTDOWN}


@pytest.fixture(scope="module")
def schedules_of_all_kinds() -> list[Simulation]:
    """The oracle fails on the first token over the bound, group trained twice, or schedule that gets stuck."""
    return [run_schedule(seed) for seed in range(FAST)]


def test_no_schedule_trains_a_token_over_the_bound_or_a_group_twice_or_gets_stuck(
    schedules_of_all_kinds: list[Simulation],
) -> None:
    assert len(schedules_of_all_kinds) == FAST


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seeds", [range(FAST, SLOW), pytest.param(range(SLOW, LONG), marks=pytest.mark.long)], ids=len)
def test_no_schedule_of_many_breaks_a_promise(seeds: range) -> None:
    run_seeds("tests.replay.liveness:run_schedule", seeds, actions=100)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("rollbacks", [False, True])
def test_no_schedule_of_many_with_a_window_breaks_a_promise(rollbacks: bool) -> None:
    run_seeds("tests.replay.liveness:run_schedule", range(LONG), actions=100, window=True, rollbacks=rollbacks)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("rollbacks", [False, True])
def test_no_schedule_of_many_by_sample_breaks_a_promise(rollbacks: bool) -> None:
    run_seeds("tests.replay.liveness:run_schedule", range(LONG), actions=100, by_sample=True, rollbacks=rollbacks)


def test_the_schedules_reach_what_they_are_meant_to_test() -> None:
    kinds: set[type] = set()
    masked = ahead = held_back = short = 0
    dropped: set[DropReason] = set()
    for seed in range(FAST, FAST + 800):
        simulation = run_schedule(seed, actions=100)
        for event in simulation.events:
            kinds.add(type(event))
            ahead += event.ahead if isinstance(event, ev.Sealed) else 0
        masked += simulation.core.meter.masked_tokens
        short += simulation.core.meter.missing_members
        dropped |= {reason for reason, count in simulation.core.state.ledger.dropped.items() if count}
        held_back += "stale_wait" in simulation.core.meter.idle.seconds
        if min(masked, ahead, short) > 50 and held_back > 5 and kinds == INSIDE and dropped == DROPPED:
            return
    raise AssertionError(f"{masked=} {ahead=} {short=} {held_back=} {INSIDE ^ kinds} {DROPPED ^ dropped}")


def test_policy_wait_neither_drops_nor_masks_without_a_rollback() -> None:
    """The oracle fails on the first stale drop or masked token."""
    for seed in range(400):
        run_schedule(seed, policy=StalePolicy.WAIT, rollbacks=False)


def test_a_window_lets_no_token_get_over_age_and_few_groups_pass_one() -> None:
    """The oracle fails on the first stale drop or masked token, on a group that too many passed, and on one that was
    trained too long after it was given out."""
    for seed in range(400):
        run_schedule(seed, window=True, rollbacks=seed % 4 == 0)


def test_by_sample_no_promise_is_broken_and_no_group_is_sealed_without_a_member() -> None:
    """The oracle fails on a member left behind or trained twice, on a token over the bound, on a group begun without
    room for all its members, and, under policy `wait`, on the first that gets over-age."""
    for seed in range(250):
        run_schedule(seed, by_sample=True, rollbacks=seed % 2 == 0)
        run_schedule(seed, by_sample=True, rollbacks=False, policy=StalePolicy.WAIT)


def test_applying_the_events_again_gives_the_same_state(schedules_of_all_kinds: list[Simulation]) -> None:
    """What a journal relies on: the state is a function of its events."""
    for simulation in schedules_of_all_kinds:
        live = simulation.core.state
        again = ReplayState()
        for event in simulation.events:
            again.apply(event)
        assert again.snapshot() == live.snapshot()
        assert list(again.buffer.waiting) == list(live.buffer.waiting)
        assert simulation.journalled or again.buffer.nbytes == live.buffer.nbytes
        assert {s: step.plan for s, step in again.buffer.untrained.items()} == {
            s: step.plan for s, step in live.buffer.untrained.items()
        }


def test_the_command_counts_each_schedule_once_whatever_stopped_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "CHUNK", 10)
    chunks = [schedules.run_chunk("sample", first) for first in (0, 10)]
    file = tmp_path / "chunks.jsonl"
    file.write_text("".join(json.dumps(chunk) + "\n" for chunk in chunks) + '{"admission": "sam')
    assert list(schedules.finished(file)) == chunks
    told = schedules.told("sample", chunks)
    assert (told["schedules"], told["broken"]) == (20, 0)
    assert told["admitted"] > told["steps"] >= 40 and told["tokens"] > told["steps"]
