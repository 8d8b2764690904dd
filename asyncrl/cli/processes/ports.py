"""Ports of loopback for what a command starts."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket

from asyncrl.errors import ConfigError

PORTS = range(20_000, 32_000)
"""Below those that the kernel hands out."""
_numbers = itertools.count(random.SystemRandom().randrange(len(PORTS)))


def free_port() -> int:
    """One that the kernel gives to nobody who asks it for any: a role listens on its port only after seconds, and comes
    back to it after a death. Never the same one twice in a row of 12,000.

    Raises:
        ConfigError: none is free.
    """
    for number in itertools.islice(_numbers, len(PORTS)):
        port = PORTS[number % len(PORTS)]
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise ConfigError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free. End the processes that use them")
