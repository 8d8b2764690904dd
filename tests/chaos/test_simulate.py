"""The simulation finds no fault in the real core, and finds each of five planted mistakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrl.errors import AsyncRLError
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.protocol import InsertReply
from asyncrl.types import GroupHeader
from tests.seeds import run_seeds

from .simulate import World, run_seed
from .virtual import Request

FAST, SLOW, LONG, ENOUGH = 250, 1_000, 10_000, 200
"""Seeds of the runs, and within which a planted mistake must show."""


def test_faulty_runs_lose_nothing_and_train_nothing_twice() -> None:
    for seed in range(FAST):
        run_seed(seed)


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seeds", [range(FAST, SLOW), pytest.param(range(SLOW, LONG), marks=pytest.mark.long)], ids=len)
def test_many_faulty_runs_lose_nothing_and_train_nothing_twice(seeds: range) -> None:
    run_seeds("tests.chaos.simulate:run_seed", seeds)


def test_the_faults_happen_and_the_runs_go_on() -> None:
    runs = [run_seed(seed) for seed in range(120)]
    faults = {name for run in runs for name in run.faults}
    assert faults == {
        "branch",
        "learner killed",
        "power loss",
        "read back",
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

    def _promised(self, request: Request) -> int:
        return 0 if request.verb == "lease" else super()._promised(request)


class NoDedup(World):
    """A group that came already is stored again, under a new id."""

    forgetful = True

    def plant(self, core: ReplayCore) -> None:
        insert = core.insert

        def twice(worker: str, incarnation: str, header: GroupHeader, payload: Any) -> InsertReply:
            reply = insert(worker, incarnation, header, payload)
            if reply.status == "duplicate":
                core.run.record(ev.Inserted(header, payload))
            return reply

        core.insert = twice


class NoFencing(World):
    """An insert counts whatever its attempt and whoever sends it."""

    def plant(self, core: ReplayCore) -> None:
        insert = core.insert

        def anybodys(worker: str, incarnation: str, header: GroupHeader, payload: Any) -> InsertReply:
            entry = core.state.held.get(header.group_id)
            if entry is not None:
                worker, incarnation = entry.worker, entry.incarnation
                core.workers.hello(worker, incarnation, entry.served_version, self.now)
                header = replace(header, attempt=entry.attempt)
            return insert(worker, incarnation, header, payload)

        core.insert = anybodys


class GroupSplit(World):
    """A group is stored without its last trajectory."""

    def plant(self, core: ReplayCore) -> None:
        record = core.run.record

        def split(event: ev.Event) -> None:
            if isinstance(event, ev.Inserted) and len(event.header.trajectories) > 1:
                event = replace(event, header=replace(event.header, trajectories=event.header.trajectories[:-1]))
            record(event)

        core.run.record = split


@pytest.mark.parametrize("mutant", [AckBeforeSync, EarlyLease, NoDedup, NoFencing, GroupSplit])
def test_a_planted_mistake_is_caught(mutant: type[World]) -> None:
    with pytest.raises((AssertionError, AsyncRLError, KeyError)):
        for seed in range(ENOUGH):
            run_seed(seed, world=mutant)
