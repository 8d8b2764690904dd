"""Messages between peer and server other than requests: hello, heartbeat and error replies. All are checked before
use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import AsyncRLError, FencedError, NoProgress, ReplayError, WireError
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.wire import Envelope

ROLES = ("worker", "learner", "shard", "viewer")
"""Roles of the peers that say hello."""

ERRORS: dict[str, type[AsyncRLError]] = {
    "fenced": FencedError,
    "wire": WireError,
    "no_progress": NoProgress,
    "replay": ReplayError,
}
"""Error by its name in a reply, the most specific ones first; other names are read as ReplayError."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a peer, which describes it."""

    role: str
    name: str
    digest: str
    """Digest of its settings, see `run_digest`."""
    served: int
    """Newest policy version that a worker serves."""
    boot: str
    """Identifies the server's memory that the peer worked with before; empty the first time."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The reply to a hello."""

    run: str
    boot: str
    window: int
    """Limit on the payload bytes that the peer may have sent and not yet got a reply to."""


@dataclass(frozen=True, slots=True)
class ServerTime:
    """The clocks of the server's machine, in ns, at the time of the answer."""

    boot: str
    """Boot id of the machine's kernel; see `asyncrl.spans.boot`."""
    monotonic: int
    wall: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """The reply to a heartbeat."""

    lost: list[int]
    """Numbers of requests that the server does not have."""
    window: int
    progress: int
    """Counter that grows with every change at the server."""
    time: ServerTime


def decode_hello(envelope: Envelope) -> Hello:
    """Raises WireError."""
    role, name, digest, served, boot = wire.sequence(envelope.body, "hello", 5)
    if wire.text(role, "role", wire.MAX_NAME) not in ROLES or not envelope.incarnation:
        raise WireError(f"hello needs an incarnation and a role of {ROLES}, not {wire.short(role)}")
    return Hello(
        role,
        wire.text(name, "name", wire.MAX_NAME),
        wire.text(digest, "run_digest", wire.MAX_NAME),
        wire.integer(served, "policy_version", -1, wire.MAX_VERSION),
        wire.text(boot, "boot", wire.MAX_NAME),
    )


def decode_replies(frames: Sequence[Frame]) -> list[tuple[Envelope, Sequence[Frame]]]:
    """Decode the replies of one message, each with its payload. Raises WireError."""
    if len(frames) > 1 and not len(frames[0]):
        return [(wire.decode_envelope(frame, max_bytes=wire.MAX_REPLY_BYTES), ()) for frame in frames[1:]]
    return [(wire.decode_envelope(frames[0], max_bytes=wire.MAX_REPLY_BYTES), frames[1:])]


def decode_welcome(body: Any) -> Welcome:
    """Raises WireError."""
    run, boot, window = wire.sequence(body, "the reply to hello", 3)
    return Welcome(wire.text(run, "run", wire.MAX_NAME), wire.text(boot, "boot", wire.MAX_NAME), _window(window))


def decode_pulse(body: Any) -> Pulse:
    """Raises WireError."""
    lost, window, progress, time = wire.sequence(body, "the reply to a heartbeat", 4)
    numbers = [wire.integer(item, "request", 0, wire.MAX_ID) for item in wire.sequence(lost, "lost requests")]
    boot, monotonic, wall = wire.sequence(time, "the server's clocks", 3)
    clocks = [wire.integer(each, "time", 0, wire.MAX_ID) for each in (monotonic, wall)]
    read = ServerTime(wire.text(boot, "boot", wire.MAX_NAME), *clocks)
    return Pulse(numbers, _window(window), wire.integer(progress, "progress", 0, wire.MAX_ID), read)


def window_after(body: Any) -> int:
    """Return the window, which is the last value of the reply to a request with payload. Raises WireError."""
    values = wire.sequence(body, "the reply to a group")
    if not values:
        raise WireError("the reply to a group must end with the window")
    return _window(values[-1])


def error_of(server: str, reply: Envelope) -> AsyncRLError:
    """Return the error of a reply that is not `ok`. Only text is passed on: another value may be nested too deep to
    be shown."""
    words = reply.body[: wire.MAX_TEXT] if isinstance(reply.body, str) else f"{wire.short(reply.verb)} without words"
    return ERRORS.get(reply.verb, ReplayError)(f"{server}: {words}")


def _window(value: Any) -> int:
    return wire.integer(value, "window", 0, wire.MAX_ID)
