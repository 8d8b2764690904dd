from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from asyncrl.config import config_dir, config_from_dict, config_groups, config_keys, config_to_dict, load_config
from asyncrl.digests import learner_digest, run_digest
from tests.refusals import REQUIRED


def test_what_one_caller_sets_or_changes_no_other_gets() -> None:
    plain = config_to_dict(load_config(REQUIRED))
    for given in (["learner.lr=0.9", "data.where={level: 3}", "loss=ppo"], ["learner.lr=0.8"]):
        config = load_config([*REQUIRED, *given])
        config.data.where["level"] = config.loss.preset = "changed"
        config.engine.urls.append("http://127.0.0.1:1")
    assert config_to_dict(load_config(REQUIRED)) == plain
    assert load_config([*REQUIRED, "loss=ppo"]).loss.preset == "ppo"


GOES_WITH = {
    "engine=server": ["engine.urls=[http://127.0.0.1:8000]", "rollout.workers=1"],
    "engine=sglang": ["engine.urls=[http://127.0.0.1:8000]", "rollout.workers=1"],
    "loss=vtrace": ["advantage=vtrace"],
    "advantage=vtrace": ["loss=vtrace"],
    "loss=opo": ["advantage=opo"],
    "loss=remax": ["advantage=remax"],
    "advantage=gdpo": ["advantage.components={correct: 1, short: 0.5}"],
    "reward=dapo": ["reward.function="],
    "loss=reinforce_pp": ["advantage=reinforce_pp"],
    "loss=reinforce_pp_baseline": ["advantage=reinforce_pp_baseline"],
    "loss=custom": ["loss.function=mine.py:loss"],
    "advantage=custom": ["advantage.function=mine.py:advantages"],
}
"""Choices that are refused without their other half, or without files of the user's."""


@pytest.mark.parametrize(
    ("group", "name"),
    [
        (group, file.stem)
        for group in config_groups()
        if group != "experiment"
        for file in sorted(config_dir().glob(f"{group}/*.yaml"))
    ],
)
def test_every_shipped_config_composes_and_passes_the_checks(group: str, name: str) -> None:
    """Experiments, which are made of these, in test_cli.py and test_recipes.py, as `--dry-run` does."""
    config = load_config([f"{group}={name}", *REQUIRED, *GOES_WITH.get(f"{group}={name}", [])])
    assert config.model.path == "m"


def test_settings_of_one_run_are_not_those_of_the_next_that_is_read() -> None:
    plain = config_to_dict(load_config(REQUIRED))
    required = {"model": {"path": plain["model"]["path"]}, "data": {"path": plain["data"]["path"]}}
    required |= {"reward": {"function": plain["reward"]["function"]}}
    usual = config_to_dict(config_from_dict(required))
    other = config_from_dict(required | {"seed": 5, "environment": {"args": {"a": 1}}, "engine": {"urls": ["a"]}})
    other.environment.args["b"] = other.engine.urls[0] = "changed"
    assert other.seed == 5 and config_to_dict(config_from_dict(required)) == usual


@pytest.mark.parametrize("name", ["grpo", "grpo_std", "rloo", "opo", "reinforce_pp_baseline"])
def test_groups_of_equal_rewards_may_be_dropped_where_they_teach_nothing(name: str) -> None:
    config = load_config([*REQUIRED, f"advantage={name}", "rollout.drop_zero_variance=true"])
    assert config.rollout.drop_zero_variance


@pytest.mark.parametrize("experiment", ["quickstart", "remax", "ppo_gae"])
def test_an_experiment_leaves_the_choice_between_synchronous_and_asynchronous_open(experiment: str) -> None:
    for replay, bounds in (("sync", (0, 0)), ("async", (4, 2))):
        config = load_config([f"experiment={experiment}", f"replay={replay}", *REQUIRED])
        assert (config.replay.max_staleness, config.replay.pipeline_depth) == bounds


def test_every_config_folder_has_the_default_that_config_yaml_names() -> None:
    assert set(config_groups()) == {
        *("model", "loss", "advantage", "data", "environment", "reward"),
        *("engine", "replay", "weights", "learner", "rollout", "experiment"),
    }


def test_settings_stay_few_and_flat() -> None:
    keys = config_keys()
    assert len(keys) == len(set(keys)) <= 244
    assert max(key.count(".") for key in keys) <= 2


def test_config_keys_name_every_leaf_of_the_config() -> None:
    leaves: list[str] = []

    def walk(settings: dict[str, object], prefix: str) -> None:
        for name, value in settings.items():
            if isinstance(value, dict) and value:  # an empty one is a free-form setting
                walk(value, f"{prefix}{name}.")
            else:
                leaves.append(f"{prefix}{name}")

    walk(config_to_dict(load_config(REQUIRED)), "")
    assert leaves == config_keys()


def test_the_digest_ignores_what_differs_between_machines() -> None:
    here = load_config([*REQUIRED, "model.path=/a/m"])
    there = load_config(
        [*REQUIRED, "model.path=/b/m", "data.path=/c/d.jsonl", "engine.threads=4", "run.dir=x", "rollout.workers=3"]
    )
    assert run_digest(here) == run_digest(there)


@pytest.mark.parametrize(
    "change",
    [
        *("seed=1", "rollout.temperature=0.5", "replay.max_staleness=5", "learner.groups_per_step=16"),
        *("model.path=o", "model.lora_rank=8", "model.lora_alpha=8", "advantage=remax"),
        *("model.renderer=default", "model.chat.enable_thinking=false"),
    ],
)
def test_the_digest_changes_with_every_shared_setting(change: str) -> None:
    given = [*REQUIRED, "model.lora_rank=4"]
    assert run_digest(load_config(given)) != run_digest(load_config([*given, change]))


def test_importing_the_config_loads_no_torch() -> None:
    code = "import sys, asyncrl.config; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=150).returncode == 0


def test_a_setting_that_is_new_leaves_the_digests_of_the_runs_before_it_as_they_were() -> None:
    """Or each would resume as a branch, of another history. A new setting of the learner belongs into `LATER`."""
    usual = load_config(["model.path=m", "data.path=d", "reward.function=r.py:f"])
    assert learner_digest(usual) == "208af0d38bbe6ef8"
    for learner in (replace(usual.learner, optimizer="adamw_8bit"), replace(usual.learner, router_replay=True)):
        assert learner_digest(replace(usual, learner=learner)) != learner_digest(usual)
