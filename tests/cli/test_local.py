"""Tests of `asyncrl local` with small fake roles: messages at the start and the end."""

from __future__ import annotations

import errno
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from asyncrl.cli import local
from asyncrl.cli.dry_run.command import resume_lines
from asyncrl.cli.local import check_room, show_report
from asyncrl.cli.processes.ending import Ended
from asyncrl.config import load_config
from asyncrl.errors import CheckpointDamagedError, RunFolderError
from asyncrl.learner.checkpoints.checkpoint import Checkpoints, LearnerState
from asyncrl.schema import Config
from asyncrl.storage import sealed
from asyncrl.storage.checkpoints import begin_branch, newest_proven
from asyncrl.telemetry.folder.resumed import resumed_lines
from asyncrl.telemetry.folder.run_folder import begin_settings, origin_of, prepare_run_folder
from asyncrl.telemetry.reports import curves
from tests.cli.fake_roles import FINE, FOREVER, roles

pytestmark = pytest.mark.timeout(400)


REQUIRED = ["model.path=m", "data.path=d.jsonl", "reward.function=r.py:f"]


def test_a_start_says_what_the_learner_will_do_when_the_link_to_the_newest_checkpoint_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = load_config([*REQUIRED, f"run.dir={tmp_path / 'run'}", "learner.steps=30"])
    folder = prepare_run_folder(first, "one")
    saved = folder / "ckpt" / "step_20"
    saved.mkdir(parents=True)
    state = LearnerState(step=19, policy_version=20, skipped_steps=0, run=origin_of(folder))
    (saved / "state.json").write_text(json.dumps(asdict(state)))
    sealed.seal(saved)
    monkeypatch.setattr(local, "local_commands", lambda *_: roles(learner=FINE))
    resumed = replace(first, resume="auto")
    assert local._run(resumed, [], ["asyncrl", "local"]) == 0
    said = capsys.readouterr().out
    assert "latest is missing: continuing from step_20" in said and "\nresumed from step 20\n" in said
    assert Checkpoints(folder / "ckpt", rank=0, keep=1).choose("auto", restarted=False) == saved


def a_run_with_two_checkpoints(tmp_path: Path) -> tuple[Config, Path]:
    first = load_config([*REQUIRED, f"run.dir={tmp_path / 'run'}", "learner.steps=30"])
    folder = prepare_run_folder(first, "one")
    for step in (10, 20):
        saved = folder / "ckpt" / f"step_{step}"
        saved.mkdir(parents=True)
        state = LearnerState(step=step - 1, policy_version=step, skipped_steps=0, run=origin_of(folder))
        (saved / "state.json").write_text(json.dumps(asdict(state)))
        sealed.seal(saved)
    (folder / "ckpt" / "latest").symlink_to("step_20")
    return first, folder / "ckpt" / "step_20"


def test_a_damaged_checkpoint_is_judged_before_it_is_said_from_which_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, damaged = a_run_with_two_checkpoints(tmp_path)
    (damaged / "state.json").write_text("{")
    monkeypatch.setattr(local, "local_commands", lambda *_: roles(learner=FINE))
    assert local._run(replace(first, resume="auto"), [], ["asyncrl", "local"]) == 0
    said = capsys.readouterr().out
    assert "step_20/state.json has 1 bytes" in said and "A resume passes it over" in said
    assert "\nresumed from step 10\n" in said and "from step 20" not in said
    changed = replace(first, resume="auto", learner=replace(first.learner, lr=2e-6))
    assert resumed_lines(changed, damaged.parents[1], ["x"]) == ["# resumed from step_10: x"]
    with pytest.raises(CheckpointDamagedError, match=r"state\.json has 1 bytes"):
        local._run(replace(first, resume=str(damaged)), [], ["asyncrl", "local"])
    assert "resumed from" not in capsys.readouterr().out


@pytest.mark.parametrize("first", ["learner", "replay"])
def test_a_run_whose_folder_was_taken_away_says_so_and_makes_no_new_one_in_its_place(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The replay server is otherwise restarted."""
    config = load_config([*REQUIRED, f"run.dir={tmp_path / 'run'}"])
    away = f"import os; os.rename({str(tmp_path / 'run')!r}, {str(tmp_path / 'elsewhere')!r}); raise SystemExit(1)"
    monkeypatch.setattr(local, "local_commands", lambda *_: roles(**{"learner": FOREVER, first: away}))
    assert local._run(config, [], ["asyncrl", "local"]) == 1
    said = capsys.readouterr().out
    assert f"run.dir={tmp_path / 'run'} was moved, deleted or recreated" in said and "Continue with" not in said
    assert not (tmp_path / "run").exists()


def test_a_resume_that_changes_settings_reads_its_checkpoint_once_before_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, newest = a_run_with_two_checkpoints(tmp_path)
    read: list[Path] = []

    def digest(path: Path, real: Callable[[Path], str] = sealed._digest) -> str:
        read.append(path.parent)
        return real(path)

    monkeypatch.setattr(sealed, "_digest", digest)
    monkeypatch.setattr(local, "local_commands", lambda *_: roles(learner=FINE))
    changed = replace(first, resume="auto", learner=replace(first.learner, lr=2e-6))
    assert local._run(changed, [], ["asyncrl", "local"]) == 0
    assert read == [newest]
    begin_settings(changed, {})
    text = (newest.parents[1] / "config.yaml").read_text()
    assert text.startswith("# resumed from step_20: learner.lr: 1e-06 -> 2e-06\n")


def test_a_plan_of_a_resume_says_from_which_checkpoint_and_refuses_what_the_start_would(
    tmp_path: Path,
) -> None:
    first, newest = a_run_with_two_checkpoints(tmp_path)
    auto = replace(first, resume="auto")
    assert resume_lines(first, "local") == []
    assert resume_lines(auto, "local")[-1] == f"continues from {newest}, of step 20"
    (newest / "state.json").write_text("{")
    for command in ("local", "learner"):
        said = resume_lines(auto, command)
        assert "step_20/state.json has 1 bytes" in said[0] and said[-1].endswith("step_10, of step 10")
        with pytest.raises(CheckpointDamagedError, match=r"state\.json has 1 bytes"):
            resume_lines(replace(first, resume=str(newest)), command)
    shutil.rmtree(newest.parent)
    begin_branch(newest.parent, tmp_path / "other" / "step_8", "other/step_8", "start")
    for command in ("local", "learner"):
        with pytest.raises(
            RunFolderError, match="Continue with resume=other/step_8, or start again with overwrite=true"
        ):
            resume_lines(auto, command)
    assert newest_proven(newest.parents[1], print) is None, "whoever only looks is told of none"


def test_the_report_leaves_curves_and_suggestions(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "policy_version": 1, "time": 1.0, "reward/mean": 0.5}\n')
    out = io.StringIO()
    console = Console(file=out, width=300)
    show_report(load_config(REQUIRED), tmp_path, console, ["asyncrl", "local", *REQUIRED], Ended(code=0), REQUIRED)
    assert (tmp_path / "curves.png").exists()
    assert "trained 1 steps to version 1" in out.getvalue()
    assert "asyncrl local model.path=m data.path=d.jsonl reward.function=r.py:f run.name=run-sync" in out.getvalue()


def test_nothing_is_drawn_after_a_second_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "policy_version": 1, "time": 1.0, "reward/mean": 0.5}\n')
    out = io.StringIO()
    ended = Ended(code=130, hurried=True)
    show_report(load_config(REQUIRED), tmp_path, Console(file=out, width=300), ["asyncrl", "local"], ended, REQUIRED)
    assert not (tmp_path / "curves.png").exists()
    assert f"not drawn in haste; `asyncrl report {tmp_path}` draws them" in out.getvalue()


@pytest.mark.parametrize("rewards", [(0.5, 0.5), (-1.7e308, 1.7e308)])
def test_a_report_that_cannot_be_drawn_says_so_and_does_not_hide_how_the_run_ended(
    rewards: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if max(rewards) < 1:
        monkeypatch.setattr(curves, "plot_curves", full)
    rows = [
        {"step": step, "policy_version": step, "time": 1.0, "reward/mean": each} for step, each in enumerate(rewards)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = io.StringIO()
    console = Console(file=out, width=300)
    show_report(load_config(REQUIRED), tmp_path, console, ["asyncrl", "local", *REQUIRED], Ended(code=0), REQUIRED)
    assert "not drawn" in out.getvalue() and "now try" in out.getvalue()


def test_a_disk_without_room_for_the_journal_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=100 << 20)
    monkeypatch.setattr(local.shutil, "disk_usage", lambda folder: free)
    config = load_config([*REQUIRED, "replay.journal.segment_mb=101"])
    with pytest.raises(RunFolderError, match=r"100 MiB free, .*segment_mb=101 MiB. Free space"):
        check_room(config, tmp_path)
    check_room(load_config([*REQUIRED, "replay.journal.segment_mb=100"]), tmp_path)
    free.free = 0
    check_room(load_config([*REQUIRED, "replay.durability=memory"]), tmp_path)
    (tmp_path / "journal").mkdir()
    check_room(config, tmp_path)  # a resume: its files have their room already
