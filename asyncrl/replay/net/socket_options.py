"""Socket options, sending and receiving, for both ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import zmq

from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.wire import MAX_MESSAGE_BYTES
from asyncrl.replay.net.keys import is_loopback

_NOW, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
HIGH_WATER = 100_000
"""Limit on the queued messages per peer. Flow control is by byte credit; this only bounds a broken peer."""
MAX_TTL_MS = 6_553_500
"""Limit on a heartbeat's time to live in ms: the protocol has 16 bits for it, in tenths of a second."""
IN_PLACE = 16 << 10
"""Size in bytes from which a frame stays in the memory into which libzmq received it, which it does not share. A frame
below the 8 KiB that libzmq reads at once may share its memory with others and would keep all of it alive."""
LOOPBACK_SEND_BUFFER = 160 << 10
"""Send buffer in bytes for another process on this machine. This little is still in the processor's cache when it is
received; of the megabytes that the operating system would grant, most are fetched from memory again, and a hop takes up
to three times the processor time. With much less than two packets of loopback (64 KiB) the connection stalls. Over a
network, the buffer must be large enough to fill it, so it is left to the operating system."""


def set_socket_options(socket: zmq.Socket, address: str, heartbeat_s: float, timeout_s: float) -> None:
    """Set options. `heartbeat_s` and `timeout_s` detect a dead connection; the replay's own heartbeats detect a stuck
    process."""
    socket.setsockopt(zmq.IPV6, int("[" in address))  # otherwise ZeroMQ accepts no IPv6 address
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if is_loopback(address):
        socket.setsockopt(zmq.SNDBUF, LOOPBACK_SEND_BUFFER)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(heartbeat_s * 1000)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(timeout_s * 1000)))
    # Sent to the other end, which closes the connection if no heartbeat arrives for this long.
    socket.setsockopt(zmq.HEARTBEAT_TTL, min(MAX_TTL_MS, max(100, int(timeout_s * 1000))))


def send(socket: zmq.Socket, frames: Sequence[Frame]) -> None:
    """Send now or not at all. A frame that is forwarded whole as `receive` returned it shares its memory with the
    message; any other large frame is kept alive by a thread of pyzmq that must learn when it has been sent.

    Raises:
        zmq.Again: the peer's queue is full.
    """
    # `send_multipart` and `recv_multipart` take twice as long: they use enum flags and check each frame.
    *before, last = frames
    for frame in before:
        socket.send(_as_received(frame), _MORE, copy=False)
    socket.send(_as_received(last), _NOW, copy=False)


def _as_received(frame: Frame) -> Frame | zmq.Frame:
    origin = frame.obj if isinstance(frame, memoryview) else None
    return origin if isinstance(origin, zmq.Frame) and len(origin) == len(frame) else frame


def receive(socket: zmq.Socket) -> list[Frame]:
    """Return the next message. Raises zmq.Again if none has arrived."""
    return [_in_place(frame) for frame in _frames(socket)]


def receive_routed(router: zmq.Socket) -> tuple[zmq.Frame, list[Frame]]:
    """As `receive`, for a ROUTER: returns the frame that names the connection, and the other frames."""
    connection, *frames = _frames(router)
    return connection, [_in_place(frame) for frame in frames]


def _frames(socket: zmq.Socket) -> Iterator[zmq.Frame]:
    frame = socket.recv(_NOW, copy=False)
    yield frame
    while frame.more:  # the other frames arrive together with the first
        frame = socket.recv(_NOW, copy=False)
        yield frame


def _in_place(frame: zmq.Frame) -> Frame:
    return frame.buffer if len(frame) >= IN_PLACE else frame.bytes
