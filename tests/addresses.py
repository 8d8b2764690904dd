"""Addresses on loopback that nobody listens on."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket

FIRST, PORTS = 20_000, 12_000
"""Below those that the kernel hands out: whoever asks it for any port is given none of these before it is used here."""
_numbers = itertools.count(random.SystemRandom().randrange(PORTS))


def free_address() -> str:
    """Never the same one twice in a row of 12,000."""
    for number in itertools.islice(_numbers, PORTS):
        port = FIRST + number % PORTS
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return f"tcp://127.0.0.1:{port}"
    raise RuntimeError(f"no port of {FIRST} to {FIRST + PORTS} is free")
