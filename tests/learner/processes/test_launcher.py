from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from asyncrl.learner.processes import launcher
from asyncrl.learner.processes.launcher import Launcher


class Parent:
    """In place of the parent process: keeps what it is sent, or is gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pid = 4321
        self.got: list[tuple[int, int]] = []
        self.error: OSError | None = None
        monkeypatch.setattr(launcher.os, "getppid", lambda: self.pid)
        monkeypatch.setattr(launcher.os, "kill", self._kill)

    def _kill(self, pid: int, number: int) -> None:
        if self.error is not None:
            raise self.error
        self.got.append((pid, number))


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parent]:
    previous = signal.getsignal(signal.SIGTERM)
    yield Parent(monkeypatch)
    signal.signal(signal.SIGTERM, previous)


def environment(restarts: int = 0) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": NAME, "TORCHELASTIC_RESTART_COUNT": str(restarts), "LOCAL_RANK": "1"}


NAME = uuid.uuid4().hex


def test_of_all_ranks_of_a_start_one_tells_whatever_its_number(parent: Parent):
    assert [Launcher.of(environment(7)).stop() for _ in range(3)] == [True, False, False]
    assert parent.got == [(4321, signal.SIGTERM)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "it closes what it opened before torchrun ends it"
    assert Launcher.of(environment(8)).stop(), "the next start has its own"


def test_nobody_but_the_torchrun_that_started_the_rank_is_told(parent: Parent):
    assert not Launcher.of({}).stop(), "no torchrun"
    orphan = Launcher.of(environment(1))
    parent.pid = 1
    assert not orphan.stop(), "torchrun is gone"
    assert not Launcher.of(environment(2)).stop(), "it was gone from the beginning"
    parent.pid = 99
    assert not orphan.stop(), "another has adopted the rank"
    assert parent.got == []


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.timeout(400)
def test_a_rank_whose_torchrun_died_while_it_imported_ends():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    rank = "import sys; from asyncrl.learner import __main__ as rank; rank.work = print; sys.exit(rank.rank_main([]))"
    done = subprocess.run(
        [sys.executable, "-c", rank],
        env={**os.environ, **environment(), launcher.LAUNCHER: str(gone.pid)},
        capture_output=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (1, b""), "it does not go on as the child of whoever adopted it"


@pytest.mark.parametrize("error", [ProcessLookupError(), PermissionError()])
def test_a_torchrun_that_cannot_be_told_is_no_error(parent: Parent, error: OSError):
    parent.error = error
    before = signal.getsignal(signal.SIGTERM)
    assert not Launcher.of(environment(3 + isinstance(error, PermissionError))).stop()
    assert signal.getsignal(signal.SIGTERM) is before
