"""The search, and the command around it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.cli.main import main
from asyncrl.cli.plan import as_object, feasible, left_over, setup_of, sorted_out
from asyncrl.config import load_config, settings_as_used, to_yaml
from asyncrl.errors import ConfigError
from asyncrl.planner.estimated import Workload, estimated_costs
from asyncrl.planner.given import Given
from asyncrl.planner.search import Effort, Search, Split
from asyncrl.telemetry.folder.resumed import CONFIG_FILE
from asyncrl.telemetry.reports.summary import METRICS_FILE
from tests.planner.test_calibration import PACED, write_run
from tests.planner.test_simulation import costs, setup

EFFORT = Effort(steps=10, warm_up=4, splits=3)
COSTS = (
    *("cost.tokens_per_s=1:50,8:300", "cost.length_mean=20", "cost.train_tokens_per_s=200", "cost.sync_s=0.1"),
    *("cost.environment_s=0.5", "cost.length_sigma=0.3"),
)


def test_the_split_that_keeps_both_sides_busy_is_found_and_deeper_than_needed_is_not_proposed() -> None:
    """8 sequences at 0.01 s: an engine makes 800 tokens/s. A rank trains 1,600: of 6 GPUs 2 learn and 4 generate."""
    told = costs(step_s=0.0, token_s=1 / 1600)
    search = Search(setup(0, max_sequences=8, groups_per_step=16), told, lambda most, engines: 32, EFFORT)
    plan = search.plan([Split(ranks=ranks, engines=6 - ranks) for ranks in range(1, 6)])
    assert plan.best.split == Split(ranks=2, engines=4)
    assert plan.best.outcome.tokens_per_s > 0.8 * 3200
    assert plan.best.pipeline_depth <= 3
    assert set(plan.sensitivity) >= {"engine step +25%", "train step -20%"}
    slower = plan.sensitivity["completion length +25%"].outcome
    assert slower.step_s > plan.best.outcome.step_s
    row = json.loads(json.dumps(as_object(plan, 6, "start")))
    assert row["best"]["engines"] == 4 and len(row["tried"]) == len(plan.tried)


def test_a_setting_is_simulated_once() -> None:
    search = Search(setup(0, max_sequences=8, max_staleness=1), costs(), lambda most, engines: 32, EFFORT)
    plan = search.plan([Split(ranks=ranks, engines=4 - ranks) for ranks in range(1, 4)])
    found = [(each.split, each.pipeline_depth, each.max_in_flight) for each in plan.tried]
    assert len(set(found)) == len(found)


def files(folder: Path) -> list[str]:
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "2+2?", "answer": "4"}) + "\n")
    code = folder / "reward.py"
    code.write_text("def score(completion, row):\n    return 1.0\n")
    return [f"data.path={rows}", "model.path=some/model", f"reward.function={code}:score"]


def test_the_command_prints_a_plan_that_dry_run_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["learner.groups_per_step=2", "rollout.group_size=2", "replay.max_staleness=1", "replay.pipeline_depth=0"]
    picture = tmp_path / "plan.svg"
    given = [*files(tmp_path), *small, f"run.dir={tmp_path / 'run'}"]
    assert main(["plan", *given, *COSTS, "gpus=4", "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "start it:  asyncrl local" in text
    assert "what the plan depends on" in text
    assert "<svg" in picture.read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("told", [True, False])
def test_a_plan_from_a_run_says_what_it_took_from_it(
    told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    small = ["learner.groups_per_step=2", "rollout.group_size=2", "replay.max_staleness=1", "replay.pipeline_depth=0"]
    config = load_config([*files(tmp_path), *small, f"run.dir={run}"])
    rows = write_run(run, setup_of(config), 8, PACED if told else replace(PACED, prompts=None))
    (run / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / CONFIG_FILE).write_text(to_yaml(settings_as_used(config)))
    assert main(["plan", "--from", str(run), "gpus=2"]) == 0
    said = capsys.readouterr()
    assert ("have no records of their engines' steps" in said.err, "one prompt" in said.out) == (not told, told)
    assert "repeats" not in said.err and sorted(each.name for each in tmp_path.glob("run*")) == ["run"]
    assert f"start it:  asyncrl local {run / CONFIG_FILE} " in said.out


def test_splits_are_those_that_could_be_started(tmp_path: Path) -> None:
    config = load_config([*files(tmp_path), "engine=vllm", "engine.tensor_parallel=2"])
    assert feasible(config, 6, 0.0) == [Split(ranks=ranks, engines=(6 - ranks) // 2) for ranks in (1, 2, 3, 4)]
    for gpus, gpu_gb, said in ((2, 0.0, "no split of 2"), (0, 0.0, "gpus=64"), (4, 80.0, "not a local folder")):
        with pytest.raises(ConfigError, match=said):
            feasible(config, gpus, gpu_gb)


def test_no_split_has_more_ranks_than_a_batch_has_sequences(tmp_path: Path) -> None:
    config = load_config([*files(tmp_path), "learner.groups_per_step=2", "rollout.group_size=2"])
    assert [split.ranks for split in feasible(config, 8, 0.0)] == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"(?s)no split of 8 GPUs .*learner\.lr"):
        feasible(replace(config, learner=replace(config.learner, lr=-1.0)), 8, 0.0)


@pytest.mark.parametrize("gpus", [0.0001, 0.5, 1.0])
def test_any_part_of_a_gpu_that_rewards_take_is_a_whole_one(tmp_path: Path, gpus: float) -> None:
    """The planner took the smallest for none, and its split was refused by the placement."""
    config = load_config([*files(tmp_path), "reward.host=ray", f"reward.gpus={gpus}"])
    assert [(split.ranks, split.engines) for split in feasible(config, 4, 0.0)] == [(1, 2), (2, 1)]


def test_no_split_has_more_engines_than_groups_in_flight_and_what_is_left_is_said(tmp_path: Path) -> None:
    small = ["learner.groups_per_step=2", "replay.max_staleness=1", "replay.pipeline_depth=0"]
    config = load_config([*files(tmp_path), *small])
    few, many = feasible(config, 5, 0.0)[0], feasible(config, 400, 0.0)[-1]
    assert (few.engines, many.engines) == (4, 4)
    assert left_over(config, few, 5) == []
    (said,) = left_over(config, many, 400)
    assert many.ranks == 16 and said.startswith("380 GPUs would be unused: at most 4 groups") and "Raise" in said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["gpus=1"], "2 or more"),
        (["gpus=many"], "2 or more"),
        (["cost.speed=3"], "cost.speed is not a cost"),
        (["cost.sync_s=-1"], "not a number of 0 or more"),
        (["cost.turns=nan"], "not a number of 0 or more"),
        (["cost.step_s=1e308"], "more than 604800"),
        (["cost.environment_sigma=11"], "more than 10,"),
        (["cost.turns=2000"], "more than 1000,"),
    ],
)
def test_what_is_no_cost_is_refused_with_the_way_out(wrong: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sorted_out(wrong)


def test_what_nobody_says_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="no value is known for cost"):
        Given().costs(100, measured=False)
    with pytest.raises(ConfigError, match="sequences:tokens/s"):
        Given(tokens_per_s="fast").costs(100, measured=True)
    for rate in ("nan", "inf", "0"):
        with pytest.raises(ConfigError, match="above 0 tokens/s"):
            Given(tokens_per_s=f"1:{rate}").costs(100, measured=True)
    assert Given().costs(100, measured=True).lengths.mean == 50


def test_gpus_and_costs_are_told_from_settings() -> None:
    gpus, given, settings = sorted_out(["gpus=8", "learner.lr=1", "cost.turns=3", "seed=2"])
    assert (gpus, given, settings) == (8, Given(as_given={"turns": 3}), ["learner.lr=1", "seed=2"])


SMALL = ["learner.groups_per_step=2", "rollout.group_size=2", "replay.max_staleness=1", "replay.pipeline_depth=0"]


def test_a_recipe_is_planned_without_its_data_and_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "experiment=gsm8k_grpo", *SMALL, "rollout.max_new_tokens=32", "gpus=4"]) == 0
    said = capsys.readouterr().out
    assert "estimated, not measured: 1.54 billion parameters" in said and "half of rollout.max_new_tokens" in said
    assert "start it:  asyncrl local experiment=gsm8k_grpo" in said
    assert "model.path=Qwen/Qwen2.5-1.5B-Instruct data.path=gsm8k/train.parquet" in said


def test_size_and_lengths_are_enough_for_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["model=3b", "cost.length_mean=20", "rollout.max_new_tokens=32", *SMALL[2:], "gpus=8"]
    given += ["learner.groups_per_step=4", "rollout.group_size=2", "learner.max_tokens_per_microbatch=4096"]
    assert main(["plan", *given, "cost.gpu_gb=80"]) == 0
    said = capsys.readouterr().out
    assert "3.09 billion parameters" in said and "half of" not in said and "completions of 20 tokens" in said
    assert main(["plan", *given, "cost.gpu_gb=16"]) == 2
    assert "no split of 8 GPUs can be started: with learner.ranks=" in capsys.readouterr().err


def test_costs_that_are_given_replace_the_estimate() -> None:
    work = Workload(
        parameters=10**9, kv_values_per_token=1, length=100, prompt=100, tensor_parallel=1, recomputed=False
    )
    by_hand = Given.of({"train_tokens_per_s": "7"}).as_texts()
    costs = Given.of(estimated_costs(work) | by_hand).costs(200, measured=False)
    assert costs.token_s == pytest.approx(1 / 7)
    # 2 bytes per parameter at 60 % of the bandwidth, and the engine's own 4 ms.
    assert costs.decode.step_s(1) == pytest.approx(2e9 / (0.6 * 3.35e12) + 0.004, rel=1e-3)


def test_what_is_not_simulated_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *files(tmp_path), *COSTS, "gpus=4", "replay.admission=sample"]) == 2
    assert "replay.admission=group" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("learner:\n  rows_per_step: 32\n")
    assert main(["plan", "--from", str(tmp_path), "gpus=4"]) == 2
    assert "is a run of asyncrl sft" in capsys.readouterr().err
