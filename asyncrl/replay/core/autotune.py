"""The tuner of a run whose settings want one: passes it each trained step, and carries out its moves."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from asyncrl.autotune.forecast import Bounds, Limits, Seen
from asyncrl.autotune.tuner import Move, Tuner
from asyncrl.replay.core.run import Run
from asyncrl.types import StepPlan

log = logging.getLogger(__name__)

LEAST_S = 5.0
"""Minimum seconds per decision where workers report by heartbeats: see `Limits.least_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Totals of a run so far; a measurement is the difference of two."""

    clock: float
    waited_s: float
    """Seconds that the learner waited for a batch."""
    in_flight: dict[int, float]
    """Seconds by the number of groups in flight."""
    generated: float
    """Tokens generated."""
    wasted: int
    """Tokens that were too old to be trained."""
    workers: frozenset[str]
    """Incarnations of the live workers."""

    @classmethod
    def of(cls, run: Run) -> Totals:
        now, flight = run.clock(), run.meter.flight
        flight.note(now, flight.state)
        return cls(
            clock=now,
            waited_s=sum(run.meter.idle.seconds.values()),
            in_flight=dict(flight.seconds),
            generated=run.workers.generated(now),
            wasted=sum(run.meter.wasted),
            workers=frozenset(worker.incarnation for worker in run.workers.live.values()),
        )

    def since(self, before: Totals, trained: dict[int, int]) -> Seen:
        seconds = self.clock - before.clock
        return Seen(
            seconds=seconds,
            waited_s=self.waited_s - before.waited_s,
            in_flight={
                count: passed - before.in_flight.get(count, 0.0)
                for count, passed in self.in_flight.items()
                if passed > before.in_flight.get(count, 0.0)
            },
            generated=max(0.0, self.generated - before.generated),
            trained=trained,
            wasted=self.wasted - before.wasted,
        )


class Autotune:
    """Connects a run with its `Tuner`. Does nothing if the settings do not ask for one."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tuner: Tuner | None = None
        settings = run.settings
        if settings.most_in_flight:
            limits = Limits(
                groups_per_step=settings.groups_per_step,
                deepest=settings.max_staleness - settings.bypass_steps,
                most_in_flight=settings.most_in_flight,
                least_s=LEAST_S if run.workers.timeout_s < math.inf else 0.0,
            )
            begin = Bounds(pipeline_depth=settings.pipeline_depth, max_in_flight=settings.max_in_flight)
            self._tuner = Tuner(limits, begin)
        self._before: Totals | None = None
        """Totals at the last step."""
        self.moves = 0

    def interrupted(self) -> None:
        """To be called when a learner was restored."""
        self._before = None
        if self._tuner is not None:
            self._tuner.interrupted()

    def trained(self, plan: StepPlan) -> dict[str, float]:
        """Process a trained step. Returns metrics of the bounds in force after it."""
        if self._tuner is None:
            return {}
        run = self._run
        now = Totals.of(run)
        before, self._before = self._before, now
        if before is not None and now.workers != before.workers:
            self._tuner.interrupted(others=True)
        elif run.why_paused or run.state.replays(run.settings.pipeline_depth):
            self._tuner.interrupted()
        elif before is not None and now.clock > before.clock:
            self._carry_out(self._tuner.step(now.since(before, plan.tokens_by_staleness())))
        return {
            "autotune/pipeline_depth": float(run.settings.pipeline_depth),
            "autotune/max_in_flight": float(run.settings.max_in_flight),
            "autotune/moves": float(self.moves),
        }

    def _carry_out(self, move: Move | None) -> None:
        if move is None:
            return
        old, new = self._run.settings, move.bounds
        self._run.allow(pipeline_depth=new.pipeline_depth, max_in_flight=new.max_in_flight)
        self.moves += 1
        log.info(
            "autotune: pipeline_depth %d -> %d, max_in_flight %d -> %d: %s",
            old.pipeline_depth, new.pipeline_depth, old.max_in_flight, new.max_in_flight, move.reason,
        )  # fmt: skip
