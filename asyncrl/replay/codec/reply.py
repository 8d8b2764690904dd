"""Messages between peer and server other than requests: hello, heartbeat and error replies. All are checked before
use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import AsyncRLError, FencedError, NoProgress, ReplayError, WireError
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.messages import Count, Name, Version, decode_record
from asyncrl.replay.codec.wire import Envelope

ROLES = ("worker", "learner")
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

    role: Name
    name: Name
    digest: Name
    """Digest of its settings, see `run_digest`."""
    served: Version
    """Newest policy version that a worker serves."""
    boot: Name
    """Identifies the server's memory that the peer worked with before; empty the first time."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The reply to a hello."""

    run: Name
    boot: Name
    window: Count
    """Limit on the payload bytes that the peer may have sent and not yet got a reply to."""


@dataclass(frozen=True, slots=True)
class ServerTime:
    """The clocks of the server's machine, in ns, at the time of the answer."""

    boot: Name
    """Boot id of the machine's kernel; see `asyncrl.spans.boot`."""
    monotonic: Count
    wall: Count


@dataclass(frozen=True, slots=True)
class Pulse:
    """The reply to a heartbeat."""

    lost: list[int]
    """Numbers of requests that the server does not have."""
    window: Count
    progress: Count
    """Counter that grows with every change at the server."""
    time: ServerTime


def decode_hello(envelope: Envelope) -> Hello:
    """Raises WireError."""
    hello = decode_record(Hello, envelope.body)
    if hello.role not in ROLES or not envelope.incarnation:
        raise WireError(f"hello needs an incarnation and a role of {ROLES}, not {wire.short(hello.role)}")
    return hello


def decode_replies(frames: Sequence[Frame]) -> list[tuple[Envelope, Sequence[Frame]]]:
    """Decode the replies of one message, each with its payload. Raises WireError."""
    if len(frames) > 1 and not len(frames[0]):
        return [(wire.decode_envelope(frame, max_bytes=wire.MAX_REPLY_BYTES), ()) for frame in frames[1:]]
    return [(wire.decode_envelope(frames[0], max_bytes=wire.MAX_REPLY_BYTES), frames[1:])]


def window_after(body: Any) -> int:
    """Return the window, which is the last value of the reply to a request with payload. Raises WireError."""
    values = wire.sequence(body, "the reply to a group")
    if not values:
        raise WireError("the reply to a group must end with the window")
    return wire.integer(values[-1], "window", 0, wire.MAX_ID)


def error_of(server: str, reply: Envelope) -> AsyncRLError:
    """Return the error of a reply that is not `ok`. Only text is passed on: another value may be nested too deep to
    be shown."""
    words = reply.body[: wire.MAX_TEXT] if isinstance(reply.body, str) else f"{wire.short(reply.verb)} without words"
    return ERRORS.get(reply.verb, ReplayError)(f"{server}: {words}")
