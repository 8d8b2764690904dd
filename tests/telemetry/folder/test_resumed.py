"""What a resume may change is reported and kept; what the run is made of may not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.checks.dtypes import with_dtypes
from asyncrl.config import load_config, read_config
from asyncrl.digests import learner_digest
from asyncrl.errors import ConfigError, RunFolderError
from asyncrl.schema import Config
from asyncrl.sft.rules import load_sft
from asyncrl.storage import sealed
from asyncrl.telemetry.folder.run_folder import begin_settings, changes_in, prepare_run_folder


@pytest.fixture
def task(tmp_path: Path) -> list[str]:
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(3 << 20))
    data.write_text('{"prompt": "a"}\n')
    return [f"model.path={model}", f"data.path={data}", "reward.function=r.py:f", f"run.dir={tmp_path / 'run'}"]


def resumed(task: list[str], *changes: str) -> Config:
    return load_config([*task, "resume=auto", *changes])


def begun(config: Config, run_id: str) -> Path:
    """As a start whose learner began."""
    folder = prepare_run_folder(config, run_id)
    begin_settings(config, {})
    return folder


def test_each_changed_setting_is_one_line_and_stays_at_the_head_of_the_config(task: list[str], tmp_path: Path) -> None:
    prepare_run_folder(load_config(task), "one")
    assert changes_in(resumed(task)) == []
    assert changes_in(resumed(task, "replay.address=tcp://127.0.0.1:5999", "replay.keys=elsewhere")) == []
    first = resumed(task, "learner.lr=1e-4", "learner.groups_per_step=4")
    lines = changes_in(first)
    assert lines == ["learner.lr: 1e-06 -> 0.0001", "learner.groups_per_step: 32 -> 4"]
    folder = begun(first, "two")
    (folder / "ckpt" / "step_50").mkdir(parents=True)
    (folder / "ckpt" / "step_50" / "state.json").write_text("{}")
    sealed.seal(folder / "ckpt" / "step_50")
    (folder / "ckpt" / "latest").symlink_to("step_50")
    begun(resumed(task, "learner.lr=1e-4", "learner.groups_per_step=4", "loss=ppo"), "three")
    text = (folder / "config.yaml").read_text().splitlines()
    assert text[:2] == [f"# resumed from the start: {line}" for line in lines]
    history = [line for line in text if line.startswith("# resumed")]
    assert len(history) > 2 and all(line.startswith("# resumed from step_50: loss.") for line in history[2:])
    config = read_config(folder / "config.yaml")
    assert (config.learner.lr, config.learner.groups_per_step) == (1e-4, 4)


def test_a_resume_whose_learner_did_not_begin_leaves_the_settings_as_they_were(task: list[str]) -> None:
    before = (prepare_run_folder(load_config(task), "one") / "config.yaml").read_text()
    folder = prepare_run_folder(resumed(task, "learner.lr=1e-4"), "two")
    assert (folder / "config.yaml").read_text() == before and changes_in(resumed(task)) == []
    text = (begun(resumed(task, "learner.lr=1e-5"), "three") / "config.yaml").read_text()
    assert [line for line in text.splitlines() if line.startswith("# resumed")] == [
        "# resumed from the start: learner.lr: 1e-06 -> 1e-05"
    ]


def test_a_fork_says_from_which_checkpoint_it_was_begun(
    task: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / "other" / "ckpt" / "step_8"
    folder = prepare_run_folder(load_config([*task, f"resume={theirs}"]), "one")
    assert (folder / "config.yaml").read_text().startswith(f"# resumed from {theirs}\n")
    text = (begun(load_config([*task, "resume=run/ckpt/left_step_12"]), "two") / "config.yaml").read_text()
    assert text.startswith(f"# resumed from {theirs}\n# resumed from left_step_12\n")


def test_a_config_of_another_version_is_not_taken_for_one_that_cannot_be_read(task: list[str]) -> None:
    path = prepare_run_folder(load_config(task), "one") / "config.yaml"
    path.write_text("learner:\n  colour: red\n")
    with pytest.raises(ConfigError, match=r"does not fit this version of asyncrl.*colour") as refused:
        read_config(path)
    assert "cannot be read" not in str(refused.value) and "\n" not in str(refused.value)
    path.write_text("- a list\n")
    with pytest.raises(ConfigError, match=r"cannot be read: it holds a list, not settings\. Restore it"):
        read_config(path)


def test_a_setting_that_there_was_not_when_the_run_began_had_its_default(task: list[str], tmp_path: Path) -> None:
    path = prepare_run_folder(load_config(task), "one") / "config.yaml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith(("  window:", "  save_timeout_s:"))]
    path.write_text("\n".join(lines))
    assert changes_in(resumed(task)) == []
    assert changes_in(resumed(task, "replay.window=2")) == ["replay.window: 0 -> 2"]


def test_a_file_of_the_user_s_that_was_changed_is_a_line(task: list[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def loss(inputs): return -inputs.advantages * inputs.learner_logprobs\n")
    task += ["loss=custom", f"loss.function={mine}:loss"]
    folder = prepare_run_folder(load_config(task), "one")
    before = learner_digest(load_config(task))
    assert changes_in(resumed(task)) == []
    mine.write_text("def loss(inputs): return -inputs.learner_logprobs\n")
    (line,) = changes_in(resumed(task))
    assert line.startswith(f"the code of loss.function ({mine}:loss): ")
    assert learner_digest(load_config(task)) != before
    prepare_run_folder(resumed(task), "two")
    assert changes_in(resumed(task)) == [line], "its learner has not begun"
    begin_settings(resumed(task), {})
    assert (folder / "config.yaml").read_text().startswith(f"# resumed from the start: {line}\n")
    assert changes_in(resumed(task)) == []


@pytest.mark.parametrize("other", ["model", "data", "seed", "shuffle"])
def test_what_the_run_is_made_of_is_refused_by_what_is_in_it(task: list[str], tmp_path: Path, other: str) -> None:
    folder = prepare_run_folder(load_config(task), "one")
    before = (folder / "config.yaml").read_text()
    changes: tuple[str, ...] = ()
    if other == "model":
        with (tmp_path / "model" / "model.safetensors").open("r+b") as weights:
            weights.seek(-5, 2)
            weights.write(b"x")
    elif other == "data":
        with (tmp_path / "rows.jsonl").open("a") as rows:
            rows.write('{"prompt": "b"}\n')
    else:
        changes = {"seed": ("seed=5",), "shuffle": ("data.shuffle=false",)}[other]
    with pytest.raises(RunFolderError, match="is not what the run in") as refused:
        prepare_run_folder(resumed(task, *changes), "two")
    assert "run.name" in str(refused.value)
    assert (folder / "config.yaml").read_text() == before


def test_a_model_that_was_moved_is_the_same_one(task: list[str], tmp_path: Path) -> None:
    prepare_run_folder(load_config(task), "one")
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    prepare_run_folder(resumed(task, f"model.path={tmp_path / 'elsewhere'}"), "two")


def test_a_config_that_cannot_be_read_is_refused_by_name(task: list[str], tmp_path: Path) -> None:
    folder = prepare_run_folder(load_config(task), "one")
    (folder / "config.yaml").write_text("seed: [")
    with pytest.raises(RunFolderError, match=r"config\.yaml cannot be read"):
        changes_in(resumed(task))


@pytest.mark.parametrize(
    ("change", "another"),
    [
        ("learner.lr=1e-4", True),
        ("learner.groups_per_step=4", True),
        ("loss=ppo", True),
        ("replay.max_staleness=8", True),
        ("learner.weight_decay=0.1", True),
        ("learner.beta1=0", True),
        ("learner.steps=500", False),
        ("learner.save_every=5", False),
        ("learner.ranks=2", False),
        ("replay.wait_timeout_s=60", False),
        ("rollout.workers=3", False),
    ],
)
def test_a_history_is_another_one_when_its_updates_are(task: list[str], change: str, another: bool) -> None:
    assert (learner_digest(load_config(task)) != learner_digest(load_config([*task, change]))) == another


@pytest.mark.parametrize(
    ("loss", "digest"), [("dppo_tv loss.behavior_kl=0.001", "53e315748ed1b04c"), ("ppo", "d3a4cb467bcb678b")]
)
def test_a_run_of_before_resumes_with_its_own_history(loss: str, digest: str) -> None:
    """Of runs that lie on disks somewhere: a setting that is new belongs into `LATER`."""
    given = ["model.path=m", "data.path=d.jsonl", "reward.function=r.py:score", *f"loss={loss}".split()]
    assert learner_digest(with_dtypes(load_config(given), learner="cpu")) == digest


def test_with_a_schedule_that_ends_the_number_of_steps_counts(task: list[str]) -> None:
    first, second = (load_config([*task, "learner.schedule=linear", f"learner.steps={n}"]) for n in (100, 200))
    assert learner_digest(first) != learner_digest(second)


def test_a_rank_that_torchrun_starts_again_changes_no_dtype_that_was_left_to_auto(task: list[str]) -> None:
    for first in (load_config(task), load_sft([*task[:2], task[3] + "-sft"])):
        prepare_run_folder(first, "one")
        begin_settings(first, {"model.dtype": "float32"})
        assert [change.partition(":")[0] for change in changes_in(first)] == ["model.dtype"]
        settled = replace(first, model=replace(first.model, dtype="float32"))
        assert changes_in(first, settled) == []
        other = replace(first, learner=replace(first.learner, lr=2e-6))
        (line,) = changes_in(other, replace(other, model=settled.model))
        assert line.startswith("learner.lr: ")
