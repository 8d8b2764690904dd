"""Results of evaluations reach the learner although answers, sessions and servers get lost on the way."""

from __future__ import annotations

from asyncrl.replay import events as ev
from asyncrl.replay.core import ReplayCore
from asyncrl.replay.desk import Desk
from asyncrl.replay.session import Answer, Later, Session
from asyncrl.replay.state import ReplayState
from asyncrl.types import NO_VERSION, EvalResult

from .helpers import Clock, settings

WAIT_S = 100.0


class Stage:
    """A desk with a worker `w` and the learner `l`, and no socket: what was answered may be thrown away at will."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.events: list[ev.Event] = []
        self.core = ReplayCore(settings(), self.clock, journal=self.events.append)
        self.core.hello("w", "a")
        self.core.hello_learner("0", "l")
        self.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="l")
        self.core.publish(policy_version=0, parent=NO_VERSION)
        self.core.served("w", "a", 0, "f")
        self.desk = Desk(self.core)

    def ask(self, session: Session, request: int) -> Answer | Later:
        session.request = request
        return self.desk.handle(session, "wait_evaluations", WAIT_S, ())

    def restart(self) -> None:
        """The server dies and comes back with what its journal tells."""
        state = ReplayState(settings().max_staleness)
        for event in self.events:
            state.apply(event)
        self.core = ReplayCore(settings(), self.clock, journal=self.events.append, state=state)
        self.core.take_over()
        self.core.hello("w", "a", 0)
        self.desk = Desk(self.core)

    def score(self) -> None:
        (order,) = self.core.acquire("w", "a", 1).evaluations
        result = EvalResult(
            job_id=order.job_id, chunk=order.chunk, attempt=order.attempt, policy_version=0, scores=(1.0, 0.0)
        )
        self.core.report_evaluation("w", "a", result)


def learner() -> Session:
    return Session("learner", "0", "l", b"", 0.0)


def evaluate(core: ReplayCore, step: int) -> int:
    return core.evaluate(step=step, policy_version=0, eval_set="heldout", rows=2, chunk=2)


def test_a_learner_whose_session_was_forgotten_gets_the_answer_it_never_saw() -> None:
    stage = Stage()
    job = evaluate(stage.core, 0)
    waiting = stage.ask(learner(), 7)
    assert isinstance(waiting, Later)
    stage.score()
    lost = waiting.retry()  # To a frozen learner; then its session is forgotten, with the answer.
    assert lost is not None
    again = stage.ask(learner(), 7)
    assert again == lost
    assert again.body[0][0] == job
    assert stage.ask(learner(), 8) == Answer([])


def test_a_waiting_request_answers_as_itself_although_its_session_has_asked_for_more_since() -> None:
    stage = Stage()
    evaluate(stage.core, 0)
    session = learner()
    waiting = stage.ask(session, 7)
    session.request = 9
    stage.score()
    assert isinstance(waiting, Later)
    lost = waiting.retry()
    assert stage.ask(learner(), 7) == lost


def test_results_that_a_restarted_server_cannot_know_arrived_are_made_again() -> None:
    stage = Stage()
    job = evaluate(stage.core, 0)
    stage.score()
    stage.ask(learner(), 7)
    stage.restart()
    waiting = stage.ask(learner(), 7)
    assert isinstance(waiting, Later)
    stage.score()
    answer = waiting.retry()
    assert answer is not None and [row[0] for row in answer.body] == [job]
    stage.ask(learner(), 8)
    stage.restart()
    assert not stage.core.evaluations.open


def test_results_come_with_the_step_or_with_the_wait_but_never_with_both() -> None:
    stage = Stage()
    first = evaluate(stage.core, 0)
    stage.score()
    second = evaluate(stage.core, 1)
    waiting = stage.ask(learner(), 7)
    assert isinstance(waiting, Later)
    assert [summary.job_id for summary in stage.core._take_evaluations()] == [first]
    stage.score()
    answer = waiting.retry()
    assert answer is not None and [row[0] for row in answer.body] == [second]
    assert stage.ask(learner(), 8) == Answer([])


def test_a_restored_learner_is_not_given_what_its_predecessor_asked_for() -> None:
    stage = Stage()
    evaluate(stage.core, 0)
    stage.score()
    stage.ask(learner(), 7)
    stage.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="m")
    assert stage.desk.core.finished_evaluations("m", 7) == ()
