"""Chooses free ports on loopback for the processes that a command starts."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket

from asyncrl.errors import ConfigError

PORTS = range(20_000, 32_000)
"""Ports below those that the kernel assigns by default."""
_numbers = itertools.count(random.SystemRandom().randrange(len(PORTS)))


def free_port() -> int:
    """Return a free port outside the range that the kernel assigns: a role listens on its port only after seconds, and
    again after a restart. No port repeats within 12,000 calls.

    Raises:
        ConfigError: none is free.
    """
    for number in itertools.islice(_numbers, len(PORTS)):
        port = PORTS[number % len(PORTS)]
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise ConfigError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free. End the processes that use them")
