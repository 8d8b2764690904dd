"""Every listening socket of a running `asyncrl local`."""

from __future__ import annotations

import time
from typing import Any

import pytest

from asyncrl.checks.machine import vllm_problem
from tests.integration.conftest import LocalRun, StartLocal
from tests.sockets import Listener, listeners, tree

pytestmark = [pytest.mark.slow, pytest.mark.unhurried, pytest.mark.timeout(600)]

SETTINGS = {"learner.steps": 200, "learner.ranks": 2, "rollout.workers": 2, "eval.every": 2, "eval.rows": 16}


def watched(run: LocalRun, step: int, timeout_s: float = 400.0) -> set[Listener]:
    """Whatever listened from the start until `step` was trained: some sockets live for a moment only."""
    found: set[Listener] = set()
    deadline = time.monotonic() + timeout_s
    while not any(row["step"] >= step for row in run.rows()):
        assert run.process.poll() is None and time.monotonic() < deadline, run.tail()
        found |= listeners(tree(run.process.pid))
        time.sleep(0.1)
    return found | listeners(tree(run.process.pid))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param(
            {"rollout.host": "process", "replay.shards": 1},
            [
                "-m asyncrl.replay ",
                "-m asyncrl.replay.shards",
                "-m asyncrl.learner.torchrun",
                "-m asyncrl.learner ",
                "--worker",
            ],
            id="process",
        ),
        pytest.param(
            {"rollout.host": "ray", "reward.host": "ray"},
            ["-m asyncrl.replay ", "-m asyncrl.learner.torchrun", "gcs_server", "raylet", "ray::RolloutWorker"],
            id="ray",
        ),
        pytest.param(
            {"rollout.host": "process", "engine": "vllm", "engine.tensor_parallel": 2, "engine.kv_cache_mb": 32}
            | {"learner.ranks": 1, "rollout.workers": 1},
            ["-m asyncrl.replay ", "-m asyncrl.learner.torchrun", "spawn_main"],
            id="vllm",
            marks=pytest.mark.skipif(bool(vllm_problem()), reason="engine=vllm is not installed"),
        ),
    ],
)
def test_nothing_of_a_local_run_listens_beyond_loopback(
    start_local: StartLocal, settings: dict[str, Any], expected: list[str]
) -> None:
    run = start_local(SETTINGS | settings)
    found = watched(run, step=4)
    for part in expected:
        assert any(part in each.process for each in found), f"{part!r} was not among {found}"
    beyond = {each for each in found if not each.on_loopback}
    assert not beyond, beyond
