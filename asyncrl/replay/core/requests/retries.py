"""Ends attempts at groups: the group is tried again, or dropped with a reason."""

from __future__ import annotations

from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.ledger import Entry
from asyncrl.replay.core.live.workers import Worker
from asyncrl.replay.core.run import Run
from asyncrl.types import DropReason

RETRIED = frozenset(
    {
        DropReason.FAILED_GENERATION,
        DropReason.FAILED_REWARD,
        DropReason.FAILED_ENVIRONMENT,
        DropReason.FAILED_FILTER,
        DropReason.WORKER_LOST,
        DropReason.INCOMPLETE,
    }
)
"""Failures that another attempt may fix; for the other reasons the group is dropped at once."""


class Retries:
    """Ends attempts at groups."""

    def __init__(self, run: Run) -> None:
        self._run, self._state = run, run.state
        self._held_since: dict[tuple[int, int], float] = {}
        """(group id, attempt) -> time when this assignment was first seen to be held by a worker."""

    def end(self, entry: Entry, reason: DropReason, detail: str = "", pass_rate: float = -1.0) -> None:
        self.let_go(entry)
        if reason is DropReason.SHUTDOWN:
            self._run.record(ev.Returned(entry.group_id, counted=False))
        elif reason in RETRIED and entry.failures + 1 < self._run.settings.max_attempts:
            self._run.record(ev.Returned(entry.group_id, counted=True))
        else:
            self.drop(entry, reason, detail=detail, pass_rate=pass_rate)

    def reissue_overdue(self) -> None:
        held, now, timeout = self._state.held, self._run.clock(), self._run.settings.group_timeout_s
        if timeout == 0:
            return
        # Measured from when it was first seen here: one tick after it was issued, or after the server restarted.
        orders = [(group_id, entry.attempt) for group_id, entry in held.items()]
        self._held_since = {order: self._held_since.get(order, now) for order in orders}
        for (group_id, _), since in self._held_since.items():
            if now - since > timeout:
                self.end(held[group_id], DropReason.INCOMPLETE)

    def release(self, member: Worker, *, counted: bool = True) -> None:
        reason = DropReason.WORKER_LOST if counted else DropReason.SHUTDOWN
        for group_id in sorted(member.held):
            entry = self._state.held.get(group_id)
            if entry is not None and entry.incarnation == member.incarnation:
                self.end(entry, reason)
        member.held.clear()
        self._run.evaluations.release(member.name)

    def let_go(self, entry: Entry) -> None:
        member = self._run.workers.live.get(entry.worker)
        if member is not None:
            member.held.discard(entry.group_id)

    def drop(
        self,
        entry: Entry,
        reason: DropReason,
        *,
        readmit: bool = False,
        detail: str = "",
        pass_rate: float = -1.0,
    ) -> None:
        self.let_go(entry)
        self._run.record(ev.Dropped(entry.group_id, reason, readmit, detail, pass_rate))
