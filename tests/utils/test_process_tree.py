from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.storage.occupancy import alone_in, holders
from asyncrl.utils.process_tree import ProcessTable, ProcessTree, command_of, is_alive, is_stopped, marked, process_at
from asyncrl.utils.stopped_processes import StoppedProcesses, kind_of, watched_supervisors, who
from tests.cli.processes.test_supervisor import until

pytestmark = pytest.mark.timeout(400)

SUPERVISOR = """
import sys, time
from pathlib import Path
from asyncrl.cli.processes.supervisor import Supervisor
supervisor = Supervisor(Path(sys.argv[1]))
role = supervisor.start("a", [sys.executable, "-c", "import time; time.sleep(600)"], {})
print(role.process.pid, flush=True)
time.sleep(600)
"""
POOL = """
import subprocess, sys, time
from asyncrl.utils.process_tree import start_reaper
start_reaper()
child = subprocess.Popen([sys.executable, "-c",
    "import subprocess, sys, time\\n"
    "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\\n"
    "print(c.pid, flush=True); time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""
ORPHANS = """
import subprocess, sys, time
from asyncrl.utils.process_tree import start_reaper
start_reaper()
time.sleep(1.0)
subprocess.run([sys.executable, "-c",
    "import subprocess, sys\\n"
    "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\\n"
    "print(c.pid, flush=True)"], start_new_session=True)
"""
TENANT = """
import sys, time
from asyncrl.storage.occupancy import lived_in
with lived_in(sys.argv[1]):
    print("in", flush=True)
    time.sleep(600)
"""


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def identity(pid: int) -> psutil.Process:
    found = process_at(pid)
    assert found is not None
    return found


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    process = python("print('up', flush=True); import time; time.sleep(600)")
    first_line(process)
    yield identity(process.pid)
    end(process)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_role_dies_with_a_supervisor_that_is_killed_even_when_it_is_stopped(tmp_path: Path, stopped: bool) -> None:
    supervisor = python(SUPERVISOR, str(tmp_path))
    role = identity(int(first_line(supervisor)))
    # Stopped before, with the command line of its parent or of `asyncrl.utils.process_tree`, it would have no bond yet.
    until(lambda: any(each.startswith("import time; time.sleep") for each in command_of(role)[2:3]))
    if stopped:
        os.kill(role.pid, signal.SIGSTOP)
    end(supervisor)
    until(lambda: not is_alive(role))


def test_a_reaper_kills_what_a_killed_pool_left_in_sessions_of_their_own() -> None:
    pool = python(POOL)
    grandchild = identity(int(first_line(pool)))
    family = ProcessTree(pool.pid)
    until(lambda: family.look(ProcessTable.now()) or len(family.members) >= 3)
    # It looks every half second, and knows of whom it has seen.
    reapers = [member for member in family.members if "after" in command_of(member)]
    assert len(reapers) == 1
    time.sleep(3.0)
    end(pool)
    until(lambda: not any(is_alive(member) for member in family.members))
    assert not is_alive(grandchild)


def test_a_reaper_finds_what_was_started_and_orphaned_between_two_looks() -> None:
    pool = python(ORPHANS)
    orphan = identity(int(first_line(pool)))
    end(pool)
    until(lambda: not is_alive(orphan))


def test_a_mark_is_of_one_start_and_an_empty_one_of_nobody() -> None:
    assert marked("") == set() and marked("1-1") == set()


def test_a_stopped_process_is_named_once_a_minute_and_welcomed_back(sleeper: psutil.Process) -> None:
    now = 0.0
    watch = StoppedProcesses(clock=lambda: now)
    os.kill(sleeper.pid, signal.SIGSTOP)
    until(lambda: is_stopped(sleeper))
    said: list[str] = []
    for second in range(100):
        now = float(second)
        said += watch.look([sleeper])
    assert len(said) == 2, "once after 5 s, and again a minute later"
    assert f"(pid {sleeper.pid}) has been stopped by a signal for 5 s. `kill -CONT {sleeper.pid}`" in said[0]
    os.kill(sleeper.pid, signal.SIGCONT)
    until(lambda: not is_stopped(sleeper))
    (back,) = watch.look([sleeper])
    assert f"(pid {sleeper.pid}) runs again after 99 s" in back
    assert watch.look([sleeper]) == []


def test_who_stood_still_itself_names_nobody_for_that_time(sleeper: psutil.Process) -> None:
    now = 0.0
    watch = StoppedProcesses(clock=lambda: now)
    os.kill(sleeper.pid, signal.SIGSTOP)
    until(lambda: is_stopped(sleeper))
    assert watch.look([sleeper]) == []
    now = 1000.0
    assert watch.look([sleeper]) == []
    now = 1004.0
    assert watch.look([sleeper]) == []
    now = 1006.0
    assert len(watch.look([sleeper])) == 1


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("python -m asyncrl.learner.torchrun --nnodes=1 -m asyncrl.learner run.dir=x", "torchrun"),
        ("python -m torch.distributed.run --nnodes=1 -m asyncrl.learner run.dir=x", "torchrun"),
        ("python -u -m asyncrl.learner reward.function=asyncrl.rewards.exact_match:f", "a learner rank"),
        ("python -m asyncrl.replay reward.function=asyncrl.rewards.exact_match:f", "the replay server"),
        ("python -m asyncrl.rollout --worker", "a rollout worker"),
        ("ray::RolloutWorkerActor.run", "a rollout worker"),
        ("python -m asyncrl.rollout rollout.host=ray", "the rollout pool"),
        ("python -m asyncrl.rewards.child reward f.py:g", "a reward process"),
        ("/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "Ray's raylet"),
        ("/ray/core/src/ray/gcs/gcs_server --log_dir=x", "Ray's gcs_server"),
        ("VLLM::EngineCore", "a process of vLLM"),
        ("python -m asyncrl.cli local reward.function=asyncrl.rewards.exact_match:f", "asyncrl local"),
        ("python -m asyncrl local rollout.workers=2", "asyncrl local"),
        ("python /bin/asyncrl quickstart", "asyncrl local"),
        ("python /bin/asyncrl rollout ray.address=auto", "the rollout pool"),
        ("python -m pytest asyncrl/replay", None),
    ],
)
def test_a_command_line_tells_who_a_process_is(line: str, name: str | None) -> None:
    kind = kind_of(line.split())
    assert (kind.name if kind else None) == name


def test_a_process_of_nobody_s_is_named_by_its_command_and_its_owner(sleeper: psutil.Process) -> None:
    assert f"{sys.executable} -c print" in who(sleeper) and who(sleeper).endswith("below nobody known")


def test_the_watch_over_supervisors_ends_with_its_block() -> None:
    with watched_supervisors():
        pass


def test_a_folder_is_taken_as_long_as_any_process_of_its_run_lives(tmp_path: Path) -> None:
    tenants = [python(TENANT, str(tmp_path)) for _ in range(2)]
    try:
        assert [first_line(tenant) for tenant in tenants] == ["in", "in"]
        for tenant in tenants:
            with alone_in(tmp_path) as alone:
                assert not alone
            assert f"pid {tenants[-1].pid}" in holders(tmp_path)
            end(tenant)
        with alone_in(tmp_path) as alone:
            assert alone
            with alone_in(tmp_path) as second:
                assert not second
    finally:
        for tenant in tenants:
            end(tenant)
