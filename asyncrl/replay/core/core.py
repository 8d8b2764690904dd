"""The replay without sockets, threads or files: takes requests, returns decisions, reads time from a clock argument.

    worker:   hello · survey · heartbeat · acquire → insert | fail · served · report_evaluation · goodbye
    learner:  restore · publish · certain · lease → trained → commit · evaluate · announce · snapshot · finish
    host:     expire (periodically)

No call blocks. A request that cannot be answered yet returns None or an empty reply, and the host (`server/loop.py`)
asks again after the next event. All durable changes go through `Run.record`, which passes them to the journal.

    requests/   requests of workers and the learner: `rollouts` and `steps`, above `retries` and `space`
    tuning/     how far rollouts run ahead
    batches/    which groups make up a step
    run         settings, clock, durable state and live workers, shared by all of these
    live/       current workers and evaluations
    durable/    state that survives a restart
    admission   the two gates
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.replay.core.requests.retries import Retries
from asyncrl.replay.core.requests.rollouts import Rollouts
from asyncrl.replay.core.requests.space import Space
from asyncrl.replay.core.requests.steps import Steps
from asyncrl.replay.core.run import Run
from asyncrl.replay.protocol import Board


class ReplayCore:
    """`journal` is called with every event before it is applied. `clock` returns seconds from an arbitrary origin.
    `state` is the state recovered from a journal; without it the core starts empty."""

    def __init__(
        self,
        settings: AdmissionSettings,
        clock: Callable[[], float],
        *,
        seed: int = 0,
        max_bytes: int = 1 << 30,
        heartbeat_timeout_s: float = 10.0,
        journal: Callable[[ev.Event], None] | None = None,
        state: ReplayState | None = None,
    ) -> None:
        self.state = state or ReplayState()
        self.run = run = Run(
            settings, clock, seed=seed, heartbeat_timeout_s=heartbeat_timeout_s, journal=journal, state=self.state
        )
        self.workers, self.evaluations, self.meter, self.clock = run.workers, run.evaluations, run.meter, clock
        retries, self.space = Retries(run), Space(run, max_bytes)
        self.rollouts = Rollouts(run, retries, self.space)
        self.steps = Steps(run, retries, self.space)
        rollouts, steps, space = self.rollouts, self.steps, self.space

        # Requests of a worker, or about one.
        self.hello = rollouts.hello
        self.heartbeat = rollouts.heartbeat
        self.goodbye = rollouts.goodbye
        self.expel = rollouts.expel
        self.expire = rollouts.expire
        self.acquire = rollouts.acquire
        self.has_work = rollouts.has_work
        self.may_take = rollouts.may_take
        self.survey = rollouts.survey
        self.insert = rollouts.insert
        self.fail = rollouts.fail
        self.served = rollouts.served
        self.report_evaluation = rollouts.report_evaluation
        self.members = rollouts.members
        self.take_over = rollouts.take_over
        self.settle_s = rollouts.settle_s

        # Requests of the learner.
        self.hello_learner = steps.hello_learner
        self.check_rank = steps.check_rank
        self.check_learner = steps.check_learner
        self.restore = steps.restore
        self.publish = steps.publish
        self.lease = steps.lease
        self.is_sealed = steps.is_sealed
        self.certain = steps.certain
        self.patience_mark = steps.patience_mark
        self.trained = steps.trained
        self.commit = steps.commit
        self.snapshot = steps.snapshot
        self.announce = steps.announce
        self.evaluate = steps.evaluate
        self.evaluation_mark = steps.evaluation_mark
        self.finished_evaluations = steps.finished_evaluations
        self.explain = steps.explain
        self.explain_evaluation = steps.explain_evaluation

        # Requests of the host, on behalf of both.
        self.credit = space.credit
        self.bring_back = space.bring_back

    def configure(self, settings: dict[str, Any]) -> None:
        """Record new admission settings for a run that had others so far."""
        self.run.record(ev.Configured(settings))

    @property
    def board(self) -> Board:
        return self.state.peers.board

    @property
    def paused(self) -> str:
        """The reason why no new group may be started at present; set by the host."""
        return self.run.paused

    @paused.setter
    def paused(self, why: str) -> None:
        self.run.paused = why

    def finish(self) -> None:
        """Drop open groups and tell workers to stop. Idempotent."""
        self.rollouts.wait_for_no_resume()
        self.steps.finish()
