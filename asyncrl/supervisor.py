"""Child processes that live and die together: started with their logs, watched, and stopped to the last one.

consumes: exit codes · waits for: children, with a deadline per stage of stopping · unblocked by: their ends, Ctrl-C
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

TAIL_LINES = 30
OBSERVE_S = 1.0


@dataclass(slots=True)
class Role:
    """One supervised process, in a process group of its own, so that Ctrl-C reaches the supervisor alone."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    stopped_by_us: bool = False

    @property
    def code(self) -> int | None:
        return self.process.poll()

    @property
    def failed(self) -> bool:
        """Ended, by itself, with anything but success."""
        return self.code not in (None, 0) and not self.stopped_by_us

    def tail(self) -> str:
        """The end of its log, which names the error if it had time to write one."""
        try:
            text = self.log.read_text(errors="replace")
        except FileNotFoundError:
            return "nothing logged"
        # torchrun closes with a traceback of its own, which pushes the rank's error out of sight.
        before, _, closing = text.rpartition("Traceback (most recent call last)")
        closes = "ChildFailedError" in closing or "SignalException" in closing
        lines = (before if closes else text).splitlines()
        return "\n".join(lines[-TAIL_LINES:]) or "nothing logged"


class Supervisor:
    """Starts roles and stops them. As a context manager nothing it started outlives it."""

    def __init__(self, log_dir: Path, *, grace_s: float = 20.0) -> None:
        self.roles: dict[str, Role] = {}
        self.signal = 0
        """SIGINT or SIGTERM once one arrived, else 0."""
        self._log_dir = log_dir
        self._grace_s = grace_s
        self._family: set[ProcessId] = set()
        self._observed_at = 0.0

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Role:
        """Start one process; its output goes to `<log_dir>/<name>.log`, appended across restarts of the run."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log = self._log_dir / f"{name}.log"
        with log.open("ab") as sink:
            process = subprocess.Popen(
                list(arguments),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                # What the user exported wins over our defaults.
                env={"PYTHONUNBUFFERED": "1", **environment, **os.environ},
                start_new_session=True,
            )
        self.roles[name] = Role(name, process, log)
        return self.roles[name]

    def __enter__(self) -> Supervisor:
        self._previous = {number: signal.signal(number, self._notice) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop(list(self.roles))
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _notice(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number

    def failed(self) -> list[Role]:
        return [role for role in self.roles.values() if role.failed]

    def observe(self) -> None:
        """Remember every descendant, about once a second: torchrun and Ray put their children in sessions of their
        own, and when such a parent was killed nothing tells any more that its children were ours."""
        if time.monotonic() - self._observed_at < OBSERVE_S:
            return
        self._observed_at = time.monotonic()
        self._family = {process for process in self._family if process.alive()}
        for role in self.roles.values():
            if role.code is None:
                self._family |= descendants(role.process.pid)

    def wait_for(self, name: str, timeout_s: float) -> bool:
        """Give a role time to end by itself. False when it did not, or when a signal arrived."""
        deadline = time.monotonic() + timeout_s
        while self.roles[name].code is None:
            if self.signal or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def stop(self, names: Sequence[str]) -> None:
        """SIGTERM, a grace period, then SIGKILL to whatever is left of these roles and of all they started."""
        roles = [self.roles[name] for name in names if self.roles[name].code is None]
        self._observed_at = 0.0
        self.observe()
        for role in roles:
            role.stopped_by_us = True
            _signal_group(role.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline and any(role.code is None for role in roles):
            time.sleep(0.05)
        for role in roles:
            if role.code is None:
                self._family |= descendants(role.process.pid)
                _signal_group(role.process.pid, signal.SIGKILL)
                role.process.wait()
        for process in self._family:
            process.kill()


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process beyond doubt: the pid alone may belong to another by the time it is used."""

    pid: int
    started: str

    def alive(self) -> bool:
        state = _read_stat(self.pid)
        return state is not None and state.started == self.started

    def kill(self) -> None:
        if self.alive():
            # It may end in between, which is what is wanted.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    started: str


def _read_stat(pid: int) -> _Stat | None:
    """Parent and start time of a process, from /proc; None when it is gone (or where there is no /proc)."""
    try:
        # The name is in parentheses and may hold spaces and parentheses itself.
        rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return _Stat(parent=int(rest[1]), started=rest[19])


def descendants(pid: int) -> set[ProcessId]:
    """All processes below `pid`, whatever group or session they are in. Empty where there is no /proc."""
    folders = Path("/proc").iterdir() if Path("/proc/self/stat").exists() else []
    stats = {int(folder.name): _read_stat(int(folder.name)) for folder in folders if folder.name.isdigit()}
    found: set[ProcessId] = set()
    front = {pid}
    while front:
        front = {child for child, stat in stats.items() if stat is not None and stat.parent in front}
        found |= {ProcessId(child, stat.started) for child in front if (stat := stats[child]) is not None}
    return found


def _signal_group(pid: int, number: int) -> None:
    # The whole group may be gone already.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
