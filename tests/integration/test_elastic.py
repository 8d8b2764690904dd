"""A second pool of workers joins a running job and leaves it again; a second learner is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli.processes.ports import free_port
from tests.integration.conftest import LEISURELY, LocalRun, StartLocal, begun
from tests.integration.test_loop import assert_conserved, assert_trained_once, ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 100_000


def makers(run: LocalRun) -> list[str]:
    """Workers of the groups in `samples.jsonl`, in order."""
    return [row["worker"] for row in run.rows("samples")]


def test_other_pools_and_a_second_learner_are_refused_and_a_pool_joins_a_running_job_and_leaves_it_and_nothing_is_lost(
    start_local: StartLocal, tiny_task: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "leisurely.py").write_text(LEISURELY)
    settings = {
        "reward.function": f"{tmp_path}/leisurely.py:score",
        "rollout.host": "process",
        "rollout.workers": "1",
        "rollout.max_in_flight": "24",
        "replay.address": f"tcp://127.0.0.1:{free_port()}",
        "learner.steps": str(STEPS),
    }
    run = start_local(settings)
    run.wait_for_step(3, 300)
    shared = tiny_task | settings | {"run.dir": str(run.directory)}
    the_run_does_not_notice_pools_that_are_refused(run, shared, tmp_path)
    the_run_does_not_notice_a_learner_that_is_refused(run, shared)
    first = set(makers(run))
    assert len(first) == 1
    pool = begun(tmp_path / "second.log", "rollout", shared)
    try:
        run.until(lambda: len(set(makers(run))) == 2, "the second pool's groups were trained")
        (second,) = set(makers(run)) - first
        # The metrics of a step are of its end, or of the step before.
        run.until(lambda: run.rows()[-1]["replay/workers"] == 2, "both workers were counted")
        assert (run.directory / "logs" / "rollout-1.0.log").exists(), "the pools share no log"
        pool.send_signal(signal.SIGTERM)
        assert pool.wait(200) == 128 + signal.SIGTERM
    finally:
        pool.kill()
        pool.wait()
    left = run.rows()[-1]["step"]
    run.until(lambda: run.rows()[-1]["step"] >= min(left + 4, STEPS - 1), "training went on after it left")
    run.until(lambda: run.rows()[-1]["replay/workers"] == 1, "one worker was counted")
    run.until(lambda: second not in makers(run)[-4:], "what it had left to train was trained")
    run.stop()
    for row in run.rows():
        assert_conserved(row)
    assert_trained_once(ledger(run))
    # Its assignments went to the other pool. What had waited too long meanwhile was dropped as such, and counted.
    assert {event["reason"] for event in ledger(run) if event["event"] == "dropped"} <= {"stale"}


def the_run_does_not_notice_pools_that_are_refused(run: LocalRun, shared: dict[str, str], folder: Path) -> None:
    """Of another model, and of another tokenizer."""
    here = Path(shared["model.path"])
    named, other = folder / "named", folder / "other" / here.name
    for copy in (named, other):
        shutil.copytree(here, copy)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"1":', '"x":').replace('"7":', '"1":').replace('"x":', '"7":'))
    for model, said in ((named, "was started with other settings"), (other, "has another tokenizer")):
        log = folder / f"{model.name}.log"
        pool = begun(log, "rollout", shared | {"model.path": str(model)})
        try:
            assert pool.wait(300) == 1, log.read_text()
        finally:
            pool.kill()
            pool.wait()
        assert said in log.read_text() and "A restart cannot help" in log.read_text()
    run.until(lambda: run.rows()[-1]["replay/workers"] == 1, "one worker was counted")
    run.wait_for_step(run.rows()[-1]["step"] + 3, 200)


def the_run_does_not_notice_a_learner_that_is_refused(run: LocalRun, shared: dict[str, str]) -> None:
    ranks = [
        each for each in run.descendants("-m asyncrl.learner ") if "asyncrl.learner.torchrun" not in each.cmdline()
    ]
    assert len(ranks) == 1
    settings = [f"{key}={value}" for key, value in shared.items()]
    done = subprocess.run(
        ["bash", "launchers/learner.sh", *settings, "resume=auto"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHON": sys.executable},
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode != 0 and f"has a learner that is alive: a learner rank, pid {ranks[0].pid}." in done.stderr
    run.wait_for_step(run.rows()[-1]["step"] + 3, 200)
