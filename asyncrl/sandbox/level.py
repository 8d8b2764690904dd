"""Isolation levels, and how a program can end. Imported before each program, so it imports nothing heavy."""

from __future__ import annotations

from enum import Enum


class Level(str, Enum):
    """How a program is isolated from the machine, strongest first."""

    NAMESPACES = "namespaces"
    """Separate users, processes, network and files: the program sees the interpreter, system libraries and a scratch
    folder, can write only to that folder, has no network, and all processes that it started end with it."""
    RLIMITS = "rlimits"
    """Limits on time, memory and processes, and the program is killed with all it started. It runs as your user, with
    your files and your network: no protection against a malicious program."""


class Reason(str, Enum):
    """Why a program ended. All of these are due to the program; if the sandbox itself fails it raises SandboxError."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed_out"
    """`wall_s` or `cpu_s` was exceeded."""
    MEMORY = "memory"
    """All its processes together exceeded the limit. A single process above it is refused memory, and may continue."""
    PROCESSES = "processes"
    """Too many processes, where the kernel itself does not count them (`rlimits` as root)."""
    OUTPUT = "output"
