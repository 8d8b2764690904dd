"""Attempts at groups, and how they end: the group is tried again, or dropped with its reason."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.replay import events as ev
from asyncrl.replay.admission import AdmissionSettings
from asyncrl.replay.evaluations import Evaluations
from asyncrl.replay.ledger import Entry
from asyncrl.replay.meter import Meter
from asyncrl.replay.state import ReplayState
from asyncrl.replay.workers import Worker, Workers
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
"""Failures that another attempt may cure; the other reasons drop the group at once."""


class Attempts:
    """The durable state of a run, the workers that hold orders, and the one way in which either changes."""

    def __init__(
        self,
        settings: AdmissionSettings,
        clock: Callable[[], float],
        *,
        seed: int = 0,
        max_bytes: int = 1 << 30,
        heartbeat_timeout_s: float = 10.0,
        journal: Callable[[ev.Event], None] | None = None,
        state: ReplayState | None = None,
    ) -> None:
        self.settings, self.seed, self.max_bytes = settings, seed, max_bytes
        self.clock = clock
        self.state = state or ReplayState(settings.max_staleness)
        self.workers = Workers(heartbeat_timeout_s)
        self.evaluations = Evaluations(settings.max_attempts)
        self.meter = Meter(clock())
        self.paused = ""
        """Why no new group may be started just now, whatever the gates say; empty when nothing is wrong."""
        self.shards_paused = ""
        """Likewise, of the shards."""
        self._journal = journal
        self._held_since: dict[tuple[int, int], float] = {}
        """(group id, attempt) -> clock when this order was first seen to be out."""

    @property
    def why_paused(self) -> str:
        return "; ".join(why for why in (self.paused, self.shards_paused) if why)

    def _record(self, event: ev.Event) -> None:
        """Every durable change passes here, before it is carried out."""
        if self._journal is not None:
            self._journal(event)
        self.state.apply(event)

    def _reissue_overdue(self) -> None:
        held, now, timeout = self.state.held, self.clock(), self.settings.group_timeout_s
        if timeout == 0:
            return
        # Counted from when it was first seen here, which is a tick after it was given out or the server restarted.
        orders = [(group_id, entry.attempt) for group_id, entry in held.items()]
        self._held_since = {order: self._held_since.get(order, now) for order in orders}
        for (group_id, _), since in self._held_since.items():
            if now - since > timeout:
                self._end_attempt(held[group_id], DropReason.INCOMPLETE)

    def _end_attempt(self, entry: Entry, reason: DropReason, detail: str = "") -> None:
        self._let_go(entry)
        if reason is DropReason.SHUTDOWN:
            self._record(ev.Returned(entry.group_id, counted=False))
        elif reason in RETRIED and entry.failures + 1 < self.settings.max_attempts:
            self._record(ev.Returned(entry.group_id, counted=True))
        else:
            self._drop(entry, reason, detail=detail)

    def _release(self, member: Worker, *, counted: bool = True) -> None:
        reason = DropReason.WORKER_LOST if counted else DropReason.SHUTDOWN
        for group_id in sorted(member.held):
            entry = self.state.held.get(group_id)
            if entry is not None and entry.incarnation == member.incarnation:
                self._end_attempt(entry, reason)
        member.held.clear()
        self.evaluations.release(member.name)

    def _let_go(self, entry: Entry) -> None:
        member = self.workers.live.get(entry.worker)
        if member is not None:
            member.held.discard(entry.group_id)

    def _drop(self, entry: Entry, reason: DropReason, *, readmit: bool = False, detail: str = "") -> None:
        self._let_go(entry)
        self._record(ev.Dropped(entry.group_id, reason, readmit, detail))

    def _make_room(self) -> None:
        trained = self.state.buffer.trained
        while self.state.buffer.nbytes > self.max_bytes:
            oldest = next((step for step in sorted(trained) if not trained[step].evicted), None)
            if oldest is None:
                return
            self._record(ev.Evicted(oldest))
