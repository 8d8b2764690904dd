"""Handler of the only verb of a viewer, `view`. It reads state, changes nothing, and costs the other peers little: the
view is computed at most once per `VIEW_S` seconds for all viewers, and each viewer gets at most one in that time. The
end of the run is reported at once, because the server may exit before viewers ask again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from asyncrl.errors import WireError
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.messages import encode_record
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.net.keyring import VIEWER
from asyncrl.replay.protocol import PeerSeen, View
from asyncrl.replay.server.sessions import Answer, Later, Reply, Session
from asyncrl.types import NO_VERSION

VIEW_S = 1.0
"""Seconds between two views."""
MAX_VIEWERS = 16
"""Limit on viewers at the same time; further ones are refused."""
MOST_PEERS = 64
"""Limit on peers in a view: those that have been silent for longest."""
MOST_WORDS = 2000
"""Limit in characters on the text of why the learner waits, which names every worker."""


class Viewing:
    """Answers `view`.

    Args:
        sessions: the sessions of all connected peers.
    """

    def __init__(self, run_id: str, core: ReplayCore, sessions: Collection[Session]) -> None:
        self._run_id, self._core, self._sessions = run_id, core, sessions
        self._made: tuple[float, bool, list[Any]] = -math.inf, False, []
        """When the last view was made, whether the run was finished then, and the encoded view."""

    def view(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        """Answer now or once `VIEW_S` seconds have passed since the viewer's last view. Raises WireError if the viewer
        did not wait for its last answer."""
        if body is not None or frames:
            raise WireError("view takes nothing")
        if session.waiting:
            raise WireError("a viewer must wait for its answer before it asks again")

        def answer() -> Answer:
            session.viewed = self._core.clock()
            return Answer(self._answer())

        wait_s = session.viewed + VIEW_S - self._core.clock()
        if wait_s <= 0:
            return answer()
        known = self._core.state.finished  # the viewer's last view said so, or this one will

        def ends() -> bool:
            return self._core.state.finished and not known

        return Later(lambda: answer() if ends() else None, answer, wait_s, ("view", known), ends)

    def _answer(self) -> list[Any]:
        now, finished = self._core.clock(), self._core.state.finished
        if now - self._made[0] >= VIEW_S or finished != self._made[1]:
            self._made = now, finished, encode_record(self.made(now))
        return self._made[2]

    def made(self, now: float) -> View:
        """Build the view from the current state."""
        core, state = self._core, self._core.state
        peers = sorted((each for each in self._sessions if each.role != VIEWER), key=lambda each: each.seen)
        waits = not state.finished and core.meter.idle.state is not None
        return View(
            run=self._run_id,
            clock=now,
            trained_steps=state.trained_steps,
            committed_steps=state.committed_step + 1,
            policy_version=state.version,
            finished=state.finished,
            waits=core.explain(state.trained_steps)[:MOST_WORDS] if waits else "",
            paused=core.run.why_paused[:MOST_WORDS],
            now=core.run.counts(),
            last=dict(core.last_metrics),
            peers=tuple(self._peer(each, now) for each in peers[:MOST_PEERS]),
            more_peers=max(0, len(peers) - MOST_PEERS),
        )

    def _peer(self, session: Session, now: float) -> PeerSeen:
        worker = self._core.workers.get(session.name, session.incarnation) if session.role == "worker" else None
        return PeerSeen(
            role=session.role,
            name=session.name,
            silent_s=max(0.0, now - session.seen),
            served=worker.served if worker else NO_VERSION,
            held=len(worker.held) if worker else 0,
            tokens_per_s=worker.pace if worker else 0.0,
            still_s=max(0.0, now - worker.moved) if worker else 0.0,
        )
