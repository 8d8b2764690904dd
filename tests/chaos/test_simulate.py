"""The simulation finds nothing in the real core, and finds each of five planted mistakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrl.errors import AsyncRLError
from asyncrl.replay import events as ev
from asyncrl.replay.base import InsertReply
from asyncrl.types import GroupHeader
from tests.seeds import run_seeds

from .simulate import World, run_seed
from .virtual import Request, WatchedCore

FAST, SLOW, ENOUGH = 400, 10_000, 1_000
"""Seeds of the two runs, and within which a planted mistake must show."""


def test_four_hundred_faulty_runs_lose_nothing_and_train_nothing_twice() -> None:
    for seed in range(FAST):
        run_seed(seed)


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.timeout(3000)
def test_ten_thousand_faulty_runs_lose_nothing_and_train_nothing_twice() -> None:
    run_seeds("tests.chaos.simulate:run_seed", range(FAST, FAST + SLOW))


def test_the_faults_happen_and_the_runs_go_on() -> None:
    runs = [run_seed(seed) for seed in range(200)]
    faults = {name for run in runs for name in run.faults}
    assert faults == {
        "disk full",
        "learner killed",
        "power loss",
        "repeated request",
        "resent request",
        "worker killed",
        "worker paused",
    }
    kinds = {type(event) for run in runs for event in run.journal}
    assert {ev.Evicted, ev.Restored, ev.Returned, ev.Dropped, ev.Committed} <= kinds
    assert sum(len(run.history) for run in runs) > 2 * len(runs)


class AckBeforeSync(World):
    """Replies leave at once."""

    def _promised(self, request: Request) -> int:
        return 0


class EarlyLease(World):
    """Only the batch leaves before its plan is durable."""

    syncs = (2,)
    power_losses = (2,)

    def _promised(self, request: Request) -> int:
        return 0 if request.verb == "lease" else super()._promised(request)


class _CountsTwice(WatchedCore):
    """A group that came already is stored again, under a new id."""

    def insert(self, worker: str, incarnation: str, header: GroupHeader, payload: Any) -> InsertReply:
        reply = super().insert(worker, incarnation, header, payload)
        if reply.status == "duplicate":
            self._record(ev.Inserted(header, payload))
        return reply


class NoDedup(World):
    core_type = _CountsTwice
    forgetful = True


class _TakesAnybody(WatchedCore):
    """An insert counts whatever its attempt and whoever sends it."""

    def insert(self, worker: str, incarnation: str, header: GroupHeader, payload: Any) -> InsertReply:
        entry = self.state.held.get(header.group_id)
        if entry is not None:
            worker, incarnation = entry.worker, entry.incarnation
            self.workers.hello(worker, incarnation, entry.served_version, self.clock())
            header = replace(header, attempt=entry.attempt)
        return super().insert(worker, incarnation, header, payload)


class NoFencing(World):
    core_type = _TakesAnybody


class _Splits(WatchedCore):
    """A group is stored without its last trajectory."""

    def _record(self, event: ev.Event) -> None:
        if isinstance(event, ev.Inserted) and len(event.header.trajectories) > 1:
            event = replace(event, header=replace(event.header, trajectories=event.header.trajectories[:-1]))
        super()._record(event)


class GroupSplit(World):
    core_type = _Splits


@pytest.mark.parametrize("mutant", [AckBeforeSync, EarlyLease, NoDedup, NoFencing, GroupSplit])
def test_a_planted_mistake_is_caught(mutant: type[World]) -> None:
    with pytest.raises((AssertionError, AsyncRLError, KeyError)):
        for seed in range(ENOUGH):
            run_seed(seed, world=mutant)
