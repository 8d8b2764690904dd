"""What both ends share in using their socket: its options, and how a message is taken from it."""

from __future__ import annotations

import zmq

from asyncrl.replay.payload import Frame
from asyncrl.replay.wire import MAX_MESSAGE_BYTES

HIGH_WATER = 100_000
"""Messages per peer. Flow control is by byte credits; this only bounds a broken peer."""
IN_PLACE = 64 << 10
"""Bytes from which a frame stays in the memory that libzmq received it into; it has that to itself, a small one may
share it with others and would keep all of it."""


def set_socket_options(socket: zmq.Socket, heartbeat_s: float, timeout_s: float) -> None:
    """`heartbeat_s` and `timeout_s` find a dead connection; the replay's own heartbeats find a stuck process."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(heartbeat_s * 1000)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(timeout_s * 1000)))


def receive(socket: zmq.Socket) -> list[Frame]:
    """The next message, if it is there already. Raises zmq.Again when it is not."""
    frames = socket.recv_multipart(zmq.DONTWAIT, copy=False)
    return [frame.buffer if len(frame) >= IN_PLACE else frame.bytes for frame in frames]
