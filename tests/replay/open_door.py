"""Servers and clients without keys: some attackers are written by hand, byte by byte, and do not speak CURVE. What they
do to a server could as well be done by who has a key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import zmq


class AnyRole(str):
    """Every role's."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class Everybody:
    def __init__(self, keys: str, server: str) -> None:
        pass

    def role(self, connection: zmq.Frame) -> str:
        return AnyRole()


class Nobody:
    """In the place of an authenticator."""

    def stop(self) -> None:
        pass


@contextlib.contextmanager
def without_keys() -> Iterator[None]:
    """For what is started in this process while this lasts."""
    with (
        mock.patch("asyncrl.replay.server.router.secure_server", lambda *_: Nobody()),
        mock.patch("asyncrl.replay.server.router.Guests", Everybody),
        mock.patch("asyncrl.replay.client.connection.secure_client", lambda *_: None),
    ):
        yield
