"""Tracks the progress of the copy of a version, so that the sender can follow it piece by piece instead of waiting for
all of it."""

from __future__ import annotations

import math
import threading

from asyncrl.errors import WeightsError


class Filling:
    """Progress of one snapshot: the copying thread writes it, the sending and the training threads wait for it.

    Args:
        wait_s: longest wait for the next bytes.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._condition = threading.Condition()
        self.reached = 0
        """Number of bytes that are final, over all buckets in order."""
        self._wanted: list[float] = []
        """Number of bytes that each waiting thread waits for."""
        self._ended = False
        self.failed = False
        """The copy will never be complete, and must not be sent."""

    def reach(self, nbytes: int) -> None:
        """Record that the first `nbytes`, over all buckets in order, are final."""
        with self._condition:
            self.reached = nbytes
            if self._wanted and nbytes >= min(self._wanted):  # wake a waiting thread for its piece, not for every block
                self._condition.notify_all()

    def end(self, *, failed: bool = False) -> None:
        """Record that the copy and its fingerprints are complete, or that it failed. The first call counts."""
        with self._condition:
            if not self._ended:
                self._ended, self.failed = True, failed
            self._condition.notify_all()

    def wait(self, nbytes: int | None = None) -> None:
        """Wait until the first `nbytes` are final; without a number, until the copy has ended.

        Raises:
            WeightsError: the copy failed, or a rank of the gather is silent. `failed` is true from then on.
        """
        with self._condition:
            wanted = math.inf if nbytes is None else nbytes
            self._wanted.append(wanted)
            came = self._condition.wait_for(lambda: self._ended or self.reached >= wanted, self._wait_s)
            self._wanted.remove(wanted)
            if not came:
                self._ended = self.failed = True
            if self.failed:
                raise WeightsError("the copy out of the learner failed, or did not go on in time")
