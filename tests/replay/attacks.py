"""The attacks: hand-written connections and endless floods, one generator each."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Callable, Iterator

import zmq

from asyncrl.replay.codec import wire
from asyncrl.replay.codec.wire import Envelope
from asyncrl.types import NO_VERSION

RUN, DIGEST = "run", "d"
GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 0]) + b"NULL".ljust(20, b"\0") + bytes(32)
"""ZMTP 3.0, mechanism NULL."""
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
MORE, LONG, COMMAND = 1, 2, 4


def endpoint(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("tcp://").split(":")
    return host, int(port)


def connected(address: str, within_s: float = 30.0) -> socket.socket:
    """Connect to a server.

    Waits for a server that is just starting; unblocked when it listens, or by the deadline.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            return socket.create_connection(endpoint(address))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def raw(address: str) -> socket.socket:
    """Return a connection with the handshake done by hand, over which bytes can follow that no library would send."""
    made = connected(address)
    made.sendall(GREETING)
    made.sendall(bytes([COMMAND, len(READY)]) + READY)
    return made


def frame(flags: int, body: bytes, announced: int | None = None) -> bytes:
    return struct.pack(">BQ", flags | LONG, len(body) if announced is None else announced) + body


def envelope(verb: str, request: int, incarnation: str, body: object, run: str = RUN) -> bytes:
    return wire.encode_envelope(Envelope(run=run, verb=verb, request=request, incarnation=incarnation, body=body))


def hello(name: str, request: int = 1) -> bytes:
    return envelope("hello", request, f"life of {name}", ["worker", name, DIGEST, NO_VERSION, ""])


def dealer(address: str) -> zmq.Socket:
    made = zmq.Context.instance().socket(zmq.DEALER)
    made.connect(address)
    return made


def drain(peer: zmq.Socket) -> None:
    with contextlib.suppress(zmq.Again):
        while True:
            peer.recv_multipart(zmq.DONTWAIT)


def flood_garbage(address: str) -> Iterator[None]:
    """Send bytes that are no message at all."""
    peer = dealer(address)
    while True:
        for _ in range(100):
            peer.send(b"\xc1garbage")
        drain(peer)
        yield


def flood_pings(address: str) -> Iterator[None]:
    """Send garbage with protocol pings in between, from a peer that disconnects and reconnects all the time."""
    beat = bytes([COMMAND, 7]) + b"\x04PING" + struct.pack(">H", 50)
    burst = (frame(0, b"\xc1garbage") * 20 + beat) * 200
    while True:
        with contextlib.suppress(OSError):
            peer = raw(address)
            for _ in range(100):
                peer.sendall(burst)
            # Close with a reset, while most of it is unread.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
        yield


def flood_large(address: str) -> Iterator[None]:
    """Send headers of the largest size, which are expensive to decode and invalid."""
    peer = dealer(address)
    deep = wire.pack([[0] * 65_000] * 64)
    while True:
        peer.send(deep)
        drain(peer)
        yield


def flood_strangers(address: str) -> Iterator[None]:
    """Send requests without a hello, of another run and of another schema."""
    peer = dealer(address)
    other_schema = wire.pack([wire.SCHEMA + 1, RUN, "members", 3, "x", None])
    while True:
        for _ in range(30):
            peer.send(envelope("members", 1, "nobody", [0, None]))
            peer.send(envelope("members", 2, "nobody", [0, None], run="another"))
            peer.send(other_schema)
        drain(peer)
        yield


def flood_hellos(address: str) -> Iterator[None]:
    """Say hello as a new worker again and again, over one connection."""
    peer = dealer(address)
    for number in itertools.count():
        peer.send(hello(f"sybil {number}"))
        if number % 20 == 0:
            drain(peer)
            yield


def asking_without_end(address: str, name: str, verb: str, body: object) -> Iterator[None]:
    """As one worker, send the same request again and again. Answers are read but not acknowledged."""
    peer = dealer(address)
    peer.send(hello(name))
    for number in itertools.count(2):
        peer.send(envelope(verb, number, f"life of {name}", [0, body]))
        if number % 100 == 0:
            drain(peer)
            yield


def flood_waits(address: str) -> Iterator[None]:
    """As one worker, watch the board without end, each time willing to wait for an hour."""
    return asking_without_end(address, "patient", "watch", [0, 3600.0])


def flood_unacknowledged(address: str) -> Iterator[None]:
    """As one worker, never acknowledge the answers that have arrived."""
    return asking_without_end(address, "forgetful", "acquire", [0, 0.0])


def deaf(address: str) -> Iterator[None]:
    """As one worker, send requests and never read an answer."""
    while True:
        with contextlib.suppress(OSError):  # the server has closed the connection
            peer = raw(address)
            peer.sendall(frame(0, hello("deaf")))
            for number in itertools.count(2):
                peer.sendall(frame(0, envelope("watch", number, "life of deaf", [0, [number, 0.0]])))
                if number % 100 == 0:
                    yield


def half_open(address: str) -> Iterator[None]:
    """Open connections that never finish their greeting."""
    kept: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            kept.append(socket.create_connection(endpoint(address)))
            kept[-1].sendall(GREETING[:20])
        if len(kept) >= 2000:
            for old in kept[:1000]:
                old.close()
            del kept[:1000]
        yield


def come_and_go(address: str) -> Iterator[None]:
    """Open connections and close them at once."""
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(endpoint(address)).close()
        yield


def oversized(address: str) -> Iterator[None]:
    """Send frames that announce more bytes than are allowed, or more than are ever sent."""
    kept: list[socket.socket] = []
    for size in itertools.cycle((1 << 62, wire.MAX_MESSAGE_BYTES + 1, wire.MAX_MESSAGE_BYTES)):
        with contextlib.suppress(OSError):
            kept.append(raw(address))
            kept[-1].sendall(frame(0, b"x" * 1000, announced=size))
        for old in kept[:-20]:
            old.close()
        del kept[:-20]
        time.sleep(0.01)
        yield


def endless(address: str) -> Iterator[None]:
    """Send one message whose frames never end."""
    piece = frame(MORE, bytes(64 << 10))
    while True:
        with contextlib.suppress(OSError):
            peer = raw(address)
            while True:
                peer.sendall(piece)
                yield


ATTACKS: dict[str, Callable[[str], Iterator[None]]] = {
    attack.__name__: attack
    for attack in (
        flood_garbage,
        flood_pings,
        flood_large,
        flood_strangers,
        flood_hellos,
        flood_waits,
        flood_unacknowledged,
        deaf,
        half_open,
        come_and_go,
        oversized,
        endless,
    )
}


def attack(name: str, address: str) -> None:
    for turns, _ in enumerate(ATTACKS[name](address)):
        if turns == 0:
            print("attacking", flush=True)
