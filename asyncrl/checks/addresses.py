"""Judges addresses by what they resolve to, not by how they are written: `0` and `[0:0:0:0:0:0:0:0]` are every
interface, and `127.example.com` may be any machine."""

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
"""The ioctl SIOCGIFADDR."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def host_of(address: str) -> str:
    """Return HOST of `tcp://HOST:PORT`; empty for any other address."""
    found = re.fullmatch(r"tcp://(?:\[([^\]]+)\]|([^:/]+)):(\d+)", address)
    return (found.group(1) or found.group(2)) if found else ""


def resolved(host: str) -> list[Address]:
    """Return all addresses of `host`, as this machine resolves it; empty if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: a name with an empty or too long part
        return []
    addresses = [ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in found]
    # If a name has both kinds of address, our sockets use IPv4.
    return sorted(map(_without_wrapping, addresses), key=lambda address: address.version)


def _without_wrapping(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`, at every address of it."""
    addresses = resolved(host) if host else []
    return bool(addresses) and all(address.is_loopback for address in addresses)


def is_private(host: str) -> bool:
    """Return whether `host` is this machine or in a private network, at every address of it. Link-local addresses do
    not count: at one of them, clouds serve a machine's keys."""
    addresses = resolved(host) if host else []
    return bool(addresses) and all(
        address.is_loopback or (address.is_private and not address.is_link_local) for address in addresses
    )


def is_everywhere(host: str) -> bool:
    """Return whether listening on `host` means listening on every interface."""
    return host in ("", "*") or any(address.is_unspecified for address in resolved(host))


def numeric(address: str) -> str:
    """Return `tcp://HOST:PORT` with HOST as a number, so that the address used is the one that was checked, whatever
    the name resolves to later. Unchanged if there is no HOST, or it has no address."""
    host = host_of(address)
    found = resolved(host) if host else []
    if not found:
        return address
    return tcp(str(found[0]), address.rpartition(":")[2])


def tcp(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


OF_THE_RANKS = "ASYNCRL_RANKS_INTERFACE"
"""Environment variable with the value of GLOO_SOCKET_IFNAME if the learner set that for its ranks, and not the user."""
LONGEST_SOCKET = 107
"""Limit on the path of a Unix socket in bytes."""


def socket_folder(name: int) -> str:
    """Return a folder for Unix sockets with names of this length, including `/`: the paths of the temporary folders
    that schedulers create for a job may be too long."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) + name <= LONGEST_SOCKET else "/tmp"


def own_address(towards: str) -> str:
    """Return this machine's address on the interface from which `towards` is reached; loopback for loopback."""
    (family, kind, _, _, place), *_ = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # a datagram socket sends nothing here
        return str(probe.getsockname()[0])


def is_own(host: str) -> bool:
    """Return whether `host` is an address of this machine, whatever the machine's own name resolves to."""
    try:
        return ipaddress.ip_address(own_address(host).partition("%")[0]) in resolved(host)
    except OSError:
        return False


def interface_of(address: str) -> str:
    """Return the network interface of this machine whose first address this is; empty if there is none."""
    for _, name in socket.if_nameindex():
        if address_of(name) == address:
            return name
    with suppress(OSError), open("/proc/net/if_inet6") as known:
        for digits, *_, name in map(str.split, known):
            if ":" in address and int(digits, 16) == int(ipaddress.ip_address(address.partition("%")[0])):
                return name
    return ""


def address_of(interface: str) -> str:
    """Return the first IPv4 address of a network interface of this machine; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        return socket.inet_ntoa(fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", interface.encode()))[20:24])
    return ""


def unknown_interfaces(given: str, *, nccl: bool = False) -> list[str]:
    """Return the names in `given`, a comma-separated list, that match no network interface of this machine. nccl reads
    them as prefixes; names that begin with `^` or `=` have a special meaning for it, and are not checked."""
    here = [name for _, name in socket.if_nameindex()]
    named = [name for name in given.split(",") if name and not (nccl and name[0] in "^=")]
    return [name for name in named if not any(name == one or (nccl and one.startswith(name)) for one in here)]


def interfaces_here() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())
