"""What a rank knows of the torchrun that started it, and the signals that it can send to it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from asyncrl.errors import (
    AsyncRLError,
    CheckpointDamagedError,
    CheckpointMismatchError,
    ConfigError,
    DataError,
    DiskFullError,
    EpisodeError,
    NonFiniteError,
    RefusedPeerError,
    RewardError,
    RunFolderError,
    UserCodeError,
)
from asyncrl.utils.process_tree import die_with_parent
from asyncrl.utils.stopped_processes import watched_supervisors

LAUNCHER = "ASYNCRL_LAUNCHER"
"""Environment variable with the pid of our torchrun, which sets it. A rank imports for seconds before it can read its
parent's pid; if torchrun was killed meanwhile, it would mistake the process that adopted it for its torchrun."""
ADVANCED = signal.SIGUSR1
"""Signal to our torchrun: a restart would continue from a later point than this start, so restarts count anew."""
ENDED = signal.SIGUSR2
"""Signal to our torchrun: the rank has finished its work. Exit code 0 alone does not show it, because a library or user
code may have called `os._exit`."""
AHEAD = "ASYNCRL_AHEAD"
"""Environment variable of a rank that was started before torchrun knew all of its variables (`ahead`)."""
HOPELESS = (
    *(CheckpointDamagedError, CheckpointMismatchError, ConfigError, DataError, DiskFullError, EpisodeError),
    *(NonFiniteError, UserCodeError, RefusedPeerError, RewardError, RunFolderError),
)
"""Errors that would end the ranks in the same way after every restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The process that started this rank. Create it when the rank starts: its parent may be another process later."""

    pid: int
    start: str
    """Identifies this start of the ranks, equal for all on a machine. Empty: torchrun did not start them."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launcher:
        """Read it from torchrun's variables; for another torchrun than ours the pid is that of the current parent."""
        run = environment.get("TORCHELASTIC_RUN_ID", "")
        pid = int(environment.get(LAUNCHER) or os.getppid())
        restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(pid=pid, start=f"{pid}-{restarts}-{run}"[:80] if run else "")

    def stop(self) -> bool:
        """Make torchrun end the ranks and not restart them; no exit code has this effect.

        Any rank may call this; the first on a machine sends the signal. A second signal would do no harm by itself, but
        each further one interrupts torchrun while it ends the ranks, and may leave some behind.

        Returns:
            Whether this rank sent the signal. It then ignores SIGTERM, to close its resources: torchrun waits 30 s.
        """
        if not self.start or self.pid == 1 or os.getppid() != self.pid:  # torchrun is gone: the parent has changed
            return False
        first = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            first.bind(f"\0asyncrl-learner-stop-{self.start}")
        except OSError as error:  # only Linux has such names; elsewhere every rank sends the signal
            if error.errno == errno.EADDRINUSE:
                first.close()
                return False
        first.detach()  # the name exists as long as this process
        previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            os.kill(self.pid, signal.SIGTERM)
        except OSError:
            signal.signal(signal.SIGTERM, previous)
            return False
        return True


def told() -> None:
    """Called by a rank that was started ahead: return once its environment has the variables that torchrun sets.

    waits for: its torchrun, which imports torch meanwhile. unblocked by: the variables, or the end of torchrun, after
    which this process ends.
    """
    if os.environ.pop(AHEAD, "") != "1":
        return
    die_with_parent(int(os.environ[LAUNCHER]))
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 1 << 16)
        if not data:
            sys.exit(1)
        line += data
    os.environ.update(json.loads(line))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def tell(number: int) -> None:
    """Send a signal to our torchrun, if it started this rank: another one does not handle it and would be killed."""
    pid = os.environ.get(LAUNCHER, "")
    if pid == str(os.getppid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), number)


def to_the_end(work: Callable[[ExitStack], None], failed: Callable[[AsyncRLError], None] = lambda error: None) -> int:
    """Run `work`, then close what it put into the stack. Returns exit code 0.

    Args:
        failed: called with the error that ended `work`, before anything is closed.

    Raises:
        AsyncRLError: the error that ended `work`.
    """
    with ExitStack() as opened:
        try:
            work(opened)
        except AsyncRLError as error:
            failed(error)
            raise
    return 0


def as_rank(work: Callable[[ExitStack], None], name: str) -> int:
    """Run `work` to its end as a process and return its exit code; an error is printed and gives exit code 1.

    Args:
        name: name of the module, for the error message.
    """
    told()
    launcher = Launcher.of(os.environ)
    if launcher.start:
        # Otherwise, without anyone to restart or stop it, it would train on beside the next run in its folder.
        die_with_parent(launcher.pid)

    def failed(error: AsyncRLError) -> None:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if isinstance(error, HOPELESS):  # at once, because another rank might end first, and all would be restarted
            launcher.stop()

    try:
        with watched_supervisors():
            to_the_end(work, failed)
    except AsyncRLError:
        return 1
    tell(ENDED)
    return 0
