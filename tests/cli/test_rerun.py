"""Settings that a rerun takes over, and settings that it may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.checks.parallel import ParallelDims
from asyncrl.checks.rules.learner import resolved_loss
from asyncrl.cli.rerun import changed_by, main, name_of, prepare, rerun_config, written
from asyncrl.config import config_to_dict, load_config, read_config
from asyncrl.digests import learner_digest
from asyncrl.errors import ConfigError, JournalError, RunFolderError
from asyncrl.replay.audit.rerun import read_surviving
from asyncrl.telemetry.folder.run_folder import write_config


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    paths = [f"{key}={tmp_path / 'model'}" for key in ("model.path", "data.path")]
    reward = "reward.function=asyncrl.rewards.exact_match:exact_match"
    recorded = [reward, "learner.lr=7e-5", "loss=ppo", "loss.kl_coef=0"]
    config = load_config([*paths, *recorded, "replay.max_staleness=3", "learner.steps=9"])
    write_config(config, tmp_path)
    return tmp_path


def test_a_rerun_without_settings_has_those_of_the_run(run: Path) -> None:
    config = rerun_config(run, [])
    assert (config.learner.lr, config.learner.steps, config.replay.max_staleness) == (7e-5, 9, 3)
    assert Path(config.run.dir) == run / "rerun-same"
    ppo = load_config(["model.path=x", "data.path=x", "reward.function=a:b", "loss=ppo", "loss.kl_coef=0"])
    assert resolved_loss(config.loss) == resolved_loss(ppo.loss)


def test_a_rerun_copies_nothing_and_takes_over_nothing_that_does_nothing(run: Path) -> None:
    """The run's copies lie there; and a run of an older version may have what would be refused today."""
    recorded = read_config(run / "config.yaml")
    recorded.learner.copy_to, recorded.learner.min_lr_ratio = f"file://{run}/copies", 0.1
    assert recorded.learner.schedule == "constant"
    write_config(recorded, run)
    config = rerun_config(run, [])
    assert (config.learner.copy_to, config.learner.min_lr_ratio) == ("", 0.0)
    assert changed_by(config, recorded) == ["learner.min_lr_ratio"]


def test_a_rerun_that_is_there_already_is_made_anew_with_the_setting_that_it_names(run: Path) -> None:
    prepare(rerun_config(run, []), "first")
    assert prepare(rerun_config(run, []), "first").is_dir(), "its ranks"
    with pytest.raises(RunFolderError, match=r"already holds this rerun\. To train it again, add overwrite=true"):
        prepare(rerun_config(run, []), "second")
    prepare(rerun_config(run, ["overwrite=true"]), "second")


def test_the_ranks_of_a_rerun_are_laid_out_as_in_the_run_where_there_are_as_many(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [f"{key}={run / 'model'}" for key in ("model.path", "data.path")]
    layout = [f"learner.{key}=2" for key in ("replicas", "sequence_parallel", "tensor_parallel", "expert_parallel")]
    write_config(load_config([*settings, "reward.function=a:b", "learner.ranks=8", *layout]), run)
    recorded = read_config(run / "config.yaml")
    assert changed_by(rerun_config(run, []), recorded) == []
    assert ParallelDims.of(rerun_config(run, []).learner, 8) == ParallelDims.of(recorded.learner, 8)
    one = rerun_config(run, ["learner.ranks=1"])
    assert "learner.ranks" in changed_by(one, recorded) and ParallelDims.of(one.learner, 1) == ParallelDims()
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a torchrun of the user's
    assert ParallelDims.of(rerun_config(run, []).learner, 2) == ParallelDims(shard=2)


def test_a_run_that_kept_what_was_evaluated_best_is_trained_again_without(run: Path) -> None:
    settings = [f"{key}={run / 'model'}" for key in ("model.path", "data.path", "eval.path")]
    best = ["learner.keep_best=eval/heldout/reward", "learner.keep_best_by=min", "eval.every=1", "learner.save_every=1"]
    write_config(load_config([*settings, "reward.function=a:b", *best]), run)
    assert changed_by(rerun_config(run, []), read_config(run / "config.yaml")) == []


def test_a_profiled_run_is_trained_again_without_and_for_fewer_steps(run: Path) -> None:
    settings = [f"{key}={run / 'model'}" for key in ("model.path", "data.path")]
    write_config(load_config([*settings, "reward.function=a:b", "learner.steps=9", "learner.profile=7:9"]), run)
    assert rerun_config(run, ["learner.steps=3"]).learner.profile == ""
    assert changed_by(rerun_config(run, []), read_config(run / "config.yaml")) == []


def test_batches_that_need_a_larger_replay_are_trained_again(run: Path) -> None:
    settings = [f"{key}={run / 'model'}" for key in ("model.path", "data.path")]
    large = ["learner.groups_per_step=4096", "rollout.group_size=64", f"replay.max_bytes={1 << 40}"]
    write_config(load_config([*settings, "reward.function=a:b", *large]), run)
    assert rerun_config(run, []).learner.groups_per_step == 4096


def test_a_group_replaces_all_recorded_settings_of_that_group(run: Path) -> None:
    config = rerun_config(run, ["loss=no_correction", "learner.lr=1e-3", "replay.max_staleness=1"])
    plain = load_config(["model.path=x", "data.path=x", "reward.function=a:b", "loss=no_correction"])
    assert config_to_dict(config)["loss"] == config_to_dict(plain)["loss"]
    assert (config.learner.lr, config.replay.max_staleness, config.learner.steps) == (1e-3, 1, 9)


def test_a_rerun_may_compile_what_the_run_did_not(run: Path) -> None:
    config = rerun_config(run, ["model.compile=true"])
    assert config.model.compile and learner_digest(config) == learner_digest(rerun_config(run, []))


@pytest.mark.parametrize(
    "override", ["rollout.group_size=2", "learner.groups_per_step=4", "model.path=other", "run.dir=x", "seed=3"]
)
def test_what_the_data_was_made_with_cannot_be_changed(run: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=f"a rerun cannot set {override.partition('=')[0]}"):
        rerun_config(run, [override])


def test_what_is_no_run_or_has_no_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        rerun_config(tmp_path, [])
    with pytest.raises(JournalError, match="has no journal"):
        read_surviving(tmp_path / "journal")


def test_ranks_are_not_started_and_no_folder_is_made_for_what_a_rerun_refuses(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(JournalError, match="has no journal"):
        main(run, ["learner.ranks=2"])
    assert not list(run.glob("rerun-*"))


def test_names_and_values_are_written_as_one_would_type_them() -> None:
    assert name_of([]) == name_of(["overwrite=true"]) == "same"
    assert name_of(["loss=ppo", "learner.lr=1e-3"]) == "loss-ppo-learner.lr-1e-3"
    long = [name_of([f"reference.path=/models/{'deep/' * 20}{name}"]) for name in ("a", "b")]
    assert len(set(long)) == 2 and all(len(f"rerun-{name}") == 64 for name in long)
    assert [written(value) for value in (None, True, 0.5, "a b", [1, "c"])] == ["null", "true", "0.5", "'a b'", "[1,c]"]


def test_a_rerun_that_is_compiled_is_not_called_one_without_other_settings(run: Path) -> None:
    recorded = read_config(run / "config.yaml")
    assert changed_by(rerun_config(run, ["model.compile=true"]), recorded) == ["model.compile"]
