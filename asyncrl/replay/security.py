"""CURVE keys: who may talk to the replay server, and that nobody else can read or forge.

DIR/server.key         public key of the server (every client needs it)
DIR/server.key_secret  only where the server runs
DIR/clients/NAME.key   the allow-list: one public key per client
DIR/client.key_secret  what a client signs with (one key shared by the run's processes is fine)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.auth.thread import ThreadAuthenticator

from asyncrl.errors import ConfigError

LOOPBACK = ("127.", "localhost", "[::1]", "::1")


def make_keys(directory: Path, clients: tuple[str, ...] = ("client",)) -> None:
    """Write a server key and one key per client; secret files get mode 0600.

    Raises:
        ConfigError: keys are there already.
    """
    if (directory / "server.key").exists():
        raise ConfigError(f"{directory} holds keys already; remove them first, or use another directory")
    (directory / "clients").mkdir(parents=True, exist_ok=True)
    before = os.umask(0o077)  # Without it the secrets are readable for a moment.
    try:
        create_certificates(str(directory), "server")
        for client in clients:
            create_certificates(str(directory), client)
            (directory / f"{client}.key").rename(directory / "clients" / f"{client}.key")
    finally:
        os.umask(before)


def is_loopback(address: str) -> bool:
    """Whether whoever speaks there is on this machine, by tcp."""
    parts = urlsplit(address)
    return parts.scheme == "tcp" and (parts.hostname or "").startswith(LOOPBACK)


def check_address(address: str, keys: str) -> None:
    """Refuse to listen to everybody.

    Raises:
        ConfigError: a wildcard, or another interface than loopback without keys.
    """
    parts = urlsplit(address)
    host = parts.hostname or ""
    if parts.scheme in ("ipc", "inproc"):
        return
    if parts.scheme != "tcp" or not host or host in ("*", "0.0.0.0", "::"):
        raise ConfigError(
            f"replay.address={address!r} must name one interface, as in tcp://10.0.0.5:5577; never a wildcard"
        )
    if not keys and not is_loopback(address):
        raise ConfigError(
            f"replay.address={address!r} is not loopback and replay.keys is empty: anybody on the network could feed "
            f"the learner. Make keys with `asyncrl keys DIR` and set replay.keys=DIR"
        )


@dataclass(frozen=True, slots=True)
class _KeyPair:
    public: bytes
    secret: bytes


def _load(path: Path) -> _KeyPair:
    try:
        public, secret = load_certificate(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the key {path} cannot be read: {error}") from error
    return _KeyPair(public, secret or b"")


def server_secret(keys: str) -> bytes:
    """What only the servers of a run have. Raises ConfigError when it is missing or unreadable."""
    return _load(Path(keys) / "server.key_secret").secret


def secure_server(context: zmq.Context, socket: zmq.Socket, keys: str) -> ThreadAuthenticator | None:
    """Turn on CURVE with the allow-list `DIR/clients`; returns what has to be stopped at the end. Before `bind`.

    Raises:
        ConfigError: a key is missing or unreadable.
    """
    if not keys:
        return None
    directory = Path(keys)
    pair = _load(directory / "server.key_secret")
    if not (directory / "clients").is_dir():
        raise ConfigError(f"replay.keys={keys!r} has no folder `clients`; make it with `asyncrl keys DIR`")
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain="*", location=str(directory / "clients"))
    socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
    socket.curve_server = True
    return authenticator


def secure_client(socket: zmq.Socket, keys: str, client: str = "client") -> None:
    """Raises ConfigError when a key is missing or unreadable."""
    if not keys:
        return
    own = _load(Path(keys) / f"{client}.key_secret")
    socket.curve_publickey, socket.curve_secretkey = own.public, own.secret
    socket.curve_serverkey = _load(Path(keys) / "server.key").public
