"""Results of evaluations reach the learner although answers, sessions and servers get lost on the way; none of them
stops a training, and what is superseded is cancelled."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asyncrl.errors import NoProgress, ReplayError
from asyncrl.evaluation.orders import EvalAssignment, EvalResult, EvalSummary
from asyncrl.evaluation.samples import Sample
from asyncrl.evaluation.table import RowScores, means, tabulate
from asyncrl.learner.reporting.step_row import evaluation_metrics
from asyncrl.replay.codec.messages import decode_record, decode_records, encode_record
from asyncrl.replay.codec.wire import pack, unpack
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.replay.server.handlers import Handlers
from asyncrl.replay.server.sessions import Answer, Later, Session
from asyncrl.types import NO_VERSION
from tests.replay.helpers import Clock, settings

WAIT_S = 100.0


def the_summary(core: ReplayCore) -> EvalSummary:
    (summary,) = core.finished_evaluations() or [None]
    assert summary is not None
    return summary


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
        self.desk = Handlers(self.core)

    def ask(self, session: Session, request: int) -> Answer | Later:
        session.request = request
        return self.desk.handle(session, "wait_evaluations", WAIT_S, ())

    def restart(self) -> None:
        """The server dies and comes back with what its journal tells."""
        state = ReplayState()
        for event in self.events:
            state.apply(event)
        self.core = ReplayCore(settings(), self.clock, journal=self.events.append, state=state)
        self.core.take_over()
        self.core.hello("w", "a", 0)
        self.desk = Handlers(self.core)

    def score(self) -> EvalAssignment:
        """A chunk, the next that the worker is given."""
        (order,) = self.core.acquire("w", "a", 1).evaluations
        result = EvalResult(
            job_id=order.job_id,
            chunk=order.chunk,
            attempt=order.attempt,
            version_min=0,
            version_max=0,
            scores=(1.0, 0.0)[: order.stop - order.start],
        )
        self.core.report_evaluation("w", "a", result)
        return order


def learner() -> Session:
    return Session("learner", "0", "l", b"", 0.0)


def evaluate(core: ReplayCore, step: int) -> int:
    return core.evaluate(step=step, policy_version=0, eval_set="heldout", rows=2, chunk=2)


def test_figures_of_chunks_are_means_over_the_rows_that_have_them_and_survive_the_wire() -> None:
    stage = Stage()
    stage.core.evaluate(step=0, policy_version=0, eval_set="heldout", rows=6, chunk=2)
    for figures in ({"pass@2": (1.0, 0.5), "pass@4": (1.0, None)}, {"pass@2": (None, 0.0)}, {}):
        (order,) = stage.core.acquire("w", "a", 1).evaluations
        versions = {"version_min": 0, "version_max": 0}
        order = {"job_id": order.job_id, "chunk": order.chunk, "attempt": order.attempt}
        result = EvalResult(**order, **versions, scores=(1.0, 0.0), figures=figures)
        stage.core.report_evaluation("w", "a", decode_record(EvalResult, unpack(pack(encode_record(result)))))
    answer = stage.ask(learner(), 7)
    assert isinstance(answer, Answer)
    (summary,) = decode_records(EvalSummary, answer.body)
    rows = [RowScores(row=n, scores=(float(n % 2 == 0),)) for n in range(6)]
    (alone,) = tabulate(rows, samples=1)
    assert (summary.mean, summary.count) == (0.5, 6)
    assert (summary.low, summary.high) == (alone.estimates["avg@1"].low, alone.estimates["avg@1"].high)
    assert summary.low is not None and summary.high is not None
    assert 0.0 <= summary.low < summary.mean < summary.high <= 1.0
    known = np.array([1.0, 0.5, np.nan, 0.0, np.nan, np.nan])
    pass_2 = means({"pass@2": known})["pass@2"]
    assert summary.figures == {
        **{"pass@2": 0.5, "pass@2_low": pass_2.low, "pass@2_high": pass_2.high},
        **{"pass@4": 1.0, "pass@4_low": pytest.approx(0.17059, abs=1e-5), "pass@4_high": 1.0},
    }


def test_the_best_scores_say_the_range_of_the_means_and_not_that_of_other_sources() -> None:
    stage = Stage()
    stage.core.evaluate(step=0, policy_version=0, eval_set="heldout", rows=4, chunk=4)
    (order,) = stage.core.acquire("w", "a", 1).evaluations
    at = {"job_id": order.job_id, "chunk": order.chunk, "attempt": order.attempt, "version_min": 0, "version_max": 0}
    scores, best = (0.75, 0.0, 0.75, 0.0), (3.0, 0.0, 3.0, 0.0)
    figures = {"best@4": best, "a/mean": (0.75, 0.0, None, None), "b/mean": (None, None, 3.0, 0.0)}
    stage.core.report_evaluation("w", "a", EvalResult(**at, scores=scores, figures=figures))
    summary = the_summary(stage.core)
    assert (summary.high or 0) > 0.375 + 3.18245 * 0.375 / math.sqrt(3) - 1e-6  # Student's: 1 is no end of its range
    assert summary.figures["a/mean_high"] <= 1.0 < summary.figures["b/mean_high"]


def test_one_row_that_has_no_range_has_no_interval_and_that_survives_the_wire() -> None:
    stage = Stage()
    stage.core.evaluate(step=0, policy_version=0, eval_set="heldout", rows=1, chunk=1)
    (order,) = stage.core.acquire("w", "a", 1).evaluations
    at = {"job_id": order.job_id, "chunk": order.chunk, "attempt": order.attempt, "version_min": 0, "version_max": 0}
    stage.core.report_evaluation("w", "a", EvalResult(**at, scores=(7.5,)))
    answer = stage.ask(learner(), 7)
    assert isinstance(answer, Answer)
    (summary,) = decode_records(EvalSummary, answer.body)
    assert (summary.mean, summary.low, summary.high) == (7.5, None, None)
    assert [name for name in evaluation_metrics(summary, "reward") if name.endswith(("_low", "_high"))] == []


def test_the_interval_of_an_evaluation_does_not_depend_on_who_was_first() -> None:
    def summary(turned: bool) -> EvalSummary:
        stage = Stage()
        stage.core.hello("v", "b", 0)
        stage.core.served("v", "b", 0, "f")
        stage.core.evaluate(step=0, policy_version=0, eval_set="heldout", rows=8, chunk=4)
        orders = [(stage.core.acquire(*who, 1).evaluations[0], who) for who in (("w", "a"), ("v", "b"))]
        for order, who in orders[:: -1 if turned else 1]:
            scores = tuple(0.1 * row**2 for row in range(order.start, order.stop))
            key = {"job_id": order.job_id, "chunk": order.chunk, "attempt": order.attempt}
            result = EvalResult(**key, version_min=0, version_max=0, scores=scores, figures={"f": scores})
            stage.core.report_evaluation(*who, result)
        made = the_summary(stage.core)
        return made

    assert summary(turned=True) == summary(turned=False)


def test_a_figure_that_is_not_of_every_scored_row_is_refused_and_the_chunk_stays_open() -> None:
    stage = Stage()
    evaluate(stage.core, 0)
    order = order_of(stage.core)
    with pytest.raises(ReplayError, match="came back with 2 scores, but 1 values of pass@2"):
        answer(stage.core, order, figures={"pass@2": (1.0,)})
    answer(stage.core, order, figures={"pass@2": (1.0, None)})
    assert not stage.core.evaluations.open


def test_samples_come_in_the_order_of_their_rows_and_a_row_of_another_chunk_is_refused() -> None:
    stage = Stage()
    stage.core.evaluate(step=0, policy_version=0, eval_set="heldout", rows=4, chunk=2)
    order = order_of(stage.core)
    with pytest.raises(ReplayError, match="0:2 came back with a sample of row 2"):
        answer(stage.core, order, samples=(Sample(row=2, sample=0),))
    answer(stage.core, order, samples=(Sample(row=1, sample=0, reward=1.0),))
    answer(stage.core, order_of(stage.core), samples=(Sample(row=3, sample=0, failed="no"),))
    summary = the_summary(stage.core)
    assert [(sample.row, sample.failed) for sample in summary.samples] == [(1, ""), (3, "no")]


def test_of_several_sets_each_has_its_turn_and_of_one_the_oldest_job_goes_first() -> None:
    stage = Stage()
    for step, name, rows in ((0, "long", 5), (1, "short", 2), (2, "long", 3)):
        stage.core.evaluate(step=step, policy_version=0, eval_set=name, rows=rows, chunk=1)
        stage.score()
    given = [stage.score() for _ in range(7)]
    assert [(order.job_id, order.start) for order in given] == [
        *((1, 1), (0, 2), (0, 3), (0, 4), (2, 0), (2, 1), (2, 2)),
    ]
    assert not stage.core.evaluations.open


def test_a_learner_whose_session_was_forgotten_gets_the_answer_it_never_saw() -> None:
    stage = Stage()
    job = evaluate(stage.core, 0)
    waiting = stage.ask(learner(), 7)
    assert isinstance(waiting, Later)
    stage.score()
    lost = waiting.retry()  # To a frozen learner; then its session is forgotten, with the answer.
    assert lost is not None
    assert lost.body[0][0] == job
    assert stage.ask(learner(), 7) == lost
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


def order_of(core: ReplayCore):
    (order,) = core.acquire("w", "a", 1).evaluations
    return order


def answer(core: ReplayCore, order: EvalAssignment, versions: tuple[int, int] = (0, 0), **rows) -> None:
    core.report_evaluation(
        "w",
        "a",
        EvalResult(
            job_id=order.job_id,
            chunk=order.chunk,
            attempt=order.attempt,
            version_min=versions[0],
            version_max=versions[1],
            **{"scores": (1.0, 0.0)} | rows,
        ),
    )


def test_an_evaluation_nobody_has_begun_is_cancelled_for_a_newer_one_and_counted() -> None:
    stage = Stage()
    begun = stage.core.evaluate(step=0, policy_version=0, eval_set="heldout", rows=4, chunk=2)
    first = order_of(stage.core)
    stage.core.evaluate(step=1, policy_version=0, eval_set="heldout", rows=4, chunk=2)
    other = stage.core.evaluate(step=2, policy_version=0, eval_set="other", rows=2, chunk=2)
    newest = stage.core.evaluate(step=2, policy_version=0, eval_set="heldout", rows=2, chunk=2)
    answer(stage.core, first)
    while stage.core.evaluations.open:
        answer(stage.core, order_of(stage.core))
    summaries = stage.core.finished_evaluations()
    assert summaries is not None
    assert [(s.job_id, s.superseded) for s in summaries] == [(other, 0), (begun, 1), (newest, 0)]
    stage.core.finished_evaluations()
    stage.restart()
    assert not stage.core.evaluations.open, "a superseded one comes back with the journal"


def test_after_a_restart_of_the_server_only_the_newest_of_a_set_is_made_again() -> None:
    stage = Stage()
    stage.core.evaluate(step=0, policy_version=0, eval_set="heldout", rows=4, chunk=2)
    order_of(stage.core)
    newest = stage.core.evaluate(step=1, policy_version=0, eval_set="heldout", rows=2, chunk=2)
    for _ in range(2):
        stage.restart()
        assert stage.core.evaluations.waiting_rows() == 2
    order = order_of(stage.core)
    answer(stage.core, order)
    assert [summary.job_id for summary in stage.core.finished_evaluations() or ()] == [newest]


def test_a_point_tells_its_versions_its_failures_and_counts_no_row_that_does_not_exist() -> None:
    stage = Stage()
    stage.core.publish(policy_version=3, parent=0)
    stage.core.evaluate(step=5, policy_version=0, eval_set="heldout", rows=8, chunk=4)
    answer(stage.core, order_of(stage.core), (0, 3), failed=2)
    answer(stage.core, order_of(stage.core), (NO_VERSION, NO_VERSION), scores=(), failed=1, missing=3)
    summary = the_summary(stage.core)
    assert (summary.step, summary.policy_version, summary.version_min, summary.version_max) == (5, 0, 0, 3)
    assert (summary.mean, summary.count, summary.failed) == (0.5, 2, 3)
    stage.core.evaluate(step=6, policy_version=0, eval_set="heldout", rows=2, chunk=2)
    order = order_of(stage.core)
    with pytest.raises(ReplayError, match="policy_version 7, which was never published"):
        answer(stage.core, order, (0, 7))


def test_the_last_evaluation_is_waited_for_while_rows_or_tokens_come_and_no_longer() -> None:
    stage = Stage()
    stage.core.evaluate(step=0, policy_version=0, eval_set="heldout", rows=8, chunk=2)
    waiting = stage.ask(learner(), 7)
    for beat in range(1, 6):
        order = order_of(stage.core) if beat < 4 else None
        if order is not None and beat % 2:
            answer(stage.core, order)
        else:
            stage.core.heartbeat("w", "a", {"progress": float(beat)})
            stage.core.goodbye("w", "a") if order is not None else None
            stage.core.hello("w", "a", 0)
        assert isinstance(waiting, Later)
        stage.clock.now += waiting.wait_s
        waiting = waiting.at_deadline()
    assert isinstance(waiting, Later)
    stage.clock.now += waiting.wait_s
    with pytest.raises(NoProgress, match=r"no row and no token for 100\.0 s: \d rows are open; .*: w for \d+ s"):
        waiting.at_deadline()


def test_a_thousand_chunks_wake_nobody_who_holds_one() -> None:
    stage = Stage()
    while stage.core.acquire("w", "a", 1000).assignments:  # no group is left to begin
        pass
    stage.core.evaluate(step=0, policy_version=0, eval_set="heldout", rows=1, chunk=1)
    assert stage.core.has_work()
    order_of(stage.core)
    assert not stage.core.has_work()
