"""The thread that writes `ledger.jsonl`, so that the server's loop never waits for its disk.

consumes:     events, in order
waits for:    the next of them, without a deadline: it lives as long as the server
unblocked by: it, `close`
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import replace

from asyncrl.replay.audit.ledger_file import LedgerFile
from asyncrl.replay.core.durable import events as ev

log = logging.getLogger(__name__)

LAST_WRITES_S = 60.0
"""For what is left at the end: it is no journal, nothing is recovered from it."""


class LedgerThread:
    """Call it with every event of the core. `replayed` and `recovered` are for the recovery, before the first one."""

    def __init__(self, ledger: LedgerFile) -> None:
        self.replayed, self.recovered = ledger.replayed, ledger.recovered
        self._ledger = ledger
        self._events: queue.SimpleQueue[ev.Event | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._main, name="ledger", daemon=True)
        self._thread.start()

    def __call__(self, event: ev.Event) -> None:
        """Raises what ended the thread: the server of a run whose ledger cannot be written must not go on silently."""
        if self._failure is not None:
            raise self._failure
        # The payload is none of its business, and would stay in memory for as long as the disk is slow.
        self._events.put(replace(event, payload=None) if isinstance(event, ev.Inserted) else event)

    def close(self) -> None:
        """Write what is left. Raises what ended the thread."""
        self._events.put(None)
        self._thread.join(LAST_WRITES_S)
        if self._thread.is_alive():
            log.error(
                "the last lines of the ledger could not be written to its disk within %.0f s: they are missing",
                LAST_WRITES_S,
            )
        elif self._failure is not None:
            raise self._failure

    def _main(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                self._ledger(event)
            # The boundary of the thread: what ends it must reach the loop, or lines would be missing without a word.
            except Exception as error:
                log.exception("the ledger could not be written")
                self._failure = error
                return
