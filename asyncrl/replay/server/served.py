"""Interfaces between the server's loop and what it serves: the whole replay, or one shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.server.sessions import Reply, Session


class Progress(Protocol):
    """How far the run is."""

    @property
    def finished(self) -> bool: ...

    @property
    def applied(self) -> int:
        """Number of changes so far; grows with each."""
        ...


class Host(Protocol):
    """Tracks the peers that the server reports to it: `ReplayCore`, or a `Shard`."""

    @property
    def paused(self) -> str:
        """Why nothing new may be started; empty if it may. Set by the server."""
        ...

    @paused.setter
    def paused(self, why: str, /) -> None: ...

    @property
    def state(self) -> Progress: ...

    @property
    def clock(self) -> Callable[[], float]: ...

    def hello(self, worker: str, incarnation: str, served: int = ..., /) -> None: ...

    def hello_learner(self, rank: str, incarnation: str, /) -> None: ...

    def heartbeat(self, worker: str, incarnation: str, stats: dict[str, float], /) -> None: ...

    def goodbye(self, worker: str, incarnation: str, /) -> None: ...

    def expel(self, worker: str, incarnation: str, /) -> None: ...

    def expire(self) -> list[str]:
        """Return the names of workers that were silent for too long. Called several times a second."""
        ...


class Clerk(Protocol):
    """Answers the requests of peers: `Handlers`, or a `Shard`."""

    over: bool
    """Set once the run is over and everybody but the shards has left."""

    def handle(self, session: Session, verb: str, body: Any, frames: Sequence[Frame], /) -> Reply: ...

    def window(self) -> int: ...
