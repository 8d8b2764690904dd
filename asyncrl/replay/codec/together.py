"""Requests of one peer on their way to the server: those that are ready at the same time share a message, for each
message costs as much as all else that is done for a small group.

    one      frame 0: an envelope with its number and verb, body `[acknowledged, body]`; its frames
    several  frame 0: an envelope with the verb `several`, body `[acknowledged, [[number, verb, body, how many frames],
             ...]]`; the frames of the first, those of the second, ...

Each keeps its number, by which it is answered, and asked again, alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.errors import WireError
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.wire import Envelope

SEVERAL = "several"
MOST = 64
"""Requests in one message."""
MOST_BYTES = 256 << 10
"""Payload of a message from which no further request joins it. It arrives as a whole: of several large groups the
server would no longer find the first in the processor's cache."""


class Asking(Protocol):
    """A request as its client has it."""

    @property
    def number(self) -> int: ...
    @property
    def verb(self) -> str: ...
    @property
    def body(self) -> Any: ...
    @property
    def frames(self) -> Sequence[Frame]: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came; its body is not looked at yet."""

    number: int
    verb: str
    body: Any
    frames: Sequence[Frame]


def encode_requests(requests: Sequence[Asking], acknowledged: int) -> tuple[str, int, list[Any], list[Frame]]:
    """`(verb, number, body, frames)` of their message; the number is the first one's."""
    first = requests[0]
    if len(requests) == 1:
        return first.verb, first.number, [acknowledged, first.body], list(first.frames)
    rows = [[each.number, each.verb, each.body, len(each.frames)] for each in requests]
    return SEVERAL, first.number, [acknowledged, rows], [frame for each in requests for frame in each.frames]


def decode_requests(envelope: Envelope, frames: Sequence[Frame]) -> tuple[int, list[Asked]]:
    """`(acknowledged, requests)` of a message: the peer has the answers to all requests below the first.

    Raises:
        WireError: none, too many, or other frames than they say.
    """
    acknowledged, body = wire.sequence(envelope.body, "request", 2)
    wire.integer(acknowledged, "acknowledged", 0, wire.MAX_ID)
    if envelope.verb != SEVERAL:
        return acknowledged, [Asked(envelope.request, envelope.verb, body, frames)]
    asked: list[Asked] = []
    stop = 0
    for row in wire.sequence(body, "requests", limit=MOST):
        number, verb, each, count = wire.sequence(row, "request", 4)
        start, stop = stop, stop + wire.integer(count, "frames", 0, len(frames) - stop)
        wire.integer(number, "request", 0, wire.MAX_ID)
        asked.append(Asked(number, wire.text(verb, "verb", wire.MAX_NAME), each, frames[start:stop]))
    if not asked or stop != len(frames):
        raise WireError(f"{len(asked)} requests with {stop} frames in a message that has {len(frames)}")
    return acknowledged, asked
