"""Doors: Unix-domain sockets, one per role, by which processes of the server's user connect on its machine.

    <replay.keys>/local/<digest of machine and network>-<digest of address>-<role>

Encryption would take a fifth (1 k tokens) to half (32 k) of the processor time of a group, and protects nothing here:
the folder has mode 0700, and whoever can open it can also read the secrets beside it. So a door proves to both ends
what a key proves, and a client that uses it still needs the secret of its role.

A client looks for the server's door whenever it opens a connection, and uses tcp with its key if there is none: on
another machine, as another user, or if a killed server left the door and nobody listens behind it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from pathlib import Path

from asyncrl.replay.net.keyring import key_pair, open_to_others

DOORS_DIR = "local"
PROBE_S = 1.0
LEFT_S = 60.0
"""Age in seconds from which a door behind which nobody listens was left by a killed server. A younger one may belong to
a server that is just starting: it binds a moment before it listens."""


class Doors:
    """The doors of one server, for a client or the server itself, in a folder that only this user can open.

    Args:
        keys: `replay.keys`.
        address: address of the server, as written in every process's settings.
        make: create the folder if it does not exist.

    Raises:
        OSError: there is no such folder, or another user could have put a door into it.
    """

    def __init__(self, keys: str, address: str, *, make: bool = False) -> None:
        folder = Path(keys) / DOORS_DIR
        if make:
            folder.mkdir(mode=0o700, exist_ok=True)
        self._here = _here()
        self._name = f"{self._here}-{_digest(address)}"
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if why := open_to_others(folder, os.fstat(self._folder)):
            self.close()
            raise PermissionError(f"{why}. Remove it")

    def path(self, role: str) -> str:
        """Return the door's path, through the descriptor of the open folder: the path of a socket is limited to 107
        bytes, and nobody can substitute another folder."""
        return f"/proc/self/fd/{self._folder}/{self._name}-{role}"

    def is_open(self, role: str) -> bool:
        """Return whether a server listens behind the door of `role`."""
        return _listened_to(self.path(role))

    def sweep(self) -> None:
        """Remove doors that killed servers of this machine left, at any address, since the next server has another
        port. Those of other machines that share the folder cannot be probed, and stay."""
        for name in os.listdir(self._folder):
            path = f"/proc/self/fd/{self._folder}/{name}"
            with contextlib.suppress(OSError):  # another server may remove it first
                old = time.time() - os.lstat(path).st_mtime > LEFT_S
                if name.startswith(f"{self._here}-") and old and not _listened_to(path):
                    os.unlink(path)

    def remove(self, role: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path(role))

    def close(self) -> None:
        """Close the folder, once no socket uses a path through it any more."""
        os.close(self._folder)


def open_door(keys: str, address: str, role: str) -> Doors | None:
    """Return the doors if a server listens behind that of `role`; None otherwise.

    Raises:
        ConfigError: the secret of that role is missing or unreadable.
    """
    key_pair(keys, role)
    try:
        doors = Doors(keys, address)
    except OSError:
        return None
    if doors.is_open(role):
        return doors
    doors.close()
    return None


def _listened_to(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except (TimeoutError, BlockingIOError):  # others are queued before it
            return True
        except OSError:
            return False
    return True


def _here() -> str:
    """Return a digest of the machine and its network. Folder and address alone do not identify a server: the file
    system may be shared by several machines, and a container may have its own loopback."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return _digest(f"{machine} {os.stat('/proc/self/ns/net').st_ino}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
