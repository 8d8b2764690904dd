from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.cli.processes import supervisor as supervisor_module
from asyncrl.cli.processes.supervisor import Supervisor
from asyncrl.utils.process_tree import descendants, kill
from tests.waiting import until

pytestmark = pytest.mark.timeout(400)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


FOREVER = python("import time; time.sleep(600)")
STUBBORN = python(
    """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)
    time.sleep(600)
    """
)
# Like torchrun and Ray: a child in a session of its own, which the group of its parent does not reach.
WITH_CHILD = python(
    """
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(600)
    """
)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_output_and_errors_of_a_role_are_in_its_log(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "logs") as supervisor:
        role = supervisor.start("learner", python("import sys; print('out'); print('err', file=sys.stderr)"), {})
        assert supervisor.wait_for("learner", 60)
        assert set((tmp_path / "logs" / "learner.log").read_text().split()) == {"out", "err"}
        assert not role.failed


def test_a_role_that_ends_badly_has_failed_and_shows_its_last_lines(tmp_path: Path) -> None:
    code = "import sys\nfor i in range(100): print('line', i)\nsys.exit('the reason')"
    with Supervisor(tmp_path) as supervisor:
        role = supervisor.start("rollout", python(code), {})
        supervisor.wait_for("rollout", 60)
        assert supervisor.failed() == [role]
        assert role.tail().endswith("the reason")
        assert len(role.tail().splitlines()) == 30


def test_leaving_the_supervisor_stops_every_role(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        roles = [supervisor.start(name, FOREVER, {}) for name in ("a", "b")]
    assert all(role.code == -signal.SIGTERM for role in roles)
    assert supervisor.failed() == []


def test_a_role_is_told_to_end_and_what_it_started_is_left_to_it(tmp_path: Path) -> None:
    """A raylet that gets the signal too kills the workers, which the pool would have ended in order."""
    code = """
        import signal, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        def end(*_):
            time.sleep(1)
            sys.exit(0 if child.poll() is None else 1)
        signal.signal(signal.SIGTERM, end)
        print("ready", flush=True)
        time.sleep(600)
    """
    with Supervisor(tmp_path) as supervisor:
        role = supervisor.start("a", python(code), {})
        until(lambda: "ready" in role.log.read_text())
    assert role.code == 0


def test_a_role_deaf_to_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    with Supervisor(tmp_path, grace_s=0.5) as supervisor:
        role = supervisor.start("a", STUBBORN, {})
        until(lambda: "deaf" in role.log.read_text())
    assert role.code == -signal.SIGKILL


def test_a_grandchild_in_its_own_session_does_not_outlive_a_stop(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        role = supervisor.start("a", WITH_CHILD, {})
        until(lambda: role.log.read_text().endswith("\n"))
        child = int(role.log.read_text())
        assert psutil.pid_exists(child)
    until(lambda: gone(child))


def test_a_grandchild_does_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        role = supervisor.start("a", WITH_CHILD, {})
        until(lambda: role.log.read_text().endswith("\n"))
        child = int(role.log.read_text())
        supervisor.observe()
        role.process.kill()
        role.process.wait()
        assert supervisor.failed() == [role]
        assert psutil.pid_exists(child)
    until(lambda: gone(child))


def test_ctrl_c_is_noticed_and_the_old_handler_comes_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with Supervisor(tmp_path) as supervisor:
        supervisor.start("a", FOREVER, {})
        os.kill(os.getpid(), signal.SIGINT)
        assert supervisor.signal == signal.SIGINT
        assert not supervisor.wait_for("a", 60), "a signal ends the wait"
    assert signal.getsignal(signal.SIGINT) is before


def test_after_a_second_ctrl_c_all_roles_have_one_deadline_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "HASTE_S", 5.0)
    with Supervisor(tmp_path) as supervisor:
        roles = [supervisor.start(name, STUBBORN, {}) for name in ("rollout", "replay")]
        until(lambda: all("deaf" in role.tail() for role in roles))
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        supervisor.stop(["rollout"])
        begun = time.monotonic()
        supervisor.stop(["replay"])
        assert time.monotonic() - begun < 5.0, "it got seconds of its own"
    assert [role.code for role in roles] == [-signal.SIGKILL] * 2


def test_a_pid_that_was_given_to_another_process_is_not_killed(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        role = supervisor.start("a", FOREVER, {})
        other = psutil.Process(role.process.pid)
        other._ident = (other.pid, 0.0)  # pyright: ignore[reportAttributeAccessIssue]  started at another time
        kill(other)
        time.sleep(0.1)
        assert role.code is None


def test_what_the_user_exported_wins_over_our_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    show = python("import os; print(os.environ['OMP_NUM_THREADS'], os.environ['OTHER'])")
    with Supervisor(tmp_path) as supervisor:
        role = supervisor.start("a", show, {"OMP_NUM_THREADS": "1", "OTHER": "x"})
        supervisor.wait_for("a", 60)
    assert role.log.read_text().split() == ["3", "x"]


def test_descendants_of_a_process_that_is_gone_are_none() -> None:
    assert descendants(2**22 + 1) == set()
