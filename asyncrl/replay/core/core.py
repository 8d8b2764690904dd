"""The replay without sockets, threads or files: requests in, decisions out, time from a clock that is passed in.

    worker:   hello · survey · heartbeat · acquire → insert | fail · served · report_evaluation · goodbye
    learner:  restore · publish · certain · lease → trained → commit · evaluate · announce · snapshot · finish
    host:     expire (now and then)

No call waits. What cannot be answered yet returns None or an empty reply, and the host (`server/loop.py`) asks again
after the next event. All durable changes go through `Run.record`, where a journal listens.

    requests/   what workers and the learner ask: `rollouts` and `steps`, above `retries` and `space`
    tuning/     how far rollouts run ahead
    batches/    which groups make up a step
    run         settings, clock, durable state, live workers: what all of these share
    live/       workers and evaluations as they are now
    durable/    what survives a restart
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
    """`journal` is called with every event before it is applied. `clock` counts seconds from anywhere. `state` is what
    a journal remembers; without one the core begins empty."""

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

        # What a worker asks, or is said of one.
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

        # What the learner asks.
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

        # What the host asks for both.
        self.credit = space.credit
        self.bring_back = space.bring_back

    def configure(self, settings: dict[str, Any]) -> None:
        """This server goes on with a run that had other settings of admission so far."""
        self.run.record(ev.Configured(settings))

    @property
    def board(self) -> Board:
        return self.state.peers.board

    @property
    def paused(self) -> str:
        """Why no new group may be started just now; the host sets it."""
        return self.run.paused

    @paused.setter
    def paused(self, why: str) -> None:
        self.run.paused = why

    def finish(self) -> None:
        """Drop what is open and tell workers to stop. Repeating it is harmless."""
        self.rollouts.wait_for_no_resume()
        self.steps.finish()
