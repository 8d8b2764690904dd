"""Restricts connections to the replay server to holders of the run's keys (`keyring.py`), with CURVE:
nobody else can read or forge messages."""

from __future__ import annotations

from urllib.parse import urlsplit

import zmq
from zmq.auth.thread import ThreadAuthenticator

from asyncrl.checks.addresses import host_of, is_everywhere
from asyncrl.checks.addresses import is_loopback as is_loopback_host
from asyncrl.errors import ConfigError
from asyncrl.replay.net.keyring import key_pair, public_key, roles_by_key


def is_loopback(address: str) -> bool:
    """Return whether `address` is a loopback address."""
    return is_loopback_host(host_of(address))


def check_address(address: str, keys: str) -> None:
    """Refuse an address at which everybody could connect.

    Raises:
        ConfigError: the address is a wildcard, or an interface other than loopback without keys.
    """
    if urlsplit(address).scheme in ("ipc", "inproc"):
        return
    host = host_of(address)
    if not host or is_everywhere(host):
        raise ConfigError(
            f"replay.address={address!r} must name one interface, as in tcp://10.0.0.5:5577, not a wildcard"
        )
    if not keys and not is_loopback(address):
        raise ConfigError(
            f"replay.address={address!r} is not a loopback address, but replay.keys is empty: anyone on the network "
            "could send groups to the learner. Make keys with `asyncrl keys DIR` and set replay.keys=DIR"
        )


class Guests:
    """Decides whether a key is admitted, and determines the role of a message's sender from the key with which its
    connection was opened: libzmq passes it on with every message.

    Args:
        keys: `replay.keys`.

    Raises:
        ConfigError: a key is missing or unreadable.
    """

    def __init__(self, keys: str) -> None:
        self._roles = roles_by_key(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator."""
        return key in self._roles

    def role(self, connection: zmq.Frame) -> str:
        """Return the role of a sender, given the frame that names its connection."""
        return self._roles[str(connection.get("User-Id")).encode()]


def secure_server(context: zmq.Context, socket: zmq.Socket, keys: str) -> ThreadAuthenticator:
    """Turn on CURVE with the keys of the run, before `bind`. Returns the authenticator, which must be stopped at the
    end.

    Raises:
        ConfigError: a key is missing or unreadable.
    """
    pair, allowed = key_pair(keys, "server"), Guests(keys)
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", allowed)
    socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
    socket.curve_server = True
    return authenticator


def secure_client(socket: zmq.Socket, keys: str, role: str) -> None:
    """Authenticate as `role`, and connect only to the owner of the server's key.

    Raises:
        ConfigError: a key is missing or unreadable.
    """
    own = key_pair(keys, role)
    socket.curve_publickey, socket.curve_secretkey = own.public, own.secret
    socket.curve_serverkey = public_key(keys, "server")
