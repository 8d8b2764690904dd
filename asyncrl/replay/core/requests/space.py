"""Memory of the payloads: which are released first, and how they are read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.buffer import IN_JOURNAL
from asyncrl.replay.core.durable.ledger import Entry
from asyncrl.replay.core.run import Run


class Space:
    """Keeps the payloads in memory within `max_bytes`."""

    def __init__(self, run: Run, max_bytes: int) -> None:
        self._run, self._state, self.max_bytes = run, run.state, max_bytes
        self.stored: Callable[[Entry], Any] | None = None
        """Reads the payload of a group from the journal; None if there is no journal."""

    def credit(self) -> int:
        """Return the bytes that workers may still send. Never 0 while the next batch is not sealed: the store may be
        full of later batches that a rollback has put back, and the learner would wait for ever."""
        free = self.max_bytes - self._state.buffer.nbytes
        following = self._state.buffer.untrained.get(self._state.trained_steps)
        return max(free, 0 if following is not None else 1)

    def make_room(self) -> None:
        """Release payloads that are not needed at present: those of trained steps, oldest first, then those of steps
        that a restore has planned far ahead. The journal has them. Without a journal only those of trained steps are
        released, and a restore generates their groups again."""
        buffer = self._state.buffer
        if buffer.nbytes <= self.max_bytes:  # the usual case; called after each group
            return
        trained = [buffer.trained[step] for step in sorted(buffer.trained)]
        soon = self._state.trained_steps + 1
        later = [buffer.untrained[step] for step in sorted(buffer.untrained, reverse=True) if step > soon]
        for sealed in (*trained, *later) if self.stored is not None else ():
            if buffer.nbytes <= self.max_bytes:
                return
            buffer.spill(sealed)
        for sealed in trained if self.stored is None else ():
            if buffer.nbytes <= self.max_bytes:
                return
            if not sealed.evicted:
                self._run.record(ev.Evicted(sealed.step))

    def bring_back(self, entries: Iterable[Entry]) -> None:
        """Read those payloads of `entries` from the journal that were released to free memory.

        Raises:
            JournalError: one is damaged.
        """
        for entry in entries:
            if entry.payload is IN_JOURNAL and self.stored is not None:
                self._state.buffer.bring_back(entry, self.stored(entry))
