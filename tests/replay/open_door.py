"""Run servers and clients without keys. Some attackers are written by hand, byte by byte, and do not speak CURVE; a
peer with a key could do the same to a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import zmq


class AnyRole(str):
    """A role that is equal to every other."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class Everybody:
    def __init__(self, keys: str) -> None:
        pass

    def role(self, connection: zmq.Frame) -> str:
        return AnyRole()


class Nobody:
    """Stands in for an authenticator."""

    def stop(self) -> None:
        pass


@contextlib.contextmanager
def without_keys() -> Iterator[None]:
    """Switch keys off for everything that is started in this process inside the context."""
    with (
        mock.patch("asyncrl.replay.server.router.secure_server", lambda *_: Nobody()),
        mock.patch("asyncrl.replay.server.router.Guests", Everybody),
        mock.patch("asyncrl.replay.client.connection.secure_client", lambda *_: None),
    ):
        yield
