"""Bind and secure the sockets of a server: one tcp socket for peers with a key, and for peers on the same machine one
unix socket (a door) per role."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import zmq

from asyncrl.checks.addresses import numeric
from asyncrl.errors import ReplayError
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.net.doors import Doors
from asyncrl.replay.net.keyring import roles_by_key
from asyncrl.replay.net.keys import Guests, check_address, secure_server
from asyncrl.replay.net.socket_options import receive_routed, send, set_socket_options
from asyncrl.settings.replay import ReplayConfig

log = logging.getLogger(__name__)

HANDSHAKE_MS = 10_000
"""Milliseconds after which a connection that has not completed its handshake is closed."""
BACKLOG = 4096
"""Limit on pending connections. With the usual 100, the others would retry after a second."""
UNREAD = 10_000
"""Limit on replies that a peer has not read. Further ones are lost, and the peer repeats its requests."""
SPELL = 32
"""Messages read from one socket before the next has its turn."""


class Entrance:
    """All sockets of a server as one.

    Args:
        tcp: socket on which the role of a connection is that of its key.
        doors: role -> socket of which every connection has this role.
    """

    def __init__(self, tcp: zmq.Socket, guests: Guests, doors: Mapping[str, zmq.Socket]) -> None:
        self.sockets = [tcp, *doors.values()]
        self._roles: list[Callable[[zmq.Frame], str]] = [guests.role, *(_always(role) for role in doors)]
        self._ready: deque[int] = deque()
        """Indices of the sockets that may have messages."""
        self._taken = 0
        self._turn = -1
        """Index of the socket that is read first."""

    def heard(self, ready: Mapping[object, int]) -> bool:
        """Note which sockets a poller found ready; return whether there is one."""
        # Rotate: a server that polls again after each large message would otherwise read the first socket alone, for as
        # long as messages come there.
        self._turn = (self._turn + 1) % len(self.sockets)
        places = (*range(self._turn, len(self.sockets)), *range(self._turn))
        self._ready = deque(place for place in places if self.sockets[place] in ready)
        return bool(self._ready)

    def receive(self) -> tuple[bytes, zmq.Frame, str, list[Frame]]:
        """Return `(identity, frame of the connection, role, frames)` of the next message. Identities are unique across
        sockets.

        Raises:
            zmq.Again: the sockets found ready by `heard` have no more messages.
        """
        while self._ready:
            place = self._ready[0]
            try:
                connection, frames = receive_routed(self.sockets[place])
            except zmq.Again:
                self._ready.popleft()
                continue
            self._taken += 1
            if self._taken % SPELL == 0:
                self._ready.rotate(-1)
            return bytes((place,)) + connection.bytes, connection, self._roles[place](connection), frames
        raise zmq.Again

    def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """Send to one connection. Raises zmq.ZMQError if the peer is gone or does not read."""
        send(self.sockets[identity[0]], [identity[1:], *frames])


def hang_up(message: zmq.Frame) -> None:
    """Close the connection that a message came from. libzmq has no call for this and would go on reading. If the
    connection is already closed, its file descriptor may belong to another connection by now; that peer reconnects."""
    with contextlib.suppress(OSError, zmq.ZMQError):  # closed already
        number = message.get(zmq.SRCFD)
        if isinstance(number, int) and number >= 0:
            double = os.dup(number)
            try:
                line = socket.socket(fileno=double)
            except OSError:  # by now the descriptor of a file
                os.close(double)
                raise
            with line:
                line.shutdown(socket.SHUT_RDWR)


def _always(role: str) -> Callable[[zmq.Frame], str]:
    return lambda connection: role


@contextlib.contextmanager
def entrance(config: ReplayConfig) -> Iterator[Entrance]:
    """Open the socket of `router` and the doors.

    Raises:
        ConfigError, ReplayError: as for `router`.
    """
    with router(config) as tcp, _doors(config, tcp.context) as doors:
        yield Entrance(tcp, Guests(config.keys), doors)


@contextlib.contextmanager
def _doors(config: ReplayConfig, context: zmq.Context) -> Iterator[dict[str, zmq.Socket]]:
    """Open the doors, by role. Empty if they are switched off or cannot be opened; then all peers connect by tcp."""
    opened: dict[str, zmq.Socket] = {}
    with contextlib.ExitStack() as stack:
        if config.local_sockets:
            try:
                doors = Doors(config.keys, config.address, make=True)
                stack.callback(doors.close)
                doors.sweep()
                for role in roles_by_key(config.keys).values():
                    opened[role] = stack.enter_context(_listening(config, context, doors, role))
            except (OSError, zmq.ZMQError) as error:  # a file system without sockets, or read-only
                log.warning("no local sockets can be made in %s, so all connections use TCP: %s", config.keys, error)
                stack.close()  # a peer that connects to a bound socket nobody reads would wait
                opened.clear()
        yield opened


@contextlib.contextmanager
def _listening(config: ReplayConfig, context: zmq.Context, doors: Doors, role: str) -> Iterator[zmq.Socket]:
    socket = _configured(context, config)
    try:
        socket.bind(f"ipc://{doors.path(role)}")  # replaces the socket file of a killed server
        yield socket
    finally:
        socket.close(linger=0)
        doors.remove(role)


def _open_as_many_files_as_allowed() -> None:
    """Each peer takes one file descriptor; the usual soft limit of 1024 would turn away the thousandth."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def router(config: ReplayConfig) -> Iterator[zmq.Socket]:
    """Bind and secure the tcp socket of the replay server.

    Raises:
        ConfigError: the address is a wildcard, or a key is missing. ReplayError: the address cannot be bound.
    """
    address = numeric(config.address)
    check_address(address, config.keys)
    _open_as_many_files_as_allowed()
    context = zmq.Context(1)
    socket, authenticator = _configured(context, config), None
    try:
        authenticator = secure_server(context, socket, config.keys)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ReplayError(f"cannot listen on replay.address={config.address!r}: {error}") from error
        yield socket
    finally:
        socket.close(linger=0)
        if authenticator is not None:  # None if `secure_server` raised
            authenticator.stop()
        context.term()


def _configured(context: zmq.Context, config: ReplayConfig) -> zmq.Socket:
    socket = context.socket(zmq.ROUTER)
    set_socket_options(socket, config.address, config.heartbeat_s, config.heartbeat_timeout_s)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # libzmq 4.3.5 aborts the process when a peer goes away while reading from it is stopped, for more than RCVHWM
    # messages, and a heartbeat is then due or unread (`stream_engine_base.cpp`, Assertion failed: !_io_error). So
    # reading never stops. The peers send the heartbeats, and set the
    # time after which they are given up.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, math.ceil(config.heartbeat_timeout_s))
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, math.ceil(config.heartbeat_s))
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    socket.setsockopt(zmq.SNDHWM, UNREAD)
    return socket
