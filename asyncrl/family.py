"""Process trees of this machine: find descendants, and make sure that they end when their parent ends.

`python -m asyncrl.family with PARENT COMMAND...`   becomes COMMAND, which the kernel kills when PARENT dies
`python -m asyncrl.family after PARENT`             waits until PARENT ends and kills everything it had started

The second covers what the first cannot reach: agents of Ray, and processes started by an environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
LOOK_S = 1.0
"""Seconds between two scans for descendants: each scan reads the whole process table."""
BURIAL_S = 2.0
"""How long to keep looking for descendants of a dead process: its children may start others while they are killed."""
MARK = "ASYNCRL_FAMILY"
"""Environment variable inherited by everything that a process with an undertaker starts. It is the only way to find a
process that starts between two scans and is adopted by another parent at once."""
STOPPED = ("T", "t")
ENDED = ("Z", "X", "x")
"""Process states as in /proc/PID/stat."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identifies a process by pid and start time: a pid alone may be reused by another process."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """None if the process is gone, or if there is no /proc."""
        found = _read_stat(pid)
        return None if found is None else cls(pid, found.started)

    def state(self) -> str:
        """The state letter of /proc/PID/stat; empty if the process is gone."""
        found = _read_stat(self.pid)
        return found.state if found is not None and found.started == self.started else ""

    def age_s(self) -> float:
        """Seconds since it was started; 0 if unknown."""
        try:
            return time.clock_gettime(time.CLOCK_BOOTTIME) - int(self.started) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, AttributeError):
            return 0.0

    def alive(self) -> bool:
        """Whether it is in the process table, possibly as a zombie."""
        return bool(self.state())

    def running(self) -> bool:
        """Whether it has not ended. It may be stopped."""
        return self.state() not in ("", *ENDED)

    def kill(self) -> None:
        if self.alive():
            # It may have ended in between, or belong to another user (a setuid helper).
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)

    def command(self) -> list[str]:
        """Its command line; empty if it has none any more."""
        try:
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        except OSError:
            return []


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    started: str
    state: str


def _read_stat(pid: int) -> _Stat | None:
    """Read /proc/PID/stat; None if the process is gone or there is no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            # The name is in parentheses and may itself contain spaces and parentheses.
            rest = file.read(4096).rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return _Stat(parent=int(rest[1]), started=rest[19].decode(), state=rest[0].decode())


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """All processes of this machine at one moment. Taking one costs milliseconds, so several queries share it."""

    stats: dict[int, _Stat]

    @classmethod
    def now(cls) -> ProcessTable:
        """Read the table now; empty if there is no /proc."""
        pids = (
            [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.exists("/proc/self/stat") else []
        )
        return cls({pid: stat for pid in pids if (stat := _read_stat(pid)) is not None})

    def holds(self, process: ProcessId) -> bool:
        stat = self.stats.get(process.pid)
        return stat is not None and stat.started == process.started

    def descendants(self, *pids: int) -> set[ProcessId]:
        """All descendants of `pids`, whatever process group or session they are in."""
        found: set[ProcessId] = set()
        front = set(pids)
        while front:
            front = {child for child, stat in self.stats.items() if stat.parent in front}
            found |= {ProcessId(child, self.stats[child].started) for child in front}
        return found


def descendants(*pids: int) -> set[ProcessId]:
    """All descendants of `pids` now; empty if there is no /proc."""
    return ProcessTable.now().descendants(*pids)


def ancestors(pid: int) -> Iterator[ProcessId]:
    """Parent, grandparent and so on, up to the root of the process tree."""
    stat = _read_stat(pid)
    while stat is not None and stat.parent > 0:
        pid, stat = stat.parent, _read_stat(stat.parent)
        if stat is not None:
            yield ProcessId(pid, stat.started)


class Family:
    """Remembers the descendants of a process. Once one of them is killed, nothing else links its own children (those of
    torchrun and Ray have sessions of their own) to this process."""

    def __init__(self, root: int) -> None:
        self.members: set[ProcessId] = set()
        self._root = ProcessId.of(root)
        self._looked_at = 0.0

    def look(self, table: ProcessTable | None = None) -> None:
        """Remember the descendants in `table`. Without one, read the current table, at most once every `LOOK_S`."""
        if table is None:
            if time.monotonic() - self._looked_at < LOOK_S:
                return
            self._looked_at, table = time.monotonic(), ProcessTable.now()
        roots = {self._root, *self.members} if self._root else self.members
        # The pid of one that is gone may have been reused.
        found = table.descendants(*(root.pid for root in roots if table.holds(root)))
        self.members = {member for member in self.members | found if table.holds(member)}

    def kill(self, spared: Iterable[ProcessId] = ()) -> None:
        self.look(ProcessTable.now())
        for member in self.members - set(spared):
            member.kill()


def die_with_parent(parent: int) -> None:
    """From now on the kernel kills this process when its parent dies, even if this process is stopped or busy.

    More exactly, when the parent's thread that started it ends. This survives `exec`; children do not inherit it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the bond was made
        os._exit(1)


def bound(arguments: Sequence[str]) -> list[str]:
    """The command line that runs `arguments` in a child process that dies with this one."""
    return [sys.executable, "-m", "asyncrl.family", "with", str(os.getpid()), *arguments]


def undertaker() -> subprocess.Popen[bytes]:
    """Start a process that kills what this one leaves behind, however it ends. Do not wait for it. Everything started
    from now on is marked with `MARK`."""
    own = ProcessId.of(os.getpid())
    os.environ[MARK] = f"{own.pid}-{own.started}" if own else ""
    return subprocess.Popen(
        [sys.executable, "-m", "asyncrl.family", "after", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        # In its parent's process group, a signal to the group would stop or end it together with the parent.
        start_new_session=True,
    )


def bury(parent: int) -> None:
    """Wait until `parent` ends (no deadline), then kill its descendants for `BURIAL_S`."""
    family = Family(parent)
    while os.getppid() == parent:
        family.look()
        time.sleep(LOOK_S / 2)
    own = ProcessId.of(os.getpid())
    end = time.monotonic() + BURIAL_S
    while own and time.monotonic() < end:
        family.members |= marked(os.environ.get(MARK, ""))
        family.kill([own])
        time.sleep(0.1)


def marked(mark: str, name: str = MARK) -> set[ProcessId]:
    """This user's processes that were started with this mark in the environment variable `name`; none for an empty
    mark. A process that overwrites its environment with a title, as Ray's do once they run, is not found."""
    found, entry = set[ProcessId](), f"{name}={mark}".encode()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if mark else ():
        process = ProcessId.of(pid)
        with contextlib.suppress(OSError):  # it has ended or belongs to another user
            if process and entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(process)
    return found


def describe_exit(code: int | None) -> str:
    """`exit code 3` or `signal SIGSEGV`."""
    if code is None:
        return "unknown exit"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def main(arguments: Sequence[str]) -> int:
    what, parent, *command = arguments
    if what == "with":
        die_with_parent(int(parent))
        os.execv(command[0], command)
    bury(int(parent))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
