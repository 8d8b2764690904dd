"""What peer and server say to each other beside requests and answers, checked before anything is done with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import AsyncRLError, FencedError, NoProgress, ReplayError, WireError
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.wire import Envelope

ROLES = ("worker", "learner", "shard", "viewer")
"""Of those that say hello."""

ERRORS: dict[str, type[AsyncRLError]] = {
    "fenced": FencedError,
    "wire": WireError,
    "no_progress": NoProgress,
    "replay": ReplayError,
    "refused": ReplayError,
}


@dataclass(frozen=True, slots=True)
class Hello:
    """What a peer says of itself before anything else."""

    role: str
    name: str
    digest: str
    """Of its settings, see `run_digest`."""
    served: int
    """Newest policy version that a worker serves."""
    boot: str
    """The server's memory that it worked with before; empty the first time."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The reply to a hello."""

    run: str
    boot: str
    window: int
    """Bytes without an answer that the server allows."""


@dataclass(frozen=True, slots=True)
class ServerTime:
    """The clocks of the server's machine, in ns, when it answered."""

    boot: str
    """Of its kernel; see `asyncrl.spans.boot`."""
    monotonic: int
    wall: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """The reply to a heartbeat."""

    lost: list[int]
    """Requests that the server does not have."""
    window: int
    progress: int
    """Grows with every change at the server."""
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
    """The replies of one message, each with its payload. Raises WireError."""
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
    """The window that ends the reply to a request with payload. Raises WireError."""
    values = wire.sequence(body, "the reply to a group")
    if not values:
        raise WireError("the reply to a group must end with the window")
    return _window(values[-1])


def error_of(server: str, reply: Envelope) -> AsyncRLError:
    """What a reply that is not `ok` means. Only text is passed on: anything else may be too deep to be shown."""
    words = reply.body[: wire.MAX_TEXT] if isinstance(reply.body, str) else f"{wire.short(reply.verb)} without words"
    return ERRORS.get(reply.verb, ReplayError)(f"{server}: {words}")


def _window(value: Any) -> int:
    return wire.integer(value, "window", 0, wire.MAX_ID)
