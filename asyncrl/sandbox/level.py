"""How a program is kept apart, and how it can end. Read before each program, so it imports nothing heavy."""

from __future__ import annotations

from enum import Enum


class Level(str, Enum):
    """How a program is kept apart from the machine, the stronger first."""

    NAMESPACES = "namespaces"
    """Its own users, processes, network and files: it sees the interpreter, system libraries and a scratch folder, can
    write only into that, reaches nobody, and all it started ends with it."""
    RLIMITS = "rlimits"
    """Bounded in time, memory and processes, and killed with all it started. It runs as you, with your files and your
    network: nothing is kept from a program that means harm."""


class Reason(str, Enum):
    """Why a program ended. All of them are its own doing: a sandbox that cannot work raises SandboxError."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed_out"
    """Past `wall_s` or `cpu_s`."""
    MEMORY = "memory"
    """All its processes together. One process alone past the limit is refused memory, and may go on without."""
    PROCESSES = "processes"
    """Where the kernel does not count them itself (`rlimits` as root)."""
    OUTPUT = "output"
