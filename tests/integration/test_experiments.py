"""The shipped experiments with a critic and with the KL in the reward, as the real system runs them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.integration.conftest import StartLocal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("experiment", "ranks", "names"),
    [
        ("ppo_gae", 2, ("critic/loss", "critic/target_mean", "critic/grad_norm", "advantage/std")),
        pytest.param(
            *("reinforce_pp", 1, ("kl/coef", "kl/in_reward", "kl/reference", "advantage/std")), marks=pytest.mark.long
        ),
    ],
)
def test_an_experiment_runs_to_its_end_with_its_numbers_in_every_row(
    start_local: StartLocal, experiment: str, ranks: int, names: tuple[str, ...]
) -> None:
    settings = {
        "experiment": experiment,
        "learner.ranks": ranks,
        "rollout.host": "process",
        "learner.save_every": 3,
        # The random model of this test is never right, and without its price nothing would be learned of 0.
        "reward.function": "asyncrl.rewards.exact_match:exact_match",
    }
    if experiment == "ppo_gae":  # It is resumed too: a critic has a state of its own.
        settings["critic.warmup_steps"] = 2
        first = start_local({**settings, "learner.steps": 3})
        assert first.finish(400) == 0, first.tail()
    again = start_local({**settings, "learner.steps": 6, "resume": "auto"})
    assert again.finish(400) == 0, again.tail()
    rows = again.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert all(math.isfinite(row[name]) for name in names)
    if experiment == "ppo_gae":
        assert [row["optim/lr"] > 0 for row in rows] == [False, False, True, True, True, True]
    else:
        assert rows[0]["kl/in_reward"] == pytest.approx(0.0, abs=1e-4)
        assert len({row["kl/coef"] for row in rows}) > 3
    assert Path(again.directory / "hf" / "config.json").exists()


def test_remax_compares_with_a_greedy_completion_that_travels_with_its_group(
    start_local: StartLocal, tmp_path: Path
) -> None:
    reward = tmp_path / "letters.py"
    reward.write_text("def letters(completion, row):\n    return {'score': len(completion) / 12, 'letters': 1.0}\n")
    settings = {"experiment": "remax", "rollout.host": "process", "learner.steps": 4}
    run = start_local({**settings, "reward.function": f"{reward}:letters"})
    assert run.finish(400) == 0, run.tail()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert 0 <= row["rewards/greedy_baseline"] <= 1 == row["rewards/letters"]
        assert row["advantage/std"] > 0
