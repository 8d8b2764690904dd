"""Supervises child processes that start and end together: starts them with logs, watches them, and stops all of them.

consumes: exit codes · waits for: children, with a deadline per stage of stopping · unblocked by: their ends, Ctrl-C
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType

import psutil

from asyncrl.telemetry.live.over import forget_ends, note_ends
from asyncrl.utils.process_tree import LOOK_S, ProcessTable, ProcessTree, dying_with_this, process_at
from asyncrl.utils.stopped_processes import StoppedProcesses

TAIL_LINES = 30
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run. SIGHUP arrives if the terminal is closed."""
HASTE_S = 1.0
"""Seconds after a second signal at which whatever is left of the roles is killed."""


@dataclass(slots=True)
class Role:
    """One supervised process, in its own process group, so that Ctrl-C only reaches the supervisor."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    stopped_by_us: bool = False

    @property
    def code(self) -> int | None:
        return self.process.poll()

    @property
    def failed(self) -> bool:
        """Whether it ended by itself, without success."""
        return self.code not in (None, 0) and not self.stopped_by_us

    def tail(self) -> str:
        """Return the end of its log, which has the error if it had time to write one."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return "nothing logged"
        return "\n".join(lines[-TAIL_LINES:]) or "nothing logged"


class Supervisor:
    """Starts and stops roles. As a context manager it leaves none of its processes behind; if it is killed, the kernel
    kills its roles."""

    def __init__(self, log_dir: Path, *, grace_s: float = 20.0) -> None:
        self.roles: dict[str, Role] = {}
        self.signal = 0
        """The first of `ENDING` that arrived; 0 if none did."""
        self._over_by = math.inf
        """Monotonic seconds at which, since a second one arrived, all roles are to be over."""
        self._log_dir = log_dir
        self._grace_s = grace_s
        self._families: list[tuple[str, ProcessTree]] = []
        """For each start of a role, its name and the process family."""
        self._stopped = StoppedProcesses()
        self._looked_at = 0.0

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        enforced: Mapping[str, str] = MappingProxyType({}),
    ) -> Role:
        """Start one process; its output is appended to `<log_dir>/<name>.log`, across restarts of the run.

        Args:
            environment: variables that the user's exports override.
            enforced: variables that override the user's exports.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log = self._log_dir / f"{name}.log"
        with log.open("ab") as sink:
            process = subprocess.Popen(
                dying_with_this(arguments),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={"PYTHONUNBUFFERED": "1", **environment, **os.environ, **enforced},
                start_new_session=True,
            )
        self.roles[name] = Role(name, process, log)
        self._families.append((name, ProcessTree(process.pid)))
        return self.roles[name]

    def __enter__(self) -> Supervisor:
        forget_ends(self._log_dir)
        # Under nohup, SIGHUP is ignored; it must stay so, for the run to outlive its terminal.
        heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._notice) for number in heard}
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop(list(self.roles))
        self.note_end()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def note_end(self) -> None:
        """Record that the run is over or about to be: from here on, nothing waits for a role that is gone."""
        note_ends(self._log_dir, {name: (role.code, role.stopped_by_us) for name, role in self.roles.items()})

    def _notice(self, number: int, _frame: FrameType | None) -> None:
        if self.signal:
            self._over_by = min(self._over_by, time.monotonic() + HASTE_S)
        self.signal = self.signal or number

    @property
    def impatient(self) -> bool:
        """Whether a second signal arrived."""
        return self._over_by < math.inf

    def failed(self) -> list[Role]:
        return [role for role in self.roles.values() if role.failed]

    def observe(self, *, now: bool = False) -> list[str]:
        """Record every descendant, once in `LOOK_S`, or `now`. Returns messages about stopped processes."""
        if not now and time.monotonic() - self._looked_at < LOOK_S:
            return []
        self._looked_at = time.monotonic()
        table, members = ProcessTable.now(), set[psutil.Process]()
        for name, family in self._families:
            family.look(table)
            own = process_at(self.roles[name].process.pid)
            members |= family.members | ({own} if own else set())
        return self._stopped.look(members)

    def wait_for(self, name: str, timeout_s: float) -> bool:
        """Give a role time to end by itself. Returns False if it did not, or a signal arrived."""
        deadline = time.monotonic() + timeout_s
        while self.roles[name].code is None:
            if self.signal or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def stop(self, names: Sequence[str]) -> None:
        """Send SIGTERM to these roles, then, after a grace period, SIGKILL to whatever is left of them and of the
        processes that they started."""
        roles = [self.roles[name] for name in names if self.roles[name].code is None]
        self.observe(now=True)
        for role in roles:
            role.stopped_by_us = True
            role.process.terminate()  # the role alone: it ends its children in order, as Ray would not on a signal
            _signal_group(role.process.pid, signal.SIGCONT)  # a stopped process handles no other signal
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < min(deadline, self._over_by) and any(role.code is None for role in roles):
            time.sleep(0.05)
        for role in roles:
            if role.code is None:
                self.observe(now=True)
                _signal_group(role.process.pid, signal.SIGKILL)
                role.process.wait()
        for name, family in self._families:
            if name in names:
                family.kill()


def _signal_group(pid: int, number: int) -> None:
    # The whole group may be gone already.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
