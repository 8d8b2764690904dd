"""A peer's session at the server, and the two replies to a request: an answer now, or one later."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.checks.rules.values import LONGEST_WAIT_S
from asyncrl.errors import NoProgress, WireError
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.settings.replay import ReplayConfig

TICK_S = 0.2
"""Seconds between two looks of the server at who is silent."""
MIN_PATIENCE_S = 0.05
"""Shortest further wait in seconds of a request whose wait was extended: with 0 it would be retried without end."""


@dataclass(slots=True, eq=False)
class Session:
    """One incarnation of a peer, however often it reconnects."""

    role: str
    """`worker` or `learner`."""
    name: str
    incarnation: str
    identity: bytes
    """ROUTER identity of its newest connection."""
    seen: float
    """When it was last heard, by the server's clock."""
    request: int = -1
    """Number of the request being handled."""
    patient: int = 0
    """Number of requests that wait for an event, not counting those that wait for the disk."""
    acknowledged: int = 0
    """The peer has the answers to all its requests below this number."""
    replies: dict[int, list[Frame]] = field(default_factory=dict)
    """Answers to requests that must not run twice, until the peer has them."""
    machine: dict[str, float] = field(default_factory=dict)
    """Measurements of its machine from its last heartbeat."""
    waiting: set[int] = field(default_factory=set)
    """Requests without an answer yet: they wait for an event or for the disk."""
    beside: Collection[str] = ()
    """For a learner rank: incarnations of the same name that were present when it connected."""


def silence_of(config: ReplayConfig) -> float:
    """Seconds of silence after which the server reports a peer. Shorter than `heartbeat_timeout_s`, so that even with
    the server's own turn the report comes within it."""
    turn_s = max(TICK_S, config.heartbeat_timeout_s / 10)  # On a busy machine turns take longer.
    return max(config.heartbeat_timeout_s - turn_s, config.heartbeat_timeout_s / 2)


def always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request: the body of the envelope and the frames after it."""

    body: Any = None
    frames: Sequence[Frame] = ()


@dataclass(frozen=True, slots=True)
class Later:
    """A request that cannot be answered yet."""

    retry: Callable[[], Answer | None]
    """Returns the answer, or None if there is none yet."""
    at_deadline: Callable[[], Answer | Later]
    """Called after `wait_s`. May grant more time by returning another Later."""
    wait_s: float
    what: Hashable = ""
    """Key of the condition it waits for. Requests with the same key have the same `there`."""
    there: Callable[[], bool] = always
    """Whether the condition holds. Checked once for all requests that wait for it; only if true is each retried."""


Reply = Answer | Later
Handler = Callable[[Session, Any, Sequence[Frame]], Reply]


def now_or_later(
    retry: Callable[[], Answer | None],
    at_deadline: Callable[[], Answer | Later],
    wait_s: Any,
    what: Hashable,
    there: Callable[[], bool],
) -> Reply:
    """Return the answer if the condition holds and there is one, else a `Later` with these fields. Raises WireError if
    `wait_s` is out of range."""
    patience = wire.number(wait_s, "wait_s")
    if not 0 <= patience <= LONGEST_WAIT_S:
        raise WireError(f"wait_s must be between 0 and {LONGEST_WAIT_S:.0f} s, not {patience}")
    return (retry() if there() else None) or Later(retry, at_deadline, patience, what, there)


def while_it_moves(
    retry: Callable[[], Answer | None],
    mark: Callable[[], Hashable],
    silence: Callable[[], str],
    wait_s: Any,
    what: Hashable,
    there: Callable[[], bool],
) -> Reply:
    """As `now_or_later`, for as long as things move: after `wait_s` seconds in which `mark` was the same, and not None,
    the answer is NoProgress, with the words of `silence`."""

    def patience(before: Hashable) -> Callable[[], Answer | Later]:
        def give_up() -> Answer | Later:
            now = mark()
            if now is None or now != before:
                return Later(retry, patience(now), max(wait_s, MIN_PATIENCE_S), what, there)
            raise NoProgress(silence())

        return give_up

    return now_or_later(retry, patience(mark()), wait_s, what, there)
