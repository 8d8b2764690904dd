"""What a server needs to know of the part of the replay that it serves: all of it, or one shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from asyncrl.errors import AsyncRLError, FencedError, NoProgress, ReplayError, WireError
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.core.requests.rollouts import UnknownPeer
from asyncrl.replay.server.sessions import Reply, Session

ERROR_KINDS: dict[type[AsyncRLError], str] = {
    FencedError: "fenced",
    UnknownPeer: "unknown_peer",
    WireError: "wire",
    NoProgress: "no_progress",
    ReplayError: "replay",
}


class Progress(Protocol):
    @property
    def finished(self) -> bool: ...

    @property
    def applied(self) -> int:
        """Grows with every change."""
        ...


class Host(Protocol):
    """What the server tells of its peers, and asks: `ReplayCore`, or the host of a shard."""

    @property
    def paused(self) -> str:
        """Why nothing new may be started; the server sets it."""
        ...

    @paused.setter
    def paused(self, why: str, /) -> None: ...

    @property
    def state(self) -> Progress: ...

    def hello(self, worker: str, incarnation: str, served: int = ..., /) -> None: ...

    def hello_learner(self, rank: str, incarnation: str, /) -> None: ...

    def heartbeat(self, worker: str, incarnation: str, stats: dict[str, float], /) -> None: ...

    def goodbye(self, worker: str, incarnation: str, /) -> None: ...

    def expel(self, worker: str, incarnation: str, /) -> None: ...

    def expire(self) -> list[str]:
        """Called several times a second. Returns the workers that were silent for too long."""
        ...


class Clerk(Protocol):
    """What answers their requests: `Handlers`, or that of a shard."""

    over: bool
    """Set once the run is over and everybody but the shards has left."""

    def handle(self, session: Session, verb: str, body: Any, frames: Sequence[Frame], /) -> Reply: ...

    def window(self) -> int: ...
