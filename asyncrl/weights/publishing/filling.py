"""How far the copy of a version has come: the sender follows it piece by piece instead of waiting for all of it."""

from __future__ import annotations

import math
import threading

from asyncrl.errors import WeightsError


class Filling:
    """One snapshot's; the thread that copies writes, the one that sends waits, and the one that trains.

    Args:
        wait_s: longest wait for the next bytes.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._condition = threading.Condition()
        self.reached = 0
        """So many bytes, over all buckets in order, are final."""
        self._wanted: list[float] = []
        """By who waits: for how much."""
        self._ended = False
        self.failed = False
        """There will never be more of it, and it must not be sent."""

    def reach(self, nbytes: int) -> None:
        """The first `nbytes`, over all buckets in order, are final."""
        with self._condition:
            self.reached = nbytes
            if self._wanted and nbytes >= min(self._wanted):  # who waits is woken for its piece, not for every block
                self._condition.notify_all()

    def end(self, *, failed: bool = False) -> None:
        """The copy is whole, and so are its fingerprints; or it failed. The first word counts."""
        with self._condition:
            if not self._ended:
                self._ended, self.failed = True, failed
            self._condition.notify_all()

    def wait(self, nbytes: int | None = None) -> None:
        """Until the first `nbytes` are final; without a number, until the copy has ended.

        Raises:
            WeightsError: it failed, or a rank of the gather is silent. `failed` is true from then on.
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
