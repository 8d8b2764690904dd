"""Connections whose other end may vanish without a word: its machine is off, or a firewall has forgotten them.

TCP itself waits a quarter of an hour for an answer to what was sent, and for ever if nothing was.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

_PROBE_S = 30.0
"""Longest silence in seconds until the system asks whether the other end is there. Firewalls that forget silent
connections wait for minutes."""
_PROBES = 3


def end_when_silent(end: socket.socket, seconds: float) -> None:
    """Let a TCP connection fail once the other end's system has not answered for `seconds`."""
    probe = max(int(min(_PROBE_S, seconds / (_PROBES + 1))), 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(int(1000 * seconds), 1))


def end_all_when_silent(port: int, seconds: float) -> None:
    """Do so for all connections of this process to that port: torch does not give out those of its stores."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it is no socket, not connected, or was closed meanwhile
            end = socket.socket(fileno=int(name))
            try:
                if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername()[1] == port:
                    end_when_silent(end, seconds)
            finally:
                end.detach()  # it stays open
