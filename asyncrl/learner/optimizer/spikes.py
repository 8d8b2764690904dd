"""Detects and counts gradients whose norm is far above the previous ones (`learner.skip_spikes`)."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable

from asyncrl.learner.optimizer.update import UpdateReport

log = logging.getLogger(__name__)

WINDOW, LEAST = 64, 16
"""Number of updates that the median is taken over, and the number needed before anything counts as a spike."""


class Spikes:
    """Gradient norms of one model before clipping. They are the same on every rank."""

    def __init__(self, factor: float) -> None:
        """
        Args:
            factor: an update is skipped above this many times the median; 0 is never.
        """
        self._factor = factor
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self.skipped = 0

    @property
    def norms(self) -> list[float]:
        """The norms, oldest first."""
        return list(self._norms)

    @property
    def limit(self) -> float:
        """Largest norm with which an update is applied."""
        enough = self._factor > 0 and len(self._norms) >= LEAST
        return self._factor * statistics.median(self._norms) if enough else math.inf

    def restore(self, norms: Iterable[float], skipped: int) -> None:
        """Restore the state from a checkpoint."""
        self._norms = deque(norms, maxlen=WINDOW)
        self.skipped = skipped

    def note(self, report: UpdateReport, name: str, step: int) -> None:
        """Call after every update; `step` counts from 1, as in metrics. The norm of a skipped update is noted too, so
        that a norm that stays at its new level soon is no spike."""
        if self._factor == 0 or not math.isfinite(report.grad_norm):
            return
        if report.spike:
            self.skipped += 1
            log.warning(
                "step %d: the gradient of the %s has a norm of %g, above %g (learner.skip_spikes=%g times the median "
                "of the last %d): no update",
                *(step, name, report.grad_norm, self.limit, self._factor, len(self._norms)),
            )
        self._norms.append(report.grad_norm)
