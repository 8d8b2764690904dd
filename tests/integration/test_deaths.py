"""Every kind of process of a real `asyncrl local`, killed and stopped: docs/failures.md, row by row.

One run per host serves all kills and stops: the tests of a host go in the order they stand here, and the last ones end
the run and resume it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from asyncrl.utils.process_tree import command_of
from asyncrl.utils.stopped_processes import kind_of
from tests.alive import is_alive
from tests.integration.conftest import LEISURELY, LocalRun, begun
from tests.integration.test_loop import assert_conserved, assert_trained_once, ledger
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1500)]

PATIENCE_S = 240.0
ENVIRONMENT = """
import subprocess, sys
from asyncrl.environments.single_turn import SingleTurn
class WithProcess(SingleTurn):
    def __init__(self):
        self.sandbox = subprocess.Popen([sys.executable, "-c", "import time  # sandbox\\nwhile True: time.sleep(1)"])
"""
POOLS, OUTSIDE_RAY = ["the rollout pool", "a rollout worker"], ["torchrun", "a reward process", "sandbox"]
COMMON = [*POOLS, *OUTSIDE_RAY]
RAYS = ["Ray's raylet", "Ray's gcs_server", "ray::RuntimeEnvAgent"]
ALONE = ["a learner rank", "the replay server"]


class Runs:
    """The run of each host, as often as it is started."""

    def __init__(self, task: dict[str, str], root: Path) -> None:
        self._task, self._root = task, root
        self._started: dict[str, list[LocalRun]] = {}

    def begin(self, host: str) -> None:
        (self._root / "with_process.py").write_text(ENVIRONMENT)
        (self._root / "leisurely.py").write_text(LEISURELY)
        run = self.start(host)
        run.wait_for_step(3, PATIENCE_S)
        run.until((run.directory / "ckpt" / "latest").is_symlink, "there is no checkpoint")

    def of(self, host: str) -> LocalRun:
        """The newest one."""
        return self._started[host][-1]

    def killed(self, host: str) -> LocalRun:
        """Its `asyncrl local`, and nobody is left of it."""
        run = self.of(host)
        run.descendants()
        run.process.kill()
        run.process.wait()
        until(lambda: not any(map(is_alive, run.seen)), lambda: run.seen, within_s=PATIENCE_S)
        return run

    def start(self, host: str, **settings: str) -> LocalRun:
        directory = self._root / host
        values = self._task | {
            "run.dir": str(directory), "learner.steps": "100000", "learner.save_every": "3", "learner.ranks": "2",
            "rollout.host": host, "rollout.workers": "2", "replay.heartbeat_timeout_s": "8",
            "reward.timeout_s": "15", "learner.max_restarts": "20", "learner.max_tokens_per_microbatch": "1024",
            "reward.function": f"{self._root / 'leisurely.py'}:score",
            "environment.name": f"{self._root / 'with_process.py'}:WithProcess",
        } | settings  # fmt: skip
        before = self._started.setdefault(host, [])
        output = self._root / f"{host}-{len(before)}.log"
        run = LocalRun(directory, begun(output, "local", values, die_with_test=True), output)
        before.append(run)
        return run

    def end(self) -> None:
        for started in self._started.values():
            for run in started:
                run.stop()


@pytest.fixture(scope="class")
def runs(
    request: pytest.FixtureRequest, tiny_task: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    """Of a class: all its tests share the run, so none of them may be said to have left it behind."""
    made = Runs(tiny_task, tmp_path_factory.mktemp("deaths"))
    assert request.cls is not None
    made.begin(request.cls.HOST)
    yield made
    made.end()


@pytest.fixture
def ended(runs: Runs) -> Iterator[None]:
    """Nothing is left running by the test, whatever becomes of it."""
    yield
    runs.end()


def find(run: LocalRun, kind: str) -> psutil.Process:
    """One that has been of this kind for long enough to work."""
    found: list[psutil.Process] = []

    def there() -> bool:
        for process in run.descendants():
            command = command_of(process)
            known = kind_of(command)
            if (known is not None and known.name == kind) or kind in " ".join(command[:3]):
                found.append(process)
        return bool(found)

    run.until(there, f"there is no {kind}")
    return found[0]


def goes_on(run: LocalRun, steps: int = 4) -> None:
    run.wait_for_step(run.rows()[-1]["step"] + steps, PATIENCE_S)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in ("stopped", "killed"):
        if name in metafunc.fixturenames and metafunc.cls is not None:
            also = metafunc.cls.ALSO[name]
            kinds = [*metafunc.cls.KINDS[name], *(pytest.param(kind, marks=pytest.mark.long) for kind in also)]
            metafunc.parametrize(name, kinds, ids=lambda kind: kind if isinstance(kind, str) else " and ".join(kind))


class Deaths:
    """What is tested under each host."""

    HOST: str
    KINDS: ClassVar[dict[str, list[Any]]]
    """Killed one after the other; stopped all those of a list at once: to be named takes each of them seconds."""
    ALSO: ClassVar[dict[str, list[Any]]]
    """Of these the other host's run says what there is to say."""

    def test_stopped_processes_are_named_and_the_run_goes_on_when_they_do(self, runs: Runs, stopped: list[str]) -> None:
        run = runs.of(self.HOST)
        victims = {kind: find(run, kind) for kind in stopped}
        try:
            for victim in victims.values():
                victim.suspend()
            for kind, victim in victims.items():
                said = f"(pid {victim.pid}) has been stopped"
                run.until(lambda said=said: said in run.output.read_text(), f"nobody named {kind}")
        finally:
            for victim in victims.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.resume()
        for kind, victim in victims.items():
            back = f"(pid {victim.pid}) runs again"
            # A worker, or a reward process, that was replaced meanwhile does not come back.
            run.until(
                lambda back=back, victim=victim: back in run.output.read_text() or not victim.is_running(),
                f"{kind} did not come back",
            )
        goes_on(run)

    def test_a_killed_process_costs_nothing_but_time(self, runs: Runs, killed: str) -> None:
        run = runs.of(self.HOST)
        find(run, killed).kill()
        time.sleep(1.0)
        goes_on(run, 6)
        assert_conserved(run.rows()[-1])
        assert "this resume changes" not in (run.directory / "logs" / "learner.log").read_text()

    def test_a_stopped_asyncrl_local_is_named_by_the_roles_and_goes_on(self, runs: Runs) -> None:
        run = runs.of(self.HOST)
        logs = [run.directory / "logs" / name for name in ("replay.log", "rollout.log", "learner.log")]
        before, shown = run.rows()[-1]["step"], run.output.read_text().count("\nstep ")
        os.kill(run.process.pid, signal.SIGSTOP)
        try:
            said = f"asyncrl local (pid {run.process.pid}) has been stopped"
            run.until(lambda: all(said in log.read_text() for log in logs), "a role did not note it")
            run.wait_for_step(before + 2, PATIENCE_S)
        finally:
            os.kill(run.process.pid, signal.SIGCONT)
        run.until(lambda: run.output.read_text().count("\nstep ") > shown, "it did not go on")
        goes_on(run)

    def test_nobody_outlives_a_killed_asyncrl_local(self, runs: Runs) -> None:
        find(runs.of(self.HOST), "a rollout worker").suspend()  # it could not end by itself
        assert_trained_once(ledger(runs.killed(self.HOST)))

    @pytest.mark.usefixtures("ended")
    def test_a_run_whose_asyncrl_local_was_killed_resumes_and_ctrl_c_saves_it(self, runs: Runs) -> None:
        old = runs.killed(self.HOST).rows()[-1]["step"]
        again = runs.start(self.HOST, resume="auto")
        again.wait_for_step(old + 3, PATIENCE_S)
        # What is trained is printed a moment later.
        again.until(lambda: re.search(r"^step \d+ ", again.output.read_text(), re.MULTILINE), "no step was printed")
        shown = again.output.read_text()
        (step,) = map(int, re.findall(r"^resumed from step (\d+)$", shown, re.MULTILINE))
        printed = [int(number) for number in re.findall(r"^step (\d+) ", shown, re.MULTILINE)]
        assert step <= old and min(printed) == step + 1, "an old step was printed"

        run = again
        run.process.send_signal(signal.SIGINT)
        assert run.finish(PATIENCE_S) == 130, run.tail()
        last, text = run.rows()[-1]["step"], run.output.read_text()
        assert f"the newest checkpoint is that of step {last}" in text and "resume=auto" in text
        assert (run.directory / "ckpt" / "latest").resolve().name == f"step_{last}"
        assert_trained_once(ledger(run))
        assert_conserved(run.rows()[-1])

        more = runs.start(self.HOST, resume="auto", **{"learner.steps": str(last + 2)})
        assert more.finish(PATIENCE_S) == 0, more.tail()
        assert f"resumed from step {last}\n" in more.output.read_text()
        finished = runs.start(self.HOST, resume="auto", **{"learner.steps": str(last + 2)})
        assert finished.finish(PATIENCE_S) == 0, finished.tail()
        assert f"nothing to do: {last + 2} steps are trained" in finished.output.read_text()
        versions = [row["policy_version"] for row in more.rows()]
        assert versions == sorted(set(versions)), "a policy version was used twice"


class TestProcess(Deaths):
    HOST = "process"
    KINDS: ClassVar = {"stopped": [COMMON, ALONE], "killed": [*COMMON, *ALONE]}
    ALSO: ClassVar = {"stopped": [], "killed": []}


class TestRay(Deaths):
    HOST = "ray"
    KINDS: ClassVar = {"stopped": [["a rollout worker", "Ray's raylet"]], "killed": [*RAYS, *POOLS]}
    ALSO: ClassVar = {"stopped": [["the rollout pool", *OUTSIDE_RAY]], "killed": OUTSIDE_RAY}

    @pytest.mark.long
    @pytest.mark.usefixtures("ended")
    def test_a_run_whose_asyncrl_local_was_killed_resumes_and_ctrl_c_saves_it(self, runs: Runs) -> None:
        super().test_a_run_whose_asyncrl_local_was_killed_resumes_and_ctrl_c_saves_it(runs)
