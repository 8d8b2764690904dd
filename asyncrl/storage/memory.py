"""How much memory is left to the processes of this machine, or of its container."""

from __future__ import annotations

import contextlib
from pathlib import Path

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_share(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> float | None:
    """From 0 to 1, the smaller one of the machine's and of the container's (cgroup v2), pages of files that can be
    given up counted as free; None where the kernel says nothing."""
    found: list[float] = []
    with contextlib.suppress(OSError, ValueError, KeyError, ZeroDivisionError):
        kb = {name: int(rest.split()[0]) for name, _, rest in map(_parted, meminfo.read_text().splitlines())}
        found.append(kb["MemAvailable"] / kb["MemTotal"])
    with contextlib.suppress(OSError, ValueError, KeyError, ZeroDivisionError):
        limit = container_bytes(cgroup) or 0
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        # The active ones too: weights that several processes have mapped would else look like memory that is gone.
        files = int(stat["inactive_file"]) + int(stat["active_file"])
        found.append(1 - (used - files) / limit)
    return max(0.0, min(found)) if found else None


def container_bytes(cgroup: Path = CGROUP) -> int | None:
    """What this container may have (cgroup v2); None where it has no bound, or is none."""
    try:
        return int((cgroup / "memory.max").read_text())  # "max" is no number
    except (OSError, ValueError):
        return None


def _parted(line: str) -> tuple[str, str, str]:
    return line.partition(":")
