"""`rollout.autotune`: how far the rollouts may run ahead, moved while the run goes on so that the learner is busy at
the lowest staleness. Pure: steps go in, moves come out.

What is in flight gets older while it is made, and what lies in store while it waits. So of all bounds the freshest are
looked for that make nearly as many tokens per second as any, by what `Forecast` says of them, tried or not. Where it is
unsure it is asked both ways: up if it may be that more makes more and more was not tried of late, down if it may be
that less makes as many. Either way the next steps tell.

So that it never oscillates: what was measured is kept and decides what is expected; changes that gain little are left
(deadband); a decision rests on `MEASURED` steps, and after each move the next one has to wait longer, unless far too
few tokens are made (rate limit). A run that has changed begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.replay.core.tuning.forecast import Bounds, Forecast, Grid, Limits, Seen, mean_in_flight

MEASURED = 5
"""Steps that a decision rests on, at least."""
GOAL, ENOUGH, FAR_TOO_FEW = 0.974, 0.962, 0.92
"""Of the most tokens per second that any bounds would make: so many are aimed at; with so many it need not have more;
with fewer it does not wait until the next move is due."""
UNSURE = 0.25
"""Probability at which something may be."""
FRESHER, FRESHER_SHARE = 0.15, 0.05
"""Versions of mean staleness, and share of it: that much less, both together, is worth a move."""
FARTHEST_UP, FARTHEST_DOWN = 3.0, 1.8
"""Factors of groups in flight, of one move."""
MORE = 1.2
"""Factor of groups in flight, of what counts as more than now."""
BETTER, ALIKE = 0.01, 0.05
"""Share of the tokens, and versions, that are no difference."""
LONGER, LONGEST = 1.3, 200
"""Factor by which the time until the next move grows with each, and the most it comes to, in steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    bounds: Bounds
    reason: str


class Tuner:
    """`step` is told every trained step."""

    def __init__(self, limits: Limits, bounds: Bounds) -> None:
        self.limits, self.bounds = limits, bounds
        self._forecast = Forecast(limits)
        self._settling = 1
        """Steps that are not looked at."""
        self._begin()

    def _begin(self) -> None:
        self._wait, self._rest = float(MEASURED), 0
        """Steps between moves, and until the next."""
        self._left, self._seconds = MEASURED, 0.0
        """Steps until the next decision; seconds that have passed since the last."""
        self._strange = 0
        """Decisions in a row at which the run seemed to have changed."""

    def step(self, seen: Seen) -> Move | None:
        """What to change before the next group is admitted; None, mostly."""
        if self._settling > 0:
            self._settling -= 1
            return None
        self._forecast.note(seen, self.bounds)
        self._rest -= 1
        self._left -= 1
        self._seconds += seen.seconds
        if self._left > 0 or self._seconds < self.limits.least_s:
            return None
        self._left, self._seconds = MEASURED, 0.0
        self._strange = self._strange + 1 if self._forecast.has_changed() else 0
        if self._strange > 1:
            self._begin()
            self._forecast.forget(but=2 * MEASURED)
        to, reason = self._decide()
        if to == self.bounds:
            return None
        self._wait = min(LONGER * self._wait, LONGEST)
        self._rest, self._left = round(self._wait), MEASURED + 1
        self.bounds = to
        return Move(bounds=to, reason=reason)

    def interrupted(self, *, others: bool = False) -> None:
        """The steps so far say nothing of those to come: a learner was restored, or nothing was admitted for a while.
        `others`: nor does what is known, for there are other engines."""
        self._settling = max(self._settling, 2)
        if others:
            self._forecast.forget()
            self._begin()

    def _decide(self) -> tuple[Bounds, str]:
        recent, grid = self._forecast.recent(), self._forecast.grid(UNSURE)
        flying = mean_in_flight(recent)
        waits = sum(seen.waited_s for seen in recent) / sum(seen.seconds for seen in recent)
        said = f"the learner waited {waits:.1%} of the time with {flying:.1f} groups in flight"
        reach, expected = self._reach(grid, flying), float(grid.worth[grid.now])
        explores = self._forecast.tried() <= MORE * flying and grid.low[grid.now] < ENOUGH
        if expected < ENOUGH or explores:
            worth = grid.low if explores else grid.worth
            to = freshest(grid, worth, reach)
            if worth[to] < worth[grid.now] + BETTER or (self._rest > 0 and expected >= FAR_TOO_FEW):
                return self.bounds, ""
            return grid.bounds(to), f"{said}; {worth[to]:.0%} of the tokens/s that can be had are expected"
        now, stale = grid.staleness[grid.now], grid.staleness
        to, least = freshest(grid, grid.high, reach), freshest(grid, grid.high, grid.depth != self._forecast.uneven)
        if now - stale[least] <= FRESHER + FRESHER_SHARE * now or now - stale[to] <= ALIKE or self._rest > 0:
            return self.bounds, ""
        return grid.bounds(to), f"{said}; about as many tokens/s are expected, {now - stale[to]:.1f} versions fresher"

    def _reach(self, grid: Grid, flying: float) -> NDArray[np.bool_]:
        """`[depth, in_flight]` whether one move may lead there."""
        now, uneven = self.bounds, self._forecast.uneven
        fills = flying > 0.7 * now.max_in_flight
        most = max(FARTHEST_UP * flying, now.max_in_flight if fills else 0, 2)
        reach = (grid.most <= most) & (grid.flying >= min(flying, grid.flying[grid.now]) / FARTHEST_DOWN)
        return reach & (grid.depth != uneven) if now.pipeline_depth < uneven - 1 else reach


def freshest(grid: Grid, worth: NDArray[np.float64], among: NDArray[np.bool_]) -> tuple[int, int]:
    """Place of those that make enough; where none does, of those that make about the most; of none, that in force."""
    if not among.any():
        return grid.now
    most = np.where(among, worth, -1).max()
    enough = among & (worth >= (GOAL if most >= GOAL else most - BETTER))
    stale = np.where(enough, grid.staleness + 1e-6 * (grid.depth + grid.most), np.inf)
    depth, in_flight = np.unravel_index(stale.argmin(), stale.shape)
    return int(depth), int(in_flight)
