"""Gradients far above those before them: which, and how often (`learner.skip_spikes`)."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable

from asyncrl.learner.optimizer.update import UpdateReport

log = logging.getLogger(__name__)

WINDOW, LEAST = 64, 16
"""Updates whose median counts, and how many there must be before anything is a spike."""


class Spikes:
    """Norms of one model's gradients before the clipping. The same on every rank, as the norms are."""

    def __init__(self, factor: float) -> None:
        """
        Args:
            factor: of the median, above which an update is skipped; 0 is never.
        """
        self._factor = factor
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self.skipped = 0

    @property
    def norms(self) -> list[float]:
        """Oldest first."""
        return list(self._norms)

    @property
    def limit(self) -> float:
        """The largest norm that makes an update."""
        enough = self._factor > 0 and len(self._norms) >= LEAST
        return self._factor * statistics.median(self._norms) if enough else math.inf

    def restore(self, norms: Iterable[float], skipped: int) -> None:
        """As a checkpoint had it."""
        self._norms = deque(norms, maxlen=WINDOW)
        self.skipped = skipped

    def note(self, report: UpdateReport, name: str, step: int) -> None:
        """Call after every update, with its step as metrics count them, from 1. A skipped one counts too: what stays
        where it jumped to is soon no spike."""
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
