"""What an address means, by what it resolves to and not by how it is written: `0` and `[0:0:0:0:0:0:0:0]` are every
interface, and `127.example.com` may be anybody's machine."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import struct
import tempfile
from contextlib import suppress

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def host_of(address: str) -> str:
    """`tcp://HOST:PORT` -> HOST; empty for anything else."""
    found = re.fullmatch(r"tcp://(?:\[([^\]]+)\]|([^:/]+)):(\d+)", address)
    return (found.group(1) or found.group(2)) if found else ""


def resolved(host: str) -> list[Address]:
    """All addresses of `host`, as the sockets of this machine would read it; none when it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the second: a name with an empty or an over-long part
        return []
    addresses = [ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in found]
    # Of a name with both kinds of address the sockets of ours take the older one.
    return sorted(map(_without_wrapping, addresses), key=lambda address: address.version)


def _without_wrapping(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`: every address of it."""
    addresses = resolved(host) if host else []
    return bool(addresses) and all(address.is_loopback for address in addresses)


def is_private(host: str) -> bool:
    """Whether `host` is this machine or one of a private network: every address of it. Link-local ones are of neither:
    at one of them clouds keep a machine's keys."""
    addresses = resolved(host) if host else []
    return bool(addresses) and all(
        address.is_loopback or (address.is_private and not address.is_link_local) for address in addresses
    )


def is_everywhere(host: str) -> bool:
    """Whether to listen on `host` is to listen on every interface."""
    return host in ("", "*") or any(address.is_unspecified for address in resolved(host))


def numeric(address: str) -> str:
    """`tcp://HOST:PORT` with HOST as a number: what was judged is then what is listened on, whatever a name resolves to
    a moment later. Unchanged when HOST has no address, or there is none."""
    host = host_of(address)
    found = resolved(host) if host else []
    if not found:
        return address
    return tcp(str(found[0]), address.rpartition(":")[2])


def tcp(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


OF_THE_RANKS = "ASYNCRL_RANKS_INTERFACE"
"""Environment variable: what is in GLOO_SOCKET_IFNAME where no user wrote it, but the learner, for its ranks alone."""
LONGEST_SOCKET = 107
"""Bytes that the path of a unix socket may have."""


def socket_folder(name: int) -> str:
    """Where others may put unix sockets whose names are so long, `/` included: the folders for temporary files that
    schedulers make for a job leave them no room."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) + name <= LONGEST_SOCKET else "/tmp"


def own_address(towards: str) -> str:
    """This machine's address on the interface from which `towards` is reached; loopback for loopback."""
    (family, kind, _, _, place), *_ = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # of datagrams: nothing is sent
        return str(probe.getsockname()[0])


def is_own(host: str) -> bool:
    """Whether `host` is an address of this machine, whatever the machine's own name leads to."""
    try:
        return ipaddress.ip_address(own_address(host).partition("%")[0]) in resolved(host)
    except OSError:
        return False


def interface_of(address: str) -> str:
    """The network interface of this machine whose first address this is; empty where none is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none of this kind
                found = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    with suppress(OSError), open("/proc/net/if_inet6") as known:
        for digits, *_, name in map(str.split, known):
            if ":" in address and int(digits, 16) == int(ipaddress.ip_address(address.partition("%")[0])):
                return name
    return ""


def unknown_interfaces(given: str, *, nccl: bool = False) -> list[str]:
    """Names in `given`, by commas, that no network interface of this machine has. nccl reads them as beginnings, and
    what has `^` or `=` before it is its own language."""
    here = [name for _, name in socket.if_nameindex()]
    named = [name for name in given.split(",") if name and not (nccl and name[0] in "^=")]
    return [name for name in named if not any(name == one or (nccl and one.startswith(name)) for one in here)]


def interfaces_here() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())
