"""What both ends share in using their socket: its options, and how a message is taken from it and given to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import zmq

from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.wire import MAX_MESSAGE_BYTES
from asyncrl.replay.net.keys import is_loopback

_NOW, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
HIGH_WATER = 100_000
"""Messages per peer. Flow control is by byte credits; this only bounds a broken peer."""
MAX_TTL_MS = 6_553_500
"""The protocol has 16 bits of tenths of a second for it."""
IN_PLACE = 16 << 10
"""Bytes from which a frame stays in the memory that libzmq received it into; it has that to itself, one below the 8 KiB
that libzmq reads at once may share it with others and would keep all of it."""
LOOPBACK_SEND_BUFFER = 160 << 10
"""Bytes under way to another process of this machine. What so few hold is still in the processor's cache when it is
received; of the megabytes that the operating system would grant most are fetched from memory again, and a hop takes up
to three times the processor time. Much less than two packets of loopback (64 KiB) and the connection stalls. Over a
network as many bytes must be under way as it takes to fill it."""


def set_socket_options(socket: zmq.Socket, address: str, heartbeat_s: float, timeout_s: float) -> None:
    """`heartbeat_s` and `timeout_s` find a dead connection; the replay's own heartbeats find a stuck process."""
    socket.setsockopt(zmq.IPV6, int("[" in address))  # ZeroMQ takes no address of IPv6 otherwise
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if is_loopback(address):
        socket.setsockopt(zmq.SNDBUF, LOOPBACK_SEND_BUFFER)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(heartbeat_s * 1000)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(timeout_s * 1000)))
    # Told to the other end, which closes a connection that no beat has come from for so long.
    socket.setsockopt(zmq.HEARTBEAT_TTL, min(MAX_TTL_MS, max(100, int(timeout_s * 1000))))


def send(socket: zmq.Socket, frames: Sequence[Frame]) -> None:
    """Now or not at all. A frame that is passed on whole as `receive` gave it shares its memory with the message; any
    other large one would be kept alive by a thread of pyzmq that has to hear when it has gone out.

    Raises:
        zmq.Again: the peer's queue is full.
    """
    # `send_multipart` and `recv_multipart` take twice as long: flags that are an enum, a question for each frame.
    *before, last = frames
    for frame in before:
        socket.send(_as_received(frame), _MORE, copy=False)
    socket.send(_as_received(last), _NOW, copy=False)


def _as_received(frame: Frame) -> Frame | zmq.Frame:
    origin = frame.obj if isinstance(frame, memoryview) else None
    return origin if isinstance(origin, zmq.Frame) and len(origin) == len(frame) else frame


def receive(socket: zmq.Socket) -> list[Frame]:
    """The next message, if it is there already. Raises zmq.Again when it is not."""
    return [_in_place(frame) for frame in _frames(socket)]


def receive_routed(router: zmq.Socket) -> tuple[zmq.Frame, list[Frame]]:
    """The same of a ROUTER: the frame that names the connection, and the others."""
    connection, *frames = _frames(router)
    return connection, [_in_place(frame) for frame in frames]


def _frames(socket: zmq.Socket) -> Iterator[zmq.Frame]:
    frame = socket.recv(_NOW, copy=False)
    yield frame
    while frame.more:  # those that follow are there with the first
        frame = socket.recv(_NOW, copy=False)
        yield frame


def _in_place(frame: zmq.Frame) -> Frame:
    return frame.buffer if len(frame) >= IN_PLACE else frame.bytes
