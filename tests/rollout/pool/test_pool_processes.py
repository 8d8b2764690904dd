"""The pool with real worker processes and a real replay server, on both hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.config import load_config
from asyncrl.digests import run_digest
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from asyncrl.quickstart.modes import write_modes
from asyncrl.replay.client.client import LearnerClient
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.net.keyring import with_keys
from asyncrl.replay.serving import run_server
from asyncrl.schema import Config
from asyncrl.types import NO_VERSION
from tests.addresses import free_address
from tests.alive import is_alive
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RAY = pytest.mark.ray
HOSTS = ["process", pytest.param("ray", marks=RAY)]


def name_of(process: psutil.Process) -> str:
    """Empty if it has ended: among those that are seen are some that live for a moment."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


class Scene:
    """A replay server in a thread, a learner's client, and pools as child processes."""

    def __init__(self, folder: Path, host: str, **changes: str) -> None:
        save_byte_tokenizer(folder / "model")
        train, heldout = write_modes(folder, seed=0, train_rows=64, eval_rows=8)
        settings = {
            "run.dir": str(folder / "run"),
            "model.path": str(folder / "model"),
            "data.path": str(train),
            "eval.path": str(heldout),
            "reward.function": "asyncrl.rewards.exact_match:exact_match",
            "engine": "fake",
            "rollout.host": host,
            "rollout.workers": "2",
            "rollout.max_new_tokens": "8",
            "replay.address": free_address(),
            **changes,
        }
        self.folder = folder
        self.overrides = [f"{key}={value}" for key, value in settings.items()]
        self.config: Config = with_keys(load_config(self.overrides))
        self.stop = threading.Event()
        digest = run_digest(self.config)
        admission = AdmissionSettings.from_config(self.config)
        self.server = threading.Thread(
            target=run_server, args=(self.config.replay, admission, "run", digest, 0, self.stop)
        )
        self.server.start()
        self.learner = LearnerClient(self.config.replay.address, rank=0, run_digest=digest, config=self.config.replay)
        self.learner.restore(step=None, policy_version=NO_VERSION, snapshot=None)
        self.pool: subprocess.Popen[bytes] | None = None
        self.started: dict[int, psutil.Process] = {}

    def start_pool(self) -> None:
        with (self.folder / "pool.log").open("ab") as log:
            self.pool = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.rollout", *self.overrides],
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def said(self) -> str:
        logs = sorted((self.folder / "run" / "logs").glob("*.log"))
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in [self.folder / "pool.log", *logs])

    def incarnations(self) -> dict[str, str]:
        return {member.worker: member.incarnation for member in self.learner.members()}

    def wait_for_workers(self, count: int = 2) -> dict[str, str]:
        assert self.pool is not None
        try:
            until(lambda: len(self.incarnations()) >= count, "no hello of the workers", within_s=180)
        except AssertionError as error:
            raise AssertionError(self.said()) from error
        self.note_processes()
        return self.incarnations()

    def note_processes(self) -> None:
        assert self.pool is not None
        root = psutil.Process(self.pool.pid)
        self.started.update({process.pid: process for process in [root, *root.children(recursive=True)]})

    def worker_pid(self, index: int) -> int:
        """From the header of its log."""
        lines = (self.folder / "run/logs" / f"rollout-{index}.log").read_text().splitlines()
        return int([line for line in lines if line.startswith("---")][-1].split(" pid ")[1].split()[0])

    def survivors(self) -> list[psutil.Process]:
        return [process for process in self.started.values() if is_alive(process)]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.kill()
            self.pool.wait(timeout=60)
        for process in self.survivors():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.learner.close()
        self.stop.set()
        self.server.join(timeout=40)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(host: str, **changes: str) -> Scene:
        scenes.append(Scene(tmp_path, host, **changes))
        scenes[-1].start_pool()
        return scenes[-1]

    yield make
    for each in scenes:
        each.close()


@pytest.mark.parametrize(
    ("host", "end", "code"),
    # Runs that end by themselves with workers in Ray are in tests/integration.
    [("process", "run", 0), pytest.param("ray", "signal", 128 + signal.SIGTERM, marks=RAY)],
)
def test_a_killed_worker_comes_back_as_a_new_incarnation_and_the_pool_ends_in_order(scene, host, end, code):
    run = scene(host)
    before = run.wait_for_workers()
    os.kill(run.worker_pid(0), signal.SIGKILL)
    name = next(name for name in before if name.startswith("rollout-0"))
    until(
        lambda: run.incarnations().get(name, before[name]) != before[name], "the killed worker came back", within_s=120
    )
    run.note_processes()
    after = run.incarnations()
    assert {k: v for k, v in after.items() if k != name} == {k: v for k, v in before.items() if k != name}
    run.learner.finish() if end == "run" else run.pool.send_signal(signal.SIGTERM)
    assert run.pool.wait(timeout=150) == code, run.said()
    assert "worker rollout-0" in run.said() and "Restart 1 of at most" in run.said()
    until(lambda: not run.survivors(), run.survivors, within_s=90)


def test_sigterm_stops_the_workers_and_all_the_pool_started(scene):
    run = scene("process", **{"rollout.workers": "1"})
    run.wait_for_workers(1)
    run.pool.send_signal(signal.SIGTERM)
    assert run.pool.wait(timeout=150) == 128 + signal.SIGTERM, run.said()
    until(lambda: not run.survivors(), run.survivors, within_s=90)


@pytest.mark.parametrize("host", HOSTS)
def test_a_second_signal_ends_a_pool_at_once_that_waits_for_a_worker(scene, host):
    """A stopped worker is waited for 10 s, and Ray for longer."""
    run = scene(host, **{"rollout.workers": "1"})
    run.wait_for_workers(1)
    os.kill(run.worker_pid(0), signal.SIGSTOP)
    run.pool.send_signal(signal.SIGINT)
    until(lambda: "SIGINT: the workers end" in run.said(), run.said, within_s=60)
    run.note_processes()
    agents = {process.pid for process in run.survivors() if name_of(process).endswith("Agent")}
    began = time.monotonic()
    run.pool.send_signal(signal.SIGINT)
    assert run.pool.wait(timeout=60) == 128 + signal.SIGINT, run.said()
    assert time.monotonic() - began < 5.0, run.said()
    until(lambda: {process.pid for process in run.survivors()} <= agents, run.survivors, within_s=60)


@pytest.mark.parametrize("host", HOSTS)
def test_a_killed_pool_leaves_nothing_running(scene, host):
    run = scene(host, **{"rollout.workers": "1"})
    run.wait_for_workers(1)
    # Ray's own two agents end by themselves a minute after their raylet was killed; all else goes at once.
    agents = {process.pid for process in run.survivors() if name_of(process).endswith("Agent")}
    run.pool.kill()
    until(lambda: {process.pid for process in run.survivors()} <= agents, run.survivors, within_s=120)


def test_a_reward_that_cannot_be_loaded_fails_the_run_without_restarts(scene):
    run = scene("process", **{"reward.function": "no_such_package.rewards:f"})
    assert run.pool.wait(timeout=150) == 1
    assert "ModuleNotFoundError" in run.said() and "A restart cannot help" in run.said()
