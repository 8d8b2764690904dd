"""How far the copy of a version has come: the sender follows it piece by piece instead of waiting for all of it."""

from __future__ import annotations

import threading

from asyncrl.errors import WeightsError


class Filling:
    """One snapshot's; the thread that copies writes, the one that sends waits.

    Args:
        wait_s: longest wait for the next bytes.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._condition = threading.Condition()
        self._reached = self._wanted = 0
        self._ended = False
        self.failed = False
        """There will never be more of it, and it must not be sent."""

    def reach(self, nbytes: int) -> None:
        """The first `nbytes`, over all buckets in order, are final."""
        with self._condition:
            self._reached = nbytes
            if nbytes >= self._wanted:  # who waits is woken for its piece, not for every block
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
            self._wanted = nbytes or 0
            came = self._condition.wait_for(
                lambda: self._ended or (nbytes is not None and self._reached >= nbytes), self._wait_s
            )
            if not came:
                self._ended = self.failed = True
            if self.failed:
                raise WeightsError("the copy out of the learner failed, or did not go on in time")
