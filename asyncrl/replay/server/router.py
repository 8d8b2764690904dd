"""The socket of a server, bound and guarded."""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Iterator

import zmq

from asyncrl.checks.addresses import numeric
from asyncrl.errors import ReplayError
from asyncrl.replay.config import ReplayConfig
from asyncrl.replay.net.keys import check_address, secure_server
from asyncrl.replay.net.socket_options import set_socket_options

HANDSHAKE_MS = 10_000
"""A connection that has not said who it is by then is closed."""
BACKLOG = 4096
"""Connections that come at once; with the usual 100 the others would try again after a second."""
UNREAD = 10_000
"""Replies that wait for one peer to read. Later ones are lost to it, and asked for again."""


def _open_as_many_files_as_allowed() -> None:
    """Each peer is one; the usual soft limit of 1024 would turn the thousandth away."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def router(config: ReplayConfig, role: str = "server") -> Iterator[zmq.Socket]:
    """The bound socket, of the replay server or of a `shard`.

    Raises:
        ConfigError: the address is a wildcard, or a key is missing. ReplayError: it cannot be bound.
    """
    address = numeric(config.address)
    check_address(address, config.keys)
    _open_as_many_files_as_allowed()
    context = zmq.Context(1)
    socket = context.socket(zmq.ROUTER)
    authenticator = None
    try:
        set_socket_options(socket, config.address, config.heartbeat_s, config.heartbeat_timeout_s)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # libzmq 4.3.5 aborts the process when a peer goes away while reading from it is stopped, for more than RCVHWM
        # messages, and a heartbeat is then due or unread (`stream_engine_base.cpp`, Assertion failed: !_io_error). So
        # reading never stops, and `doorkeeper.py` closes who floods; the peers beat, and say when to give them up.
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, math.ceil(config.heartbeat_timeout_s))
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, math.ceil(config.heartbeat_s))
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.setsockopt(zmq.SNDHWM, UNREAD)
        authenticator = secure_server(context, socket, config.keys, role)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ReplayError(f"cannot listen on replay.address={config.address!r}: {error}") from error
        yield socket
    finally:
        socket.close(linger=0)
        if authenticator is not None:  # refused before there was one
            authenticator.stop()
        context.term()
