"""What a resume prints and starts, depending on what was trained and exported before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import sft
from asyncrl.cli.main import main
from asyncrl.cli.processes.ending import Ended
from asyncrl.errors import CheckpointDamagedError, CheckpointMismatchError
from asyncrl.learner.checkpoints.resume import Start, begin
from asyncrl.sft.__main__ import open_log
from asyncrl.telemetry.folder.run_folder import prepare_run_folder
from tests.sft.given import CPU, settings, train_alone

OWN = ["learner.lr=1e-2", "data.max_tokens=64"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that the ranks would have been started for."""
    steps: list[int] = []

    def supervise(commands: Any, folder: Path, total: int, *_: Any, **__: Any) -> Ended:
        steps.append(total)
        return Ended(code=0)

    monkeypatch.setattr(sft, "supervise", supervise)
    monkeypatch.setattr(sft, "tell", lambda *_: None)
    return steps


def go_on(folder: Path, *overrides: str) -> int:
    places = [f"model.path={folder / 'model'}", f"data.path={folder / 'rows.jsonl'}", f"run.dir={folder / 'run'}"]
    return sft.main([*places, *OWN, "resume=auto", *overrides])


def test_there_is_something_to_do_until_what_was_drawn_and_what_is_exported_are_of_the_last_step(
    tmp_path: Path, started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    given = settings(tmp_path, *OWN)
    prepare_run_folder(given, "one")
    train_alone(given)  # 20 rows, 6 of them in each of 4 steps
    assert go_on(tmp_path, "learner.rows_per_step=6") == 0 and not started
    assert "nothing to do: 4 steps are trained" in capsys.readouterr().out
    # Of two epochs, 20 rows are left: two steps of 12.
    assert go_on(tmp_path, "learner.rows_per_step=12", "learner.epochs=2") == 0 and started == [6]
    # Trained further and stopped: what lies in hf/ is of step 4.
    train_alone(settings(tmp_path, *OWN, "learner.epochs=2", "resume=auto"), stop_after=2)
    assert go_on(tmp_path, "learner.rows_per_step=6", "learner.steps=6") == 0 and started == [6, 6]


def test_a_damaged_checkpoint_is_passed_over_by_what_is_said_and_by_what_is_counted(
    tmp_path: Path, started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    given = settings(tmp_path, *OWN, "learner.save_every=2")
    prepare_run_folder(given, "one")
    train_alone(given)
    (tmp_path / "run" / "ckpt" / "step_4" / "state.json").write_text("{")
    assert go_on(tmp_path, "learner.rows_per_step=6", "learner.save_every=2") == 0 and started == [4]
    said = " ".join(capsys.readouterr().out.split())
    assert "step_4/state.json has 1 bytes" in said and "resumed from step 2" in said
    for path in (tmp_path / "run" / "ckpt").glob("step_*/state.json"):
        path.write_text("{")
    with pytest.raises(CheckpointDamagedError):
        go_on(tmp_path, "learner.rows_per_step=6", "learner.save_every=2")
    assert "resumed from" not in capsys.readouterr().out and started == [4]


def test_a_start_that_saved_nothing_leaves_no_rows_behind(tmp_path: Path) -> None:
    given = settings(tmp_path)
    for _ in range(2):
        log = open_log(given, tmp_path, Start())
        log.write(0, None, {"eval/heldout/loss": 3.0})
        log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0]


def test_what_reads_a_journal_names_a_run_that_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = settings(tmp_path)
    folder = prepare_run_folder(given, "one")
    for kept in ("run.json and config.yaml", "config.yaml"):
        for command in ("audit", "rerun"):
            assert main([command, given.run.dir]) == 2
            assert "is a run of asyncrl sft" in capsys.readouterr().err, kept
        (folder / "run.json").unlink(missing_ok=True)


def test_reinforcement_learning_does_not_go_on_from_a_checkpoint_of_it(tmp_path: Path) -> None:
    parts, _ = train_alone(settings(tmp_path))
    saved = tmp_path / "run" / "ckpt" / "step_4"
    replay: Any = None  # is not asked
    with pytest.raises(CheckpointMismatchError, match=r"step_4 was saved by asyncrl sft.*model\.path=.*/run/hf"):
        begin(replay, parts.checkpoints, parts.roles, saved, rank=0, device=CPU)


def test_an_export_repeats_no_run_and_says_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = settings(tmp_path, *OWN)
    prepare_run_folder(replace(given, resume="auto"), "one")
    train_alone(given)
    (tmp_path / "run" / "run.json").unlink()  # what kind of run it is stands in its settings too
    assert main(["export", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    assert "the policy after 4 steps" in said.out and "repeats" not in said.err
    assert (tmp_path / "run" / "ckpt" / "latest").exists()
