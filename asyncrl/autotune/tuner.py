"""`rollout.autotune`: adjusts how far the rollouts may run ahead, during the run, so that the learner is busy at the
lowest staleness. Pure: takes steps, returns moves.

Groups in flight age while they are generated, groups in store while they wait. The tuner therefore looks for the
freshest bounds that give nearly as many tokens per second as any, according to `Forecast`, whether they were tried or
not. Where the forecast is uncertain, both directions are explored: up if more groups in flight may give more tokens and
more were not tried recently, down if fewer may give as many. In both cases the next steps decide.

To prevent oscillation, measurements are kept and determine the expectation; changes that gain little are not made
(deadband); a decision is based on `MEASURED` steps, and the wait grows after each move, unless far too few tokens are
made (rate limit). If the run has changed, the tuner starts over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.autotune.forecast import Bounds, Forecast, Grid, Limits, Seen, mean_in_flight

MEASURED = 5
"""Minimum number of steps that a decision is based on."""
GOAL, ENOUGH, FAR_TOO_FEW = 0.974, 0.962, 0.92
"""Shares of the most tokens per second that any bounds would give: the target of a move; the share that is sufficient;
the share below which a move is not delayed until the next is due."""
UNSURE = 0.25
"""Quantile of the pessimistic forecast; the optimistic one is at 1 minus this."""
FRESHER, FRESHER_SHARE = 0.15, 0.05
"""Minimum decrease of the mean staleness that justifies a move: in versions, plus a share of the present staleness."""
FARTHEST_UP, FARTHEST_DOWN = 3.0, 1.8
"""Limits on the factor by which one move changes the groups in flight."""
MORE = 1.2
"""Factor of the present number of groups in flight above which another number counts as more."""
BETTER, ALIKE = 0.01, 0.05
"""Differences that count as none: a share of the tokens, and versions of staleness."""
LONGER, LONGEST = 1.3, 200
"""Factor by which the wait until the next move grows with each move, and its maximum in steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    bounds: Bounds
    reason: str


class Tuner:
    """Decides on moves. `step` must be called for every trained step."""

    def __init__(self, limits: Limits, bounds: Bounds) -> None:
        self.limits, self.bounds = limits, bounds
        self._forecast = Forecast(limits)
        self._settling = 1
        """Number of coming steps to ignore."""
        self._begin()

    def _begin(self) -> None:
        self._wait, self._rest = float(MEASURED), 0
        """Steps to wait after the latest move, and how many of them are left."""
        self._left, self._seconds = MEASURED, 0.0
        """Steps until the next decision; seconds since the last decision."""
        self._strange = 0
        """Number of consecutive decisions at which the run seemed to have changed."""

    def step(self, seen: Seen) -> Move | None:
        """Return the move to make before the next group is admitted; usually None."""
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
        """Ignore the next steps: a learner was restored, or nothing was admitted for a while. `others`: also forget the
        measurements, because the set of engines has changed."""
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
        """Return a mask, `[depth, in_flight]`, of the places that one move may reach."""
        now, uneven = self.bounds, self._forecast.uneven
        fills = flying > 0.7 * now.max_in_flight
        most = max(FARTHEST_UP * flying, now.max_in_flight if fills else 0, 2)
        reach = (grid.most <= most) & (grid.flying >= min(flying, grid.flying[grid.now]) / FARTHEST_DOWN)
        return reach & (grid.depth != uneven) if now.pipeline_depth < uneven - 1 else reach


def freshest(grid: Grid, worth: NDArray[np.float64], among: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the place of the lowest staleness `among` those with enough `worth`; if none has enough, among those with
    about the most. If `among` is empty, return the place in force."""
    if not among.any():
        return grid.now
    most = np.where(among, worth, -1).max()
    enough = among & (worth >= (GOAL if most >= GOAL else most - BETTER))
    stale = np.where(enough, grid.staleness + 1e-6 * (grid.depth + grid.most), np.inf)
    depth, in_flight = np.unravel_index(stale.argmin(), stale.shape)
    return int(depth), int(in_flight)
