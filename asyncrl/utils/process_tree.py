"""Process trees of this machine: find descendants, and make sure that they end when their parent ends.

`python -m asyncrl.utils.process_tree with PARENT COMMAND...` becomes COMMAND, which the kernel kills when PARENT dies;
`python -m asyncrl.utils.process_tree after PARENT` waits until PARENT ends and kills everything that it had started.

The second covers what the first cannot reach: agents of Ray, and processes started by an environment.

A `psutil.Process` is the identity of a process: its pid and the time when it was started, since a pid may be reused.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

PR_SET_PDEATHSIG = 1
LOOK_S = 1.0
"""Seconds between two scans for descendants: each scan reads the whole process table."""
REAP_S = 2.0
"""How long to keep looking for descendants of a dead process: its children may start others while they are killed."""
MARK = "ASYNCRL_FAMILY"
"""Environment variable inherited by everything that a process with a reaper starts. It is the only way to find a
process that starts between two scans and is adopted by another parent at once."""
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def process_at(pid: int) -> psutil.Process | None:
    """The process with this pid now; None if there is none."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def status_of(process: psutil.Process) -> str:
    """One of psutil's STATUS_*; empty if the process is gone."""
    try:
        return process.status() if process.is_running() else ""
    except psutil.NoSuchProcess:
        return ""


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended. It may be stopped."""
    return status_of(process) not in ("", *ENDED)


def is_stopped(process: psutil.Process) -> bool:
    """Whether a signal (SIGSTOP, Ctrl-Z) or a debugger has stopped it."""
    return status_of(process) in STOPPED


def age_s(process: psutil.Process) -> float:
    """Seconds since it was started; 0 if unknown."""
    try:
        return max(0.0, time.time() - process.create_time())
    except psutil.Error:
        return 0.0


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty if it has none any more."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def kill(process: psutil.Process) -> None:
    # It may have ended, its pid may be another's by now, or it belongs to another user (a setuid helper).
    with contextlib.suppress(psutil.Error):
        process.kill()


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """All processes of this machine at one moment. Taking one costs milliseconds, so several queries share it."""

    processes: dict[int, psutil.Process]
    parents: dict[int, int]

    @classmethod
    def now(cls) -> ProcessTable:
        psutil.process_iter.cache_clear()  # it would give the old identity to a pid that was reused
        found = {process.pid: process for process in psutil.process_iter(["ppid"])}
        return cls(found, {pid: process.info["ppid"] for pid, process in found.items()})  # pyright: ignore[reportAttributeAccessIssue]

    def holds(self, process: psutil.Process) -> bool:
        return self.processes.get(process.pid) == process

    def descendants(self, *pids: int) -> set[psutil.Process]:
        """All descendants of `pids`, whatever process group or session they are in."""
        found: set[psutil.Process] = set()
        front = set(pids)
        while front:
            front = {child for child, parent in self.parents.items() if parent in front}
            found |= {self.processes[child] for child in front}
        return found


def descendants(*pids: int) -> set[psutil.Process]:
    """All descendants of `pids` now."""
    return ProcessTable.now().descendants(*pids)


def ancestors(pid: int) -> list[psutil.Process]:
    """Parent, grandparent and so on, up to the root of the process tree."""
    try:
        return psutil.Process(pid).parents()
    except psutil.NoSuchProcess:
        return []


class ProcessTree:
    """Remembers the descendants of a process. Once one of them is killed, nothing else links its own children (those of
    torchrun and Ray have sessions of their own) to this process."""

    def __init__(self, root: int) -> None:
        self.members: set[psutil.Process] = set()
        self._root = process_at(root)
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

    def kill(self, spared: Iterable[psutil.Process] = ()) -> None:
        self.look(ProcessTable.now())
        for member in self.members - set(spared):
            kill(member)


def die_with_parent(parent: int) -> None:
    """From now on the kernel kills this process when its parent dies, even if this process is stopped or busy.

    More exactly, when the parent's thread that started it ends. This survives `exec`; children do not inherit it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the bond was made
        os._exit(1)


def dying_with_this(arguments: Sequence[str]) -> list[str]:
    """The command line that runs `arguments` in a child process that dies with this one."""
    return [sys.executable, "-m", "asyncrl.utils.process_tree", "with", str(os.getpid()), *arguments]


def start_reaper() -> subprocess.Popen[bytes]:
    """Start a process that kills what this one leaves behind, however it ends. Do not wait for it. Everything started
    from now on is marked with `MARK`."""
    os.environ[MARK] = uuid.uuid4().hex
    return subprocess.Popen(
        [sys.executable, "-m", "asyncrl.utils.process_tree", "after", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        # In its parent's process group, a signal to the group would stop or end it together with the parent.
        start_new_session=True,
    )


def reap(parent: int) -> None:
    """Wait until `parent` ends (no deadline), then kill its descendants for `REAP_S`."""
    tree = ProcessTree(parent)
    while os.getppid() == parent:
        tree.look()
        time.sleep(LOOK_S / 2)
    own = psutil.Process()
    end = time.monotonic() + REAP_S
    while time.monotonic() < end:
        tree.members |= marked(os.environ.get(MARK, ""))
        tree.kill([own])
        time.sleep(0.1)


def marked(mark: str, name: str = MARK) -> set[psutil.Process]:
    """This user's processes that were started with this mark in the environment variable `name`; none for an empty
    mark. A process that overwrites its environment with a title, as Ray's do once they run, is not found."""
    found = set[psutil.Process]()
    for process in ProcessTable.now().processes.values() if mark else ():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended or belongs to another user
            if process.environ().get(name) == mark:
                found.add(process)
    return found


def kill_marked(mark: str, name: str) -> None:
    """Kill the processes that `marked` finds, and those that they start meanwhile.

    waits for: their ends; unblocked by: those, or REAP_S.
    """
    end = time.monotonic() + REAP_S
    while (left := marked(mark, name)) and time.monotonic() < end:
        for process in left:
            kill(process)
        time.sleep(0.05)


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
    reap(int(parent))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
