"""What a rank knows of the torchrun that started it, and the one thing it can tell it: to stop."""

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
    OwnCodeError,
    RefusedPeerError,
    RewardError,
    RunFolderError,
)
from asyncrl.family import die_with_parent
from asyncrl.standstill import watched_supervisors

LAUNCHER = "ASYNCRL_LAUNCHER"
"""Environment variable, set by our torchrun: its pid. A rank imports for seconds before it can ask who its parent is,
and of a torchrun that was killed in them it would take whoever adopted it for the one that started it."""
ADVANCED = signal.SIGUSR1
"""To our torchrun: whoever is started again goes on from further ahead than this start did. It counts its restarts anew
then."""
ENDED = signal.SIGUSR2
"""To our torchrun: the rank has come to its end. Exit code 0 alone does not say so: a library, or code of the user's,
may have called `os._exit`."""
AHEAD = "ASYNCRL_AHEAD"
"""Environment variable of a rank that was started before our torchrun knew all that it is to be told (`ahead`)."""
HOPELESS = (
    *(CheckpointDamagedError, CheckpointMismatchError, ConfigError, DataError, DiskFullError, EpisodeError),
    *(NonFiniteError, OwnCodeError, RefusedPeerError, RewardError, RunFolderError),
)
"""What would end the ranks in the same way after every restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The process that started this rank. Made when the rank starts: later its parent may be another."""

    pid: int
    start: str
    """Names this start of the ranks, equal on all of one machine. Empty: torchrun did not start them."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launcher:
        """From what torchrun sets; of a torchrun other than ours the parent of now."""
        run = environment.get("TORCHELASTIC_RUN_ID", "")
        pid = int(environment.get(LAUNCHER) or os.getppid())
        restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(pid=pid, start=f"{pid}-{restarts}-{run}"[:80] if run else "")

    def stop(self) -> bool:
        """Make torchrun end the ranks and not start them again; it knows no exit code that says so.

        Any rank may tell, the first of a machine does. Two signals would do no harm, but each further one interrupts
        torchrun while it ends the ranks, and may leave some behind.

        Returns:
            Whether this rank has told. It then outlives SIGTERM, to close what it opened: torchrun waits 30 s for it.
        """
        if not self.start or self.pid == 1 or os.getppid() != self.pid:  # torchrun is gone: the parent is another
            return False
        first = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            first.bind(f"\0asyncrl-learner-stop-{self.start}")
        except OSError as error:  # elsewhere than on Linux there are no such names: then every rank tells
            if error.errno == errno.EADDRINUSE:
                first.close()
                return False
        first.detach()  # the name lasts as long as this process
        previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            os.kill(self.pid, signal.SIGTERM)
        except OSError:
            signal.signal(signal.SIGTERM, previous)
            return False
        return True


def told() -> None:
    """In a rank: returns when its variables are those that torchrun sets.

    waits for: its torchrun, which imports torch meanwhile; unblocked by: the variables, or its end, and then this
    process ends
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
    """Our torchrun, where that has started this rank: another knows of no such signal, and would end of it."""
    pid = os.environ.get(LAUNCHER, "")
    if pid == str(os.getppid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), number)


def to_the_end(work: Callable[[ExitStack], None], failed: Callable[[AsyncRLError], None] | None = None) -> int:
    """Exit code 0, once `work` is done and what it put into the stack is closed.

    Args:
        failed: called with the error that ended it, before anything is closed.

    Raises:
        AsyncRLError: that one.
    """
    with ExitStack() as opened:
        try:
            work(opened)
        except AsyncRLError as error:
            if failed is not None:
                failed(error)
            raise
    return 0


def as_rank(main: Callable[[Callable[[AsyncRLError], None]], int], name: str) -> int:
    """Exit code of `main` as a process of its own: an error is said, and exit code 1.

    Args:
        main: called with what is to be called with the error that ends it, before it closes anything.
        name: of the module, for the error.
    """
    told()
    launcher = Launcher.of(os.environ)
    if launcher.start:
        # Nobody would start it again, or stop it: it would train on beside the next run in its folder.
        die_with_parent(launcher.pid)

    def failed(error: AsyncRLError) -> None:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if isinstance(error, HOPELESS):  # told later, another rank could end of it first, and all be started again
            launcher.stop()

    try:
        with watched_supervisors():
            code = main(failed)
    except AsyncRLError:
        return 1
    if code == 0:
        tell(ENDED)
    return code
