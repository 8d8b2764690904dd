"""Socket options that both ends share."""

from __future__ import annotations

import zmq

from asyncrl.replay.wire import MAX_MESSAGE_BYTES

HIGH_WATER = 100_000
"""Messages per peer. Flow control is by byte credits; this only bounds a broken peer."""


def set_socket_options(socket: zmq.Socket, heartbeat_s: float, timeout_s: float) -> None:
    """`heartbeat_s` and `timeout_s` find a dead connection; the replay's own heartbeats find a stuck process."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(heartbeat_s * 1000)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(timeout_s * 1000)))
