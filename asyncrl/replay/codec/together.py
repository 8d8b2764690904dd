"""Batches requests from one peer to the server: those that are ready at the same time share a message, because a
message costs as much as all the other work for a small group.

    one      frame 0: an envelope with its number and verb, body `[acknowledged, body]`; its frames
    several  frame 0: an envelope with the verb `several`, body `[acknowledged, [[number, verb, body, how many frames],
             ...]]`; the frames of the first, those of the second, ...

Each request keeps its own number, by which it is answered and repeated individually.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import WireError
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.wire import Envelope

SEVERAL = "several"
MOST = 64
"""Limit on the requests in one message."""
MOST_BYTES = 256 << 10
"""Payload in bytes from which no further request joins a message. A message arrives as a whole: with several large
groups in it, the first would no longer be in the processor's cache when the server reads it."""


@dataclass(slots=True)
class Asked:
    """A request; as received, its body is not checked yet."""

    number: int
    verb: str
    body: Any
    frames: Sequence[Frame]


def encode_requests(requests: Sequence[Asked], acknowledged: int) -> tuple[str, int, list[Any], list[Frame]]:
    """Return `(verb, number, body, frames)` of the message; its number is that of the first request."""
    first = requests[0]
    if len(requests) == 1:
        return first.verb, first.number, [acknowledged, first.body], list(first.frames)
    rows = [[each.number, each.verb, each.body, len(each.frames)] for each in requests]
    return SEVERAL, first.number, [acknowledged, rows], [frame for each in requests for frame in each.frames]


def decode_requests(envelope: Envelope, frames: Sequence[Frame]) -> tuple[int, list[Asked]]:
    """Return `(acknowledged, requests)` of a message: the peer has the answers to all requests below `acknowledged`.

    Raises:
        WireError: there are no requests or too many, or the number of frames is not the announced one.
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
