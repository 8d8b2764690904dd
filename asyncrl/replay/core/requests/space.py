"""The memory that payloads take: which are given up first, and how they come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.buffer import IN_JOURNAL
from asyncrl.replay.core.durable.ledger import Entry
from asyncrl.replay.core.run import Run


class Space:
    """`max_bytes` of payloads."""

    def __init__(self, run: Run, max_bytes: int) -> None:
        self._run, self._state, self.max_bytes = run, run.state, max_bytes
        self.stored: Callable[[Entry], Any] | None = None
        """Reads the payload of a group from the journal, where there is one."""

    def credit(self) -> int:
        """Bytes that producers may still send. Never zero while the next batch is not whole: the learner would starve
        for it, with the store full of later ones that a rollback has put back."""
        free = self.max_bytes - self._state.buffer.nbytes
        following = self._state.buffer.untrained.get(self._state.trained_steps)
        return max(free, 0 if following is not None else 1)

    def make_room(self) -> None:
        """Give up payloads that nobody needs just now: those of trained steps, the oldest first, then those of steps
        that a restore has planned far ahead. The journal has them; without one, a restore makes such groups anew."""
        buffer = self._state.buffer
        if buffer.nbytes <= self.max_bytes:  # asked after each group
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
        """Read the payloads of `entries` from the journal, as far as they were given up for memory.

        Raises:
            JournalError: one is damaged.
        """
        for entry in entries:
            if entry.payload is IN_JOURNAL and self.stored is not None:
                self._state.buffer.bring_back(entry, self.stored(entry))
