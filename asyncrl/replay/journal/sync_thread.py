"""A thread that makes the journal durable, so that the server's loop never waits for a disk.

consumes:     events appended to the journal
waits for:    the first of them, without a deadline; then, after a sync, as long as that took, at most `interval_s`
              (group commit: writing takes as long in one batch as in two, but one batch needs one sync)
unblocked by: `nudge` after an append, `stop`
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path

from asyncrl.errors import DiskFullError, JournalError
from asyncrl.replay.journal.log import SegmentLog
from asyncrl.replay.net.wakeup import Wakeup
from asyncrl.spans import span
from asyncrl.storage.full_disk import disk_space

log = logging.getLogger(__name__)


class SyncThread:
    """`wakeup` rings after each sync, for the poller of the loop. `failure` is the error that ended the thread.

    Args:
        folder: the journal's folder, for messages about a full disk.
    """

    def __init__(self, journal: SegmentLog, interval_s: float, folder: Path | None = None) -> None:
        self.journal = journal
        self.failure: JournalError | DiskFullError | None = None
        self._folder = folder or Path()
        self.wakeup = Wakeup()
        self._interval_s = interval_s
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="journal", daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """Wake the thread if there is something to write. Cheap, since it is called after every turn of the loop."""
        if self.journal.promised > self.journal.durable and not self._work.is_set():
            self._work.set()

    def heard(self) -> None:
        """Clear the signal of `wakeup`.

        Raises:
            JournalError, DiskFullError: the thread has failed; nothing more becomes durable.
        """
        self.wakeup.heard()
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """Make everything durable, close the journal and end the thread.

        Raises:
            JournalError, DiskFullError: what was not acknowledged may be lost.
        """
        self._stopping.set()
        self._work.set()
        self._thread.join()
        try:
            if self.failure is None:
                with self._space():
                    self.journal.close()
            else:
                self.journal.disk.close()
        finally:
            self.wakeup.close()

    def _main(self) -> None:
        rested_at = 0.0
        while not self._stopping.is_set():
            self._work.wait()
            self._work.clear()
            self._stopping.wait(max(0.0, rested_at - time.monotonic()))
            with span("write the journal", "journal"):
                self._write()
            # On a fast disk small batches cost little, and peers that wait for one reply after another get it sooner.
            rested_at = time.monotonic() + min(self._interval_s, self.journal.sync_s)
            self.wakeup.ring()
            if self.failure is not None:
                return

    def _space(self) -> contextlib.AbstractContextManager[None]:
        return disk_space(self._folder / self.journal.writing, self.journal.queued_bytes())

    def _write(self) -> None:
        """As `write_batch`; an error ends the thread."""
        try:
            with self._space():
                self.journal.write_batch()
        except (JournalError, DiskFullError) as error:
            self.failure = error
        # The boundary of the thread: its failure must reach the loop, or every reply would wait forever.
        except Exception as error:
            log.exception("the thread of the journal failed")
            self.failure = JournalError(f"the journal could not be written: {type(error).__name__}: {error}")
