"""The smoke variants of the recipes, as the real system runs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.config import read_settings
from asyncrl.quickstart.smoke import SMOKES
from asyncrl.storage.best import read_best
from tests.integration.conftest import LocalRun, begun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KEEPS_BEST = "dapo_math_17k"
LONG = {"gsm8k_ppo_critic", "rlhf_reward_model"}
"""What these have more than `gsm8k_grpo`, a critic and a reward model, other runs here have too."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start_smoke(cache: Path, tmp_path: Path) -> Iterator[Callable[[str], LocalRun]]:
    runs: list[LocalRun] = []

    def start(name: str) -> LocalRun:
        output, settings = tmp_path / "local.log", {"experiment": f"smoke/{name}", "run.dir": "run"}
        process = begun(output, "local", settings, env={"ASYNCRL_CACHE": str(cache)}, cwd=tmp_path)
        runs.append(LocalRun(tmp_path / "run", process, output))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in sorted(SMOKES)]
)
def test_a_smoke_variant_trains_and_evaluates_to_its_end(start_smoke: Callable[[str], LocalRun], name: str) -> None:
    run = start_smoke(name)
    assert run.finish(600) == 0, run.tail()
    rows = run.rows()
    steps = read_settings(run.directory / "config.yaml")["learner.steps"]
    assert steps >= 2 and [row["step"] for row in rows] == [*range(1, steps + 1)]
    assert all(math.isfinite(row["loss/total"]) for row in rows)
    assert any(row["optim/grad_norm"] > 0 for row in rows)
    measured = run.evaluations()
    assert measured and all(value == 0 for row in measured for key, value in row.items() if key.endswith("/failed"))
    assert (run.directory / "hf" / "config.json").is_file()
    best = read_best(run.directory / "ckpt")
    if name == KEEPS_BEST:
        assert best is not None and best.metric == "eval/aime24/accuracy" and best.step in (2, 3)
