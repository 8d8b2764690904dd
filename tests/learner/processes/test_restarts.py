"""Which deaths torchrun answers with a restart, and which not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncrl.errors import AsyncRLError, CheckpointError, CheckpointMismatchError, ConfigError, RefusedPeerError
from asyncrl.learner import __main__ as learner
from asyncrl.learner.processes import launcher


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_setting_that_two_ranks_refuse_is_not_tried_again():
    torchrun = ("-m", "asyncrl.learner.torchrun", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=bound")
    done = subprocess.run(
        [sys.executable, *torchrun, "--rdzv-endpoint=127.0.0.1:0", "-m", "asyncrl.learner", "learner.steps=many"],
        capture_output=True,
        text=True,
        timeout=350,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode != 0
    assert 1 <= done.stderr.count("asyncrl.learner: ConfigError: ") <= 2, "once by each rank that got so far"
    assert "learner.steps=many" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.endswith("torchrun: ended by SIGTERM\n")


class Told:
    """In place of the launcher: notes that it was told."""

    start = ""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def of(self, environment: object) -> Told:
        return self

    def stop(self) -> bool:
        self._events.append("told")
        return True


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConfigError("no"), ["told", "closed"]),
        (CheckpointMismatchError("no"), ["told", "closed"]),
        (RefusedPeerError("other settings than the replay server"), ["told", "closed"]),
        (CheckpointError("disk full"), ["closed"]),
    ],
)
def test_torchrun_is_told_of_what_no_restart_can_help_before_anything_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: AsyncRLError, expected: list[str]
):
    events: list[str] = []

    def work(overrides: Sequence[str], opened: ExitStack) -> None:
        opened.callback(events.append, "closed")
        raise error

    monkeypatch.setattr(learner, "work", work)
    monkeypatch.setattr(launcher, "Launcher", Told(events))
    assert learner.rank_main([]) == 1
    assert events == expected
    assert capsys.readouterr().err == f"asyncrl.learner: {type(error).__name__}: {error}\n"


DYING = """
import os, signal, sys, time
from pathlib import Path
from asyncrl.learner.processes.launcher import ADVANCED, tell, told

told()
starts = Path(sys.argv[1])
starts.write_text(starts.read_text() + os.environ["TORCHELASTIC_RESTART_COUNT"])
if len(starts.read_text()) in (2, 3, 5):
    tell(ADVANCED)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.timeout(400)
def test_restarts_are_counted_from_the_last_checkpoint_on(tmp_path: Path):
    (tmp_path / "rank.py").write_text(DYING)
    starts = tmp_path / "starts"
    starts.touch()
    torchrun = ("-m", "asyncrl.learner.torchrun", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=bound")
    done = subprocess.run(
        [sys.executable, *torchrun, "--rdzv-endpoint=127.0.0.1:0", str(tmp_path / "rank.py"), str(starts)],
        capture_output=True,
        text=True,
        timeout=350,
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert re.search(r"\ntorchrun: rank 0 \(pid \d+\) ended first, with SIGKILL\n$", done.stderr)
    assert starts.read_text() == "01" + "1" + "12" + "12", "the second, third and fifth got further than those before"


LEAVING = """
import os, sys
from pathlib import Path
from asyncrl.learner.processes.launcher import as_rank

def work(opened):
    starts = Path(sys.argv[1])
    starts.write_text(starts.read_text() + "s")
    if len(starts.read_text()) <= int(sys.argv[2]):
        os._exit(0)  # as code of the user's may

sys.exit(as_rank(work, "rank"))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("leaves", [1, 2], ids=["once", "again"])
def test_a_rank_that_leaves_with_exit_code_0_before_its_end_has_died(tmp_path: Path, leaves: int):
    (tmp_path / "rank.py").write_text(LEAVING)
    starts = tmp_path / "starts"
    starts.touch()
    torchrun = ("-m", "asyncrl.learner.torchrun", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=bound")
    done = subprocess.run(
        [sys.executable, *torchrun, "--rdzv-endpoint=127.0.0.1:0", str(tmp_path / "rank.py"), str(starts), str(leaves)],
        capture_output=True,
        text=True,
        timeout=350,
    )
    assert starts.read_text() == "ss", done.stderr
    assert (done.returncode == 0) == (leaves == 1), done.stderr
    assert leaves == 1 or "ended first, with exit code 0 before its work was done" in done.stderr


def test_a_torchrun_of_somebody_else_is_not_told_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch):
    got: list[tuple[int, int]] = []
    monkeypatch.setattr(launcher.os, "kill", lambda pid, number: got.append((pid, number)))
    monkeypatch.delenv(launcher.LAUNCHER, raising=False)
    launcher.tell(launcher.ADVANCED)
    monkeypatch.setenv(launcher.LAUNCHER, str(os.getppid() + 1))
    launcher.tell(launcher.ADVANCED)
    assert got == []
    monkeypatch.setenv(launcher.LAUNCHER, str(os.getppid()))
    launcher.tell(launcher.ADVANCED)
    assert got == [(os.getppid(), launcher.ADVANCED)]
