"""`main(SPEC_FD, STATUS_FD, PARENT)`: the process between caller and program. It starts the program and ends it.

consumes:     the program to run, as JSON on SPEC_FD
waits for:    the end of the program, until its deadline
unblocked by: the program's end, the deadline, SIGTERM from the caller, or from the kernel when the caller dies

It ends only when no process of the program is left; then the outcome is on STATUS_FD.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from typing import Any

from asyncrl.sandbox import jail, kernel
from asyncrl.sandbox.level import Level, Reason

LOOK_S = 0.05
"""Seconds between two checks of memory, processes and time."""
KILL_S = 10.0
"""Seconds to wait for killed processes to end."""
PAGE = os.sysconf("SC_PAGE_SIZE")


def main(spec_fd: int, status_fd: int, parent: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before the prctl took effect
        return
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    os.set_inheritable(status_fd, False)
    with os.fdopen(spec_fd) as file:
        spec = json.load(file)
    try:
        said = _Watch(spec).run()
    except OSError as error:
        said = {"failed": str(error)}
    _end_all()
    os.write(status_fd, json.dumps(said).encode())


class _Watch:
    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec, self._limits = spec, spec["limits"]
        self._apart = spec["level"] == Level.NAMESPACES
        self._result = -1

    def run(self) -> dict[str, Any]:
        """Return `{"reason", "status"}`, or `{"failed": why the program did not run}`. Raises OSError."""
        started = time.monotonic()
        first, setup = self._start()
        with os.fdopen(setup, "rb") as file:
            failed = file.read().decode(errors="replace")
        if failed:
            return {"failed": failed}
        while True:
            found = signal.sigtimedwait({signal.SIGTERM, signal.SIGCHLD}, LOOK_S)
            if found is not None and found.si_signo == signal.SIGTERM:
                return {"reason": None}  # the sender knows the reason
            while (ended := _reap()) is not None:
                if ended[0] == first:
                    return self._ended(ended[1])
            if reason := self._beyond(time.monotonic() - started):
                return {"reason": reason}

    def _start(self) -> tuple[int, int]:
        """Return (pid of the first process, descriptor on which it reports errors during setup)."""
        leash, held = os.pipe()
        setup, setup_end = os.pipe()
        self._result, result_end = os.pipe()
        as_root = os.geteuid() == 0
        if self._apart:
            jail.part(as_root)
        first = os.fork()
        if first == 0:
            for ours in (held, setup, self._result):
                os.close(ours)
            try:
                if self._apart:
                    jail.live(self._spec, as_root, leash, setup_end, result_end)
                kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
                jail.put_files(self._spec["files"], self._spec["folder"])
                jail.become(self._spec, self._spec["folder"])
            except OSError as error:
                os.write(setup_end, str(error).encode())
            finally:
                os._exit(1)
        for theirs in (leash, setup_end, result_end):
            os.close(theirs)
        return first, setup

    def _ended(self, status: int) -> dict[str, Any]:
        if self._apart:
            told = os.read(self._result, 64)
            if not told:
                return {"failed": f"its first process ended with wait status {status}"}
            status = int(told)
        return {"reason": Reason.EXITED if os.WIFEXITED(status) else Reason.SIGNALLED, "status": status}

    def _beyond(self, for_s: float) -> Reason | None:
        """The limit on all processes together that is exceeded, if any."""
        if for_s > self._limits["wall_s"]:
            return Reason.TIMED_OUT
        pids = _below(os.getpid())
        # For root the kernel counts only processes that dropped root. Checked before memory, because many processes may
        # be what fills it, and each counts the pages that they share.
        if not self._apart and len(pids) > self._limits["processes"]:
            return Reason.PROCESSES
        return Reason.MEMORY if sum(map(_resident_bytes, pids)) > self._limits["memory_mb"] << 20 else None


def _reap() -> tuple[int, int] | None:
    with suppress(ChildProcessError):
        pid, status = os.waitpid(-1, os.WNOHANG)
        return (pid, status) if pid else None
    return None


def _end_all() -> None:
    """Kill all remaining processes. Orphans become children of this process, so none is missed; groups are killed
    whole."""
    deadline = time.monotonic() + KILL_S
    while (left := _below(os.getpid())) and time.monotonic() < deadline:
        groups = {group for pid in left if (group := _group(pid)) not in (0, os.getpgrp())}
        for kill, those in ((os.killpg, groups), (os.kill, left)):
            for one in those:
                with suppress(ProcessLookupError, PermissionError):
                    kill(one, signal.SIGKILL)
        while _reap() is not None:
            pass
        signal.sigtimedwait({signal.SIGCHLD}, 0.005)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _below(root: int) -> list[int]:
    """All descendants of a process, including those that have ended but were not reaped."""
    found: list[int] = []
    front = [root]
    while front:
        front = [child for pid in front for child in _children(pid)]
        found += front
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _resident_bytes(pid: int) -> int:
    with suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * PAGE
    return 0
