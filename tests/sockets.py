"""Find which processes listen at which addresses of this machine, from /proc."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Listener:
    host: str
    port: int
    process: str
    """Command line of the process."""

    @property
    def on_loopback(self) -> bool:
        address = ipaddress.ip_address(self.host)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback


def tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def listeners(processes: Iterable[psutil.Process]) -> set[Listener]:
    """Return the TCP sockets in state LISTEN that any of `processes` holds."""
    owners: dict[str, str] = {}
    for process in processes:
        try:
            owners |= dict.fromkeys(_inodes(process.pid), " ".join(process.cmdline()))
        except (OSError, psutil.Error):  # it ended meanwhile
            continue
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, place, _, state, *_, inode = line.split()[:10]
            if state == LISTEN and inode in owners:
                host, _, port = place.partition(":")
                found.add(Listener(_address(host), int(port, 16), owners[inode]))
    return found


def _inodes(pid: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _address(text: str) -> str:
    """Return the address that /proc gives as hexadecimal 32-bit words in the machine's byte order."""
    packed = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    return str(ipaddress.ip_address(packed))
