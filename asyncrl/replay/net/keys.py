"""CURVE: who may talk to the replay server and its shards; nobody else can read or forge. Keys: `keyring.py`."""

from __future__ import annotations

from urllib.parse import urlsplit

import zmq
from zmq.auth.thread import ThreadAuthenticator

from asyncrl.checks.addresses import host_of, is_everywhere
from asyncrl.checks.addresses import is_loopback as is_loopback_host
from asyncrl.errors import ConfigError
from asyncrl.replay.net.keyring import key_pair, public_key, roles_by_key


def is_loopback(address: str) -> bool:
    """Whether whoever speaks there is on this machine, by tcp."""
    return is_loopback_host(host_of(address))


def check_address(address: str, keys: str) -> None:
    """Refuse to listen to everybody.

    Raises:
        ConfigError: a wildcard, or another interface than loopback without keys.
    """
    if urlsplit(address).scheme in ("ipc", "inproc"):
        return
    host = host_of(address)
    if not host or is_everywhere(host):
        raise ConfigError(
            f"replay.address={address!r} must name one interface, as in tcp://10.0.0.5:5577; never a wildcard"
        )
    if not keys and not is_loopback(address):
        raise ConfigError(
            f"replay.address={address!r} is not loopback and replay.keys is empty: anybody on the network could feed "
            f"the learner. Make keys with `asyncrl keys DIR` and set replay.keys=DIR"
        )


class _AllowList:
    """What libzmq's authenticator asks. It passes the key on with every message of the connection."""

    def __init__(self, keys: str, server: str) -> None:
        self._roles = roles_by_key(keys, server)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._roles


class Guests:
    """Which role the sender of a message may have: the one whose key its connection was opened with.

    Args:
        keys: `replay.keys`.
        server: whose guests: `server`, or `shard`.

    Raises:
        ConfigError: a key is missing or unreadable.
    """

    def __init__(self, keys: str, server: str = "server") -> None:
        self._roles = {key.decode(): role for key, role in roles_by_key(keys, server).items()}

    def role(self, connection: zmq.Frame) -> str:
        """Of the frame that names the connection."""
        return self._roles[str(connection.get("User-Id"))]


def secure_server(context: zmq.Context, socket: zmq.Socket, keys: str, role: str) -> ThreadAuthenticator:
    """Turn on CURVE for the keys of the run; returns what has to be stopped at the end. Before `bind`.

    Args:
        role: `server`, or `shard`.

    Raises:
        ConfigError: a key is missing or unreadable.
    """
    pair, allowed = key_pair(keys, role), _AllowList(keys, role)
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", allowed)
    socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
    socket.curve_server = True
    return authenticator


def secure_client(socket: zmq.Socket, keys: str, role: str, server: str) -> None:
    """Sign as `role`, and talk to nobody but the owner of the key `server` (`server` or `shard`).

    Raises:
        ConfigError: a key is missing or unreadable.
    """
    own = key_pair(keys, role)
    socket.curve_publickey, socket.curve_secretkey = own.public, own.secret
    socket.curve_serverkey = public_key(keys, server)
