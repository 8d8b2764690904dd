"""A peer of the server, and what it may get for a request: an answer now, or later."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.checks.rules.values import LONGEST_WAIT_S
from asyncrl.errors import WireError
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame

MIN_PATIENCE_S = 0.05
"""Of a lease whose patience starts anew: with 0 it would be asked again without end."""


@dataclass(slots=True, eq=False)
class Session:
    """One incarnation of a peer, however often it reconnects."""

    role: str
    """`worker`, `learner`, `shard` or `viewer`."""
    name: str
    incarnation: str
    identity: bytes
    """Where its newest connection is."""
    seen: float
    request: int = -1
    """Number of the request in hand."""
    malformed: int = 0
    """Messages from it that were none."""
    patient: int = 0
    """Requests that wait for something to happen, other than the disk."""
    acknowledged: int = 0
    """The peer has the answers to all its requests below this number."""
    replies: dict[int, list[Frame]] = field(default_factory=dict)
    """Answers to requests that must not run twice, until the peer has them."""
    machine: dict[str, float] = field(default_factory=dict)
    """What it told of its machine with its last heartbeat."""
    waiting: set[int] = field(default_factory=set)
    """Requests that are waiting for something to happen."""
    beside: Collection[str] = ()
    """Of a rank of a learner: incarnations of its name that were heard of when it came."""
    viewed: float = -math.inf
    """When it was last told what a viewer is told."""


def always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Answer:
    body: Any = None
    frames: Sequence[Frame] = ()


@dataclass(frozen=True, slots=True)
class Later:
    retry: Callable[[], Answer | None]
    at_deadline: Callable[[], Answer | Later]
    """May grant more time by returning another Later."""
    wait_s: float
    what: Hashable = ""
    """What it waits for. All that wait for the same have the same `there`."""
    there: Callable[[], bool] = always
    """Whether that is there: asked once for all that wait for it, and only then is each of them."""


Reply = Answer | Later
Handler = Callable[[Session, Any, Sequence[Frame]], Reply]


def now_or_later(
    retry: Callable[[], Answer | None],
    at_deadline: Callable[[], Answer | Later],
    wait_s: Any,
    what: Hashable,
    there: Callable[[], bool],
) -> Reply:
    """See `Later`."""
    patience = wire.number(wait_s, "wait_s")
    if not 0 <= patience <= LONGEST_WAIT_S:
        raise WireError(f"wait_s must be between 0 and {LONGEST_WAIT_S:.0f} s, not {patience}")
    return (retry() if there() else None) or Later(retry, at_deadline, patience, what, there)
