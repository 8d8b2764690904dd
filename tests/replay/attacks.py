"""The attacks: hand-written connections and endless floods, one generator each."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Callable, Iterator

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


ATTACKS: dict[str, Callable[[str], Iterator[None]]] = {
    attack.__name__: attack
    for attack in (
        half_open,
        come_and_go,
        oversized,
    )
}


def attack(name: str, address: str) -> None:
    for turns, _ in enumerate(ATTACKS[name](address)):
        if turns == 0:
            print("attacking", flush=True)
