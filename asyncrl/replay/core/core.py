"""The replay without sockets, threads or files: takes requests, returns decisions, reads time from a clock argument.

    worker:   hello · survey · heartbeat · acquire → insert | fail · served · report_evaluation · goodbye
    learner:  restore · publish · lease → trained → commit · evaluate · announce · snapshot · finish
    host:     expire (periodically)

No call blocks. A request that cannot be answered yet returns None or an empty reply, and the host (`server/loop.py`)
asks again after the next event. All durable changes go through `Run.record`, which passes them to the journal.

    requests/   requests of workers and the learner: `rollouts` and `steps`, above `retries` and `space`
    batches/    which groups make up a step
    run         settings, clock, durable state and live workers, shared by all of these
    live/       current workers and evaluations
    durable/    state that survives a restart
    admission   the two gates
"""

from __future__ import annotations

import math
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


class ReplayCore(Rollouts, Steps):
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
        Rollouts.__init__(self, run, retries, self.space)
        Steps.__init__(self, run, retries, self.space)
        self.credit, self.bring_back = self.space.credit, self.space.bring_back

    def configure(self, settings: dict[str, Any]) -> None:
        """Record new admission settings for a run that had others so far."""
        self.run.record(ev.Configured(settings))

    @property
    def board(self) -> Board:
        return self.state.peers.board

    def finish(self) -> None:
        """Drop open groups and tell workers to stop. Idempotent."""
        # Workers stop at once: the learner has just finished the run, it was not found finished at a restart.
        self._resumed_by = -math.inf
        super().finish()
