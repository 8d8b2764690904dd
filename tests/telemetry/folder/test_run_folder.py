from __future__ import annotations

import errno
import json
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest

from asyncrl.config import load_config
from asyncrl.errors import DiskFullError, RunFolderError
from asyncrl.schema import Config
from asyncrl.storage.checkpoints import begin_branch, proven
from asyncrl.telemetry.folder.run_folder import (
    origin_of,
    owner_of,
    prepare_run_folder,
    redacted,
    still_of,
)
from asyncrl.telemetry.folder.tenants import occupied


@cache
def composed(*overrides: str) -> Config:
    return load_config(["model.path=m", "data.path=d", "reward.function=r.py:f", *overrides])


def config_for(folder: Path, *overrides: str) -> Config:
    config = deepcopy(composed(*overrides))
    config.run.dir = str(folder)
    return config


def test_a_new_folder_gets_logs_and_the_resolved_config(tmp_path: Path) -> None:
    folder = prepare_run_folder(config_for(tmp_path / "a", "seed=5"), "one")
    assert (folder / "logs").is_dir()
    assert "seed: 5" in (folder / "config.yaml").read_text()


def test_every_process_of_the_same_run_finds_the_folder_prepared(tmp_path: Path) -> None:
    config = config_for(tmp_path / "a", "overwrite=true")
    (prepare_run_folder(config, "one") / "metrics.jsonl").write_text("kept\n")
    assert (prepare_run_folder(config, "one") / "metrics.jsonl").read_text() == "kept\n"


def test_a_folder_of_an_earlier_run_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    prepare_run_folder(config_for(tmp_path / "a"), "one")
    with pytest.raises(RunFolderError) as refused:
        prepare_run_folder(config_for(tmp_path / "a"), "two")
    assert all(way in str(refused.value) for way in ("resume=auto", "overwrite=true", "run.name"))


def test_resume_keeps_what_is_in_the_folder(tmp_path: Path) -> None:
    folder = prepare_run_folder(config_for(tmp_path / "a"), "one")
    (folder / "metrics.jsonl").write_text("kept\n")
    prepare_run_folder(config_for(tmp_path / "a", "resume=auto"), "two")
    assert (folder / "metrics.jsonl").read_text() == "kept\n"


def test_a_resume_is_another_start_of_the_same_run_and_overwrite_begins_another_run(tmp_path: Path) -> None:
    folder = prepare_run_folder(config_for(tmp_path / "a"), "one")
    (folder / "logs" / "stop").touch()
    prepare_run_folder(config_for(tmp_path / "a", "resume=auto"), "two")
    assert (owner_of(folder), origin_of(folder)) == ("two", "one")
    assert not (folder / "logs" / "stop").exists(), "the request to stop was for the start before"
    prepare_run_folder(config_for(tmp_path / "a", "overwrite=true"), "three")
    assert (owner_of(folder), origin_of(folder)) == ("three", "three")
    (folder / "run.json").write_text('{"run_id": "old"}')  # as earlier versions wrote it
    assert origin_of(folder) == "old"


def test_a_fork_that_died_before_its_models_were_loaded_does_not_silently_begin_with_the_model(tmp_path: Path) -> None:
    named = str(tmp_path / "old" / "ckpt" / "step_6")
    folder = prepare_run_folder(config_for(tmp_path / "a", f"resume={named}"), "one")
    with pytest.raises(RunFolderError, match=f"was begun from {named} .* Continue with resume={named},"):
        proven(folder, "auto", print)
    prepare_run_folder(config_for(tmp_path / "a", "resume=auto"), "two")
    with pytest.raises(RunFolderError, match=f"was begun from {named} "):
        proven(folder, "auto", print)
    prepare_run_folder(config_for(tmp_path / "a", "overwrite=true"), "three")
    assert proven(folder, "auto", print) is None


def checkpoint_of(run: str, path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"run": run}))
    return path


def test_no_run_goes_on_from_another_one_s_checkpoint_beside_steps_of_its_own(tmp_path: Path) -> None:
    theirs = checkpoint_of("theirs", tmp_path / "b" / "ckpt" / "step_8")
    folder = prepare_run_folder(config_for(tmp_path / "a", f"resume={theirs}"), "one")
    fork = config_for(folder, f"resume={theirs}")
    prepare_run_folder(fork, "two")  # the first start trained nothing
    (folder / "metrics.jsonl").write_text('{"step": 9}\n')
    with pytest.raises(RunFolderError, match=r"has steps of its own.*step_8 is a checkpoint of another"):
        prepare_run_folder(fork, "three")
    assert owner_of(folder) == "two"
    begin_branch(folder / "ckpt", theirs, str(theirs), "two")
    prepare_run_folder(fork, "four")  # it is where this run began
    for own in (checkpoint_of("one", tmp_path / "copy" / "step_12"), folder / "ckpt" / "step_12"):
        prepare_run_folder(config_for(folder, f"resume={own}"), f"from {own}")


def test_overwrite_deletes_what_an_earlier_run_left(tmp_path: Path) -> None:
    folder = prepare_run_folder(config_for(tmp_path / "a"), "one")
    (folder / "metrics.jsonl").write_text("gone\n")
    (folder / "journal").mkdir()
    prepare_run_folder(config_for(tmp_path / "a", "overwrite=true"), "two", keep=("journal",))
    assert (folder / "journal").is_dir(), "the new run's replay server writes there already"
    prepare_run_folder(config_for(tmp_path / "a", "overwrite=true"), "three")
    assert not (folder / "journal").exists()
    assert not (folder / "metrics.jsonl").exists()


@pytest.mark.parametrize("setting", ["overwrite=true", "resume=auto", "seed=0"])
def test_the_logs_of_a_pool_that_was_started_first_do_not_make_a_folder_used(setting: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rollout-0.log").write_text("kept\n")
    prepare_run_folder(config_for(tmp_path, setting), "one")
    assert (tmp_path / "logs" / "rollout-0.log").read_text() == "kept\n"


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(RunFolderError, match="is a file"):
        prepare_run_folder(config_for(tmp_path / "a"), "one")


def test_a_folder_that_cannot_be_written_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunFolderError, match=r"cannot be written: .*another run\.dir"),
        occupied(config_for(tmp_path / "file" / "a")),
    ):
        pass

    def full(path: Path, *_: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(DiskFullError, match=r"run\.json needs .* bytes"):
            prepare_run_folder(config_for(tmp_path / "b"), "one")
    prepare_run_folder(config_for(tmp_path / "b"), "two")  # after space was freed


@pytest.mark.parametrize("setting", ["overwrite=true", "resume=auto", "seed=0"])
def test_a_folder_that_no_run_made_is_never_touched(setting: str, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="is not touched"):
        prepare_run_folder(config_for(tmp_path, setting), "one")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_damaged_run_json_is_named_and_its_folder_left_alone(tmp_path: Path) -> None:
    prepare_run_folder(config_for(tmp_path / "a"), "one")
    file = tmp_path / "a" / "run.json"
    file.write_text(file.read_text()[:20])
    for setting in ("resume=auto", "overwrite=true"):
        with pytest.raises(RunFolderError, match=r"run\.json cannot be read.*Restore the file from a copy"):
            prepare_run_folder(config_for(tmp_path / "a", setting), "two")


def test_secrets_are_blotted_out_and_numbers_of_tokens_are_not() -> None:
    shown = redacted({"hub": {"api_key": "abc", "Password": "x"}, "max_new_tokens": 12, "replay": {"keys": ""}})
    assert shown == {"hub": {"api_key": "***", "Password": "***"}, "max_new_tokens": 12, "replay": {"keys": ""}}
    deep = {"judges": [{"token": "abc", "url": "u"}], "api_keys": ["abc", "def"], "tokens": {"hub": "abc", "most": 3}}
    assert redacted(deep) == {
        "judges": [{"token": "***", "url": "u"}],
        "api_keys": ["***", "***"],
        "tokens": {"hub": "***", "most": 3},
    }


def test_a_run_that_a_later_start_has_resumed_was_taken_over_and_its_folder_not_moved(tmp_path: Path) -> None:
    """A second learner of one folder ended the first with `was moved, deleted or recreated`."""
    config = config_for(tmp_path / "a")
    folder = prepare_run_folder(config, "one")
    config.resume = "auto"
    prepare_run_folder(config, "two")
    with (
        pytest.raises(RunFolderError, match="a later start with resume has taken this run over"),
        still_of("one", folder),
    ):
        raise FileNotFoundError


def test_whatever_ends_a_process_whose_folder_was_taken_away_it_ends_of_that(tmp_path: Path) -> None:
    folder = prepare_run_folder(config_for(tmp_path / "a"), "one")
    with pytest.raises(FileNotFoundError), still_of("one", folder):
        raise FileNotFoundError
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match="was moved, deleted or recreated"), still_of("one", folder):
        raise FileNotFoundError
