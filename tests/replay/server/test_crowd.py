"""A thousand workers and all ranks of a learner wait at the real core: what one change costs is counted, not timed."""

from __future__ import annotations

from collections import Counter

import pytest

from asyncrl.errors import AsyncRLError
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.core.requests import steps
from asyncrl.replay.server import batches
from asyncrl.replay.server.batches import PLANS_KEPT
from asyncrl.replay.server.handlers import Handlers
from asyncrl.replay.server.sessions import Answer, Later, Session
from asyncrl.replay.server.waiting import WaitingRequests
from asyncrl.types import NO_VERSION, Assignment, DropReason
from tests.replay.helpers import Clock, header, settings

WORKERS, RANKS = 1000, 64


@pytest.fixture(autouse=True)
def _no_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "pack_places", lambda *_: ([], []))


class Crowd:
    """`WORKERS` that hold what there is and ask for more, `RANKS` that ask for the first batch."""

    def __init__(self, **admission: int) -> None:
        self.core = ReplayCore(settings(**admission), Clock(), seed=0)
        self.handlers = Handlers(self.core)
        self.waiting = WaitingRequests(lambda: self.core.state.applied, self, Clock())
        self.answered: Counter[str] = Counter()
        self.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="learner")
        self.core.publish(policy_version=0, parent=NO_VERSION)
        self.orders: list[Assignment] = []
        self.workers = [Session("worker", f"w{number}", "a", b"", 0.0) for number in range(WORKERS)]
        for session in self.workers:
            self.core.hello(session.name, "a", 0)
            self.orders += self.core.acquire(session.name, "a", 1).assignments
        for session in self.workers:
            self.ask(session, "acquire", [1, 60.0])
        for rank in range(RANKS):
            self.ask(Session("learner", f"rank {rank}", "l", b"", 0.0), "lease", [0, rank, RANKS, 60.0, 0])

    def ask(self, session: Session, verb: str, body: list[object]) -> None:
        reply = self.handlers.handle(session, verb, body, ())
        assert isinstance(reply, Later)
        self.waiting.add(session, 1, verb, reply)

    def insert(self) -> None:
        order = self.orders.pop(0)
        self.core.insert(self.core.state.held[order.group_id].worker, "a", header(order, (0, 4)), None)

    def answer(self, session: Session, request: int, verb: str, answer: Answer) -> None:
        self.answered[verb] += 1

    def error(self, session: Session, request: int, error: AsyncRLError) -> None:
        raise error


def counted(monkeypatch: pytest.MonkeyPatch, core: ReplayCore, *names: str) -> Counter[str]:
    """Calls of these methods from now on."""
    calls: Counter[str] = Counter()
    for name in names:
        real = getattr(core, name)

        def counting(*args: object, name: str = name, real=real, **kwargs: object) -> object:
            calls[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(core, name, counting)
    return calls


def test_while_a_batch_is_not_whole_a_change_costs_one_look_at_it_and_no_sentence(monkeypatch) -> None:
    crowd = Crowd(groups_per_step=WORKERS // 2, pipeline_depth=0, max_in_flight=2 * WORKERS)
    monkeypatch.setattr(steps, "why_no_batch", lambda *_: pytest.fail("a sentence that nobody reads"))
    calls = counted(monkeypatch, crowd.core, "lease", "acquire")
    for _ in range(10):
        crowd.insert()
        crowd.waiting.settle()
    assert not crowd.answered
    assert calls["lease"] <= 10 and calls["acquire"] == 0, calls


def test_all_ranks_go_when_the_batch_is_whole() -> None:
    crowd = Crowd(groups_per_step=8, pipeline_depth=0, max_in_flight=2 * WORKERS)
    for _ in range(8):
        crowd.insert()
        crowd.waiting.settle()
    assert crowd.answered["lease"] == RANKS


def test_whoever_holds_its_share_is_not_asked_for_work_that_another_may_take(monkeypatch) -> None:
    crowd = Crowd(groups_per_step=WORKERS // 2, pipeline_depth=0, max_in_flight=2 * WORKERS)
    calls = counted(monkeypatch, crowd.core, "acquire")
    last = crowd.core.state.held[crowd.orders[-1].group_id]
    crowd.core.fail(last.worker, "a", last.group_id, last.attempt, DropReason.FAILED_REWARD)
    crowd.waiting.settle()
    assert crowd.answered["acquire"] == 1
    assert calls["acquire"] == 1, "those that hold their share wait in front of it"


def test_plans_for_ever_more_worlds_fill_no_memory() -> None:
    crowd = Crowd(groups_per_step=2, pipeline_depth=0, max_in_flight=2 * WORKERS)
    for _ in range(2):
        crowd.insert()
    rank = Session("learner", "rank 0", "l", b"", 0.0)
    for world in range(1, 41):
        assert isinstance(crowd.handlers.handle(rank, "lease", [0, 0, world, 60.0, 0], ()), Answer)
    assert len(crowd.handlers.batches._plans) == PLANS_KEPT
