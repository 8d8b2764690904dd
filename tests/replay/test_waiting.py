"""Requests that wait at the server: asked again after changes only, answered once, ended at their deadline."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from asyncrl.errors import AsyncRLError, ReplayError, WireError
from asyncrl.replay.session import Answer, Later, Session
from asyncrl.replay.waiting import MAX_PATIENT, WaitingRequests

from .helpers import Clock


class Room:
    """What waits, the events it waits for, and what was said."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.applied = 0
        self.said: list[tuple[str, int, str]] = []
        self.asked = 0
        self.ready = False
        self.session = Session("worker", "w", "a", b"", 0.0)
        self.waiting = WaitingRequests(lambda: self.applied, self, self.clock)

    def answer(self, session: Session, request: int, verb: str, answer: Answer) -> None:
        self.said.append((session.name, request, f"{verb} {answer.body}"))

    def error(self, session: Session, request: int, error: AsyncRLError) -> None:
        self.said.append((session.name, request, str(error)))

    def retry(self) -> Answer | None:
        self.asked += 1
        return Answer("done") if self.ready else None

    def add(self, request: int = 1, wait_s: float = 10.0, end: Callable[[], Answer | Later] | None = None) -> None:
        later = Later(self.retry, end or (lambda: Answer("nothing")), wait_s)
        self.waiting.add(self.session, request, "acquire", later)


def test_nobody_is_asked_again_before_something_has_changed() -> None:
    room = Room()
    room.add()
    room.waiting.settle()
    assert room.asked == 0
    room.applied += 1
    room.waiting.settle()
    room.waiting.settle()
    assert room.asked == 1
    room.waiting.changed = True
    room.waiting.settle()
    assert room.asked == 2 and not room.said


def test_an_answer_is_given_once_and_frees_the_place_of_its_peer() -> None:
    room = Room()
    room.add()
    assert room.session.patient == 1 and room.session.waiting == {1}
    room.ready = room.waiting.changed = True
    room.waiting.settle()
    room.waiting.changed = True
    room.waiting.settle()
    assert room.said == [("w", 1, "acquire done")]
    assert room.session.patient == 0 and not room.session.waiting and room.waiting.nearest() == math.inf


def test_at_its_deadline_a_request_gets_what_there_is_to_say_then() -> None:
    room = Room()
    room.add(wait_s=10.0)
    room.add(2, wait_s=5.0)
    assert room.waiting.nearest() == 5.0
    room.clock.now = 5.0
    room.waiting.settle()
    assert room.said == [("w", 2, "acquire nothing")] and room.waiting.nearest() == 10.0


def test_a_request_may_be_given_more_time_at_its_deadline() -> None:
    room = Room()
    room.add(wait_s=5.0, end=lambda: Later(room.retry, lambda: Answer("late"), 3.0))
    room.clock.now = 6.0
    room.waiting.settle()
    assert not room.said and room.waiting.nearest() == 9.0
    room.clock.now = 9.0
    room.waiting.settle()
    assert room.said == [("w", 1, "acquire late")]


def test_what_an_answer_changes_is_seen_by_those_that_were_asked_before_it() -> None:
    room = Room()
    room.add(1)

    def granted() -> Answer:
        room.ready = True
        room.applied += 1
        return Answer("granted")

    room.waiting.add(room.session, 2, "insert", Later(granted, granted, 10.0))
    room.waiting.changed = True
    room.waiting.settle()
    assert room.said == [("w", 2, "insert granted"), ("w", 1, "acquire done")]


def test_a_request_that_fails_is_told_so_and_waits_no_more() -> None:
    room = Room()

    def refuse() -> Answer:
        raise ReplayError("no such group")

    room.waiting.add(room.session, 3, "get", Later(refuse, refuse, 10.0))
    room.waiting.changed = True
    room.waiting.settle()
    assert room.said == [("w", 3, "no such group")] and room.session.patient == 0 and not room.session.waiting


def test_the_requests_of_a_peer_that_is_gone_are_neither_asked_nor_answered() -> None:
    room = Room()
    room.add()
    room.waiting.forget(room.session)
    room.ready = room.waiting.changed = True
    room.clock.now = 100.0
    room.waiting.settle()
    assert room.asked == 0 and not room.said


def test_one_peer_may_not_wait_with_ever_more_requests() -> None:
    room = Room()
    for number in range(MAX_PATIENT):
        room.add(number)
    with pytest.raises(WireError, match=f"{MAX_PATIENT} requests of this peer wait already"):
        room.add(MAX_PATIENT)
    assert room.session.patient == MAX_PATIENT and MAX_PATIENT not in room.session.waiting
