"""Doors: unix-domain sockets by which processes of the server's own user on its machine come in, one for each role.

    <replay.keys>/local/<digest of machine and network>-<digest of address>-<role>

Encryption would take them a fifth (1 k tokens) to half (32 k) of the processor time of a group, and here it
keeps nothing from anybody: the folder has mode 0700, and who may open it may read the secrets beside it. So a door
proves what a key proves, to both ends, and whoever comes by it needs the secret of its role all the same.

A client looks for the door of a server whenever it opens a connection, and takes tcp and its key where there is none:
on another machine, as another user, or where nobody listens behind what a killed server has left.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import time
from pathlib import Path

from asyncrl.replay.net.keyring import key_pair

DOORS_DIR = "local"
PROBE_S = 1.0
LEFT_S = 60.0
"""Age from which on a door behind which nobody listens was left by a server that was killed: another that opens one now
has bound it a moment before it listens."""


class Doors:
    """The doors of one server, as a client or that server finds them: those in a folder that only this user can open.

    Args:
        keys: `replay.keys`.
        address: of the server, as all write it.
        make: the folder too, where it is not there yet.

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
        found = os.fstat(self._folder)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            self.close()
            raise PermissionError(
                f"{folder} has mode {stat.S_IMODE(found.st_mode):04o} and belongs to user {found.st_uid}: it must have "
                f"mode 0700 and be your own (user {os.geteuid()}). Remove it"
            )

    def path(self, role: str) -> str:
        """By the open folder: a path of a socket has 107 bytes at most, and nobody can put another folder there."""
        return f"/proc/self/fd/{self._folder}/{self._name}-{role}"

    def is_open(self, role: str) -> bool:
        """Whether somebody listens there."""
        return _listened_to(self.path(role))

    def sweep(self) -> None:
        """Remove what killed servers of this machine left, at whatever address: the next has another port. Those of
        other machines that have the same folder cannot be asked, and stay."""
        for name in os.listdir(self._folder):
            path = f"/proc/self/fd/{self._folder}/{name}"
            with contextlib.suppress(OSError):  # another server sweeps, too
                old = time.time() - os.lstat(path).st_mtime > LEFT_S
                if name.startswith(f"{self._here}-") and old and not _listened_to(path):
                    os.unlink(path)

    def remove(self, role: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path(role))

    def close(self) -> None:
        """Once no socket uses a path any more."""
        os.close(self._folder)


def open_door(keys: str, address: str, role: str) -> Doors | None:
    """Where the door of `role` is one that a server listens behind; else None.

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
        except (TimeoutError, BlockingIOError):  # a queue of others before it
            return True
        except OSError:
            return False
    return True


def _here() -> str:
    """What else could be the same: the folder, on a file system of many machines; the address, in a container that has
    a loopback of its own."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return _digest(f"{machine} {os.stat('/proc/self/ns/net').st_ino}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
