"""Requests that wait at the server: evaluated again after changes only, answered once, ended at their deadline."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from asyncrl.errors import AsyncRLError, ReplayError, WireError
from asyncrl.replay.server.sessions import Answer, Later, Session
from asyncrl.replay.server.waiting import MAX_PATIENT, SPARE, WaitingRequests
from tests.replay.helpers import Clock


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
    with pytest.raises(WireError, match=f"{MAX_PATIENT} requests of this peer are waiting already"):
        room.add(MAX_PATIENT)
    assert room.session.patient == MAX_PATIENT and MAX_PATIENT not in room.session.waiting


def test_of_a_thousand_that_wait_for_the_same_one_question_is_asked_until_it_is_there() -> None:
    room = Room()
    work, questions = 0, 0

    def there() -> bool:
        nonlocal questions
        questions += 1
        return work > 0

    def take() -> Answer | None:
        nonlocal work
        room.asked += 1
        work -= 1
        return Answer("work")

    for number in range(1000):
        session = Session("worker", f"w{number}", str(number), b"", 0.0)
        room.waiting.add(session, 1, "acquire", Later(take, lambda: Answer("none"), 100.0, "work", there))
    for _ in range(10):
        room.applied += 1
        room.waiting.settle()
    assert (questions, room.asked) == (10, 0)
    work, room.applied = 3, room.applied + 1
    room.waiting.settle()
    assert room.said == [(f"w{number}", 1, "acquire work") for number in range(3)]
    assert (questions, room.asked) == (14, 3)


def test_what_waits_for_another_thing_is_not_held_up_by_what_is_not_there() -> None:
    room = Room()
    room.waiting.add(room.session, 1, "lease", Later(room.retry, room.retry, 10.0, ("batch", 0), lambda: False))
    room.waiting.add(room.session, 2, "lease", Later(lambda: Answer("b"), room.retry, 10.0, ("batch", 1), lambda: True))
    room.applied += 1
    room.waiting.settle()
    assert room.said == [("w", 2, "lease b")] and room.asked == 0


def test_where_the_question_itself_is_refused_all_that_wait_for_it_are_told() -> None:
    room = Room()

    def refuse() -> bool:
        raise ReplayError("step 3 was forgotten")

    for number in (1, 2):
        room.waiting.add(room.session, number, "lease", Later(refuse, refuse, 10.0, "batch", refuse))  # pyright: ignore
    room.applied += 1
    room.waiting.settle()
    assert room.said == [("w", 1, "step 3 was forgotten"), ("w", 2, "step 3 was forgotten")]


def test_deadlines_of_requests_that_are_answered_do_not_pile_up() -> None:
    room = Room()
    room.ready = True
    for number in range(5000):
        room.add(number, wait_s=3600.0)
        room.applied += 1
        room.waiting.settle()
    assert len(room.said) == 5000 and len(room.waiting._deadlines) <= SPARE + 2
