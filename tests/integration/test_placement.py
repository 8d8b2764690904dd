"""What each process of a real run sees of the GPUs it was given. There need be none: torch counts 0 and computes on the
CPU, while the names go through Ray, torchrun and the pool as they would."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import StartLocal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SEES = re.compile(r"CUDA_VISIBLE_DEVICES=(GPU-\w+(?:,GPU-\w+)*)", re.MULTILINE)


def seen_in(log: Path) -> str:
    found = SEES.search(log.read_text())
    assert found, log.read_text()[-2000:]
    return found[1]


def seen_by(processes: list[psutil.Process]) -> set[str]:
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {value for name, value in process.environ().items() if name == "CUDA_VISIBLE_DEVICES"}
    return found


@pytest.mark.parametrize("host", ["ray", pytest.param("process", marks=pytest.mark.long)])
def test_no_two_processes_see_one_gpu(start_local: StartLocal, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0a,GPU-1b,GPU-2c,GPU-3d")
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")  # as other frameworks ask for
    run = start_local({"rollout.host": host, "rollout.workers": 2, "learner.ranks": 2, "learner.steps": 3})
    ranks, pool = set[str](), set[str]()
    deadline = time.monotonic() + 600
    while run.process.poll() is None:  # all its life: after its first step it may be over before anybody looks
        ranks |= seen_by(run.descendants("-m asyncrl.learner "))
        pool |= seen_by(run.descendants("-m asyncrl.rollout "))
        assert time.monotonic() < deadline, run.tail()
        time.sleep(0.25)
    assert run.finish(300) == 0, run.tail()
    assert ranks == {"GPU-0a,GPU-1b"} and pool - {"GPU-2c", "GPU-3d"} == {"GPU-2c,GPU-3d"}
    logs = run.directory / "logs"
    assert seen_in(logs / "learner.log") == "GPU-0a,GPU-1b"
    assert sorted(seen_in(logs / f"rollout-{number}.log") for number in (0, 1)) == ["GPU-2c", "GPU-3d"]
    said = run.output.read_text()
    assert "CUDA_VISIBLE_DEVICES=GPU-0a,GPU-1b" in said and "CUDA_VISIBLE_DEVICES=GPU-2c,GPU-3d" in said


def test_more_than_there_are_is_refused_before_anything_starts(
    start_local: StartLocal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    run = start_local({"rollout.workers": 2, "learner.ranks": 2})
    assert run.finish(120) == 2
    said = run.output.read_text()
    assert "learner.ranks=2 + rollout.workers=2 = 4 GPUs, but there are 2" in said, said
    assert (
        "The nearest setting that fits: learner.ranks=1 rollout.workers=1" in said
        and not (run.directory / "logs").exists()
    )
