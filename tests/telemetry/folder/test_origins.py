"""`config.yaml` of a run folder has the origin of each value, and loads as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from asyncrl.cli.arguments.settings_file import with_files
from asyncrl.config import by_key, load_config, read_config
from asyncrl.telemetry.folder.origins import FromFile, commented, origins
from asyncrl.telemetry.folder.run_folder import write_config

GIVEN = ["model.path=m", "data.path=d.jsonl", "reward.function=r.py:score"]


def behind(text: str) -> dict[str, str]:
    """Dotted key -> comment, by indentation alone."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in text.splitlines():
        name, colon, _ = line.partition(":")
        depth = (len(name) - len(name.lstrip())) // 2
        if colon and not line.lstrip().startswith(("-", "#")):
            above = [*above[:depth], name.strip()]
            found[".".join(above)] = line.partition("  # ")[2]
    return {key: origin for key, origin in found.items() if origin}


def test_each_value_says_where_it_came_from_and_is_the_same_without(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("learner: {lr: 2.0e-6, steps: 7}\n")
    typed = [*GIVEN, "experiment=ppo_gae", str(file), "eval.path=e.jsonl", "learner.steps=9", "loss.clip_low=0.1"]
    typed += [
        "run.dir='" + "a long name " * 12 + "x'",
        "engine=vllm",
        "engine.vllm={gpu_memory_utilization: 0.5}",
        "rollout.filters=[f.py:a]",
    ]
    overrides = with_files(typed)
    config = load_config(overrides)
    write_config(config, tmp_path, ["# resumed from step_1: learner.lr: 1 -> 2"], overrides)
    text = (tmp_path / "config.yaml").read_text()
    came = behind(text)
    assert came["learner.lr"] == str(file)
    assert came["learner.steps"] == came["model.path"] == came["rollout.filters"] == "command line"
    assert came["loss.clip_low"] == "command line"
    assert came["loss.clip_high"] == "preset ppo" and came["loss.preset"] == "configs/loss/ppo.yaml"
    assert came["advantage.lam"] == came["critic.lr"] == "configs/experiment/ppo_gae.yaml"
    assert came["rollout.group_size"] == "configs/experiment/quickstart.yaml"
    assert came["advantage.estimator"] == "configs/advantage/gae.yaml"
    assert came["seed"] == came["learner.device"] == "default"
    settings = by_key(yaml.safe_load(text))
    silent = {key for key in settings if key not in came and key not in ("run.dir", "engine.vllm")}
    assert silent == set(), "one is followed by no comment"
    assert read_config(tmp_path / "config.yaml").run.dir == config.run.dir
    write_config(config, tmp_path)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == yaml.safe_load(text)


def test_what_is_typed_wins_over_an_experiment_and_its_choices_over_the_defaults() -> None:
    came = origins([*GIVEN, "experiment=ppo_gae", "loss=cispo", "replay=sync", "critic.lr=1"], "cispo")
    assert came["loss.preset"] == "configs/loss/cispo.yaml"
    assert came["reward.function"] == "command line"
    assert origins(["experiment=quickstart"], "dppo_tv")["reward.function"] == "configs/reward/exact_match.yaml"
    assert came["replay.max_staleness"] == "configs/replay/sync.yaml"
    assert came["critic.lr"] == "command line" and came["critic.warmup_steps"] == "configs/experiment/ppo_gae.yaml"


@pytest.mark.parametrize("name", ["a.yaml", "with # hash.yaml", "two\nlines\x1b[2J.yaml"])
def test_a_comment_changes_no_value_whatever_the_values_and_the_file_are_called(name: str) -> None:
    values = {
        "plain": "a b " * 40,
        "hash": "x # y",
        "lines": "one\n\ntwo\n",
        "list": ["a", {"b": "c"}],
        "none": [],
        "empty": {},
        "inner": {"deep": {"text": "é: 'q'", "number": 1.5e-7}, "last": None},
    }
    source = FromFile.of("x=1", name).file
    for style in (None, "|", '"'):
        text = yaml.safe_dump(values, sort_keys=False, default_style=style)
        said = commented(text, dict.fromkeys([*values, "inner.deep"], source))
        assert yaml.safe_load(said) == values and said.count(f"# {source}") == 9
