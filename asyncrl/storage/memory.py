"""The share of memory that is free on this machine, or in its container."""

from __future__ import annotations

import contextlib
from pathlib import Path

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_share(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> float | None:
    """The free share, 0 to 1: the smaller one of the machine's and the container's (cgroup v2). Reclaimable file pages
    count as free. None if the kernel gives no figures."""
    found: list[float] = []
    with contextlib.suppress(OSError, ValueError, KeyError, ZeroDivisionError):
        kb = {name: int(rest.split()[0]) for name, _, rest in map(_parted, meminfo.read_text().splitlines())}
        found.append(kb["MemAvailable"] / kb["MemTotal"])
    with contextlib.suppress(OSError, ValueError, KeyError, ZeroDivisionError):
        limit = container_bytes(cgroup) or 0
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        # Active file pages too: weights that several processes have mapped would otherwise look like used memory.
        files = int(stat["inactive_file"]) + int(stat["active_file"])
        found.append(1 - (used - files) / limit)
    return max(0.0, min(found)) if found else None


def container_bytes(cgroup: Path = CGROUP) -> int | None:
    """Memory limit of this container (cgroup v2); None if it has no limit or this is not a container."""
    try:
        return int((cgroup / "memory.max").read_text())  # "max" raises ValueError
    except (OSError, ValueError):
        return None


def _parted(line: str) -> tuple[str, str, str]:
    return line.partition(":")
