from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config import load_config
from asyncrl.settings.replay import ReplayConfig
from asyncrl.storage.checkpoints import CHECKPOINT_DIR
from asyncrl.storage.lines import LineFile
from asyncrl.telemetry.metrics.evaluations import by_step
from asyncrl.telemetry.metrics.registry import unit_of
from asyncrl.telemetry.reports.curves import PANELS, curves_of, plot_curves
from asyncrl.telemetry.reports.summary import QUICKSTART, read_metrics, series, suggestions, summary

ROWS = [
    {
        "step": step,
        "policy_version": step + 1,
        "time": 100.0 + step,
        "reward/mean": step / 10,
        "staleness/mean": 1.0,
        "staleness/max": 2.0,
        "idle/learner": 0.5,
        "idle/rollout": 0.0,
    }
    for step in range(1, 11)
]


EVALUATIONS = [
    {
        "step": step,
        "policy_version": step + 1,
        "time": 200.0,
        "eval/heldout/accuracy": mean,
        **{"eval/heldout/accuracy_low": mean - 0.01, "eval/heldout/accuracy_high": mean + 0.02},
        "eval/heldout/count": count,
    }
    | {"eval/heldout/failed": 256 - count, "eval/heldout/superseded": superseded}
    for step, mean, count, superseded in ((10, 0.97, 256, 2), (0, 0.2, 18, 0))
]


def test_the_summary_ends_with_the_setting_to_change() -> None:
    assert "give GPUs to rollout.workers" in summary(ROWS, ReplayConfig()).splitlines()[-1]
    assert "rollout.workers" not in summary(ROWS)


def test_the_summary_says_from_where_to_where() -> None:
    text = summary(by_step([*ROWS, *EVALUATIONS]))
    for part in (
        "trained 10 steps to version 11 in 0:09",
        "accuracy on heldout: 0.200 at step 0 -> 0.970 at step 10",
        "evaluation of heldout at step 0: accuracy 0.200 [0.190, 0.220] (238 of 256 rows failed",
        "2 evaluations of heldout were cancelled because none of their rows had begun when the next one was due",
        "learner waits",
    ):
        assert part in text
    assert "at step 10: accuracy" not in text
    next_day = [{**row, "time": row["time"] + 86400.0 * (row["step"] > 5), "time/step": 1.5} for row in ROWS]
    assert "to version 11 in 0:09" in summary(next_day), "the night between two starts is no time of training"
    set_back = [{**row, "time": row["time"] - 3600.0 * (row["step"] > 5), "time/step": 1.5} for row in ROWS]
    assert "to version 11 in 0:09" in summary(set_back), "an hour that a clock was set back is none either"


def test_each_step_is_one_row_with_the_newest_evaluation_of_its_weights() -> None:
    again = EVALUATIONS[0] | {"time": 300.0, "eval/heldout/accuracy": 0.5}
    rows = by_step([EVALUATIONS[0], *ROWS, EVALUATIONS[1], again])
    assert [row["step"] for row in rows] == list(range(11))
    assert rows[10]["eval/heldout/accuracy"] == 0.5 and rows[10]["time"] == 110.0
    assert rows[10]["reward/mean"] == 1.0 and "reward/mean" not in rows[0]


def test_the_summary_says_how_many_completions_got_no_reward_and_why() -> None:
    failed = {"reward/failed": 3.0, "reward/failed_raised": 3.0}
    assert "completions without a reward: 3 (raised 3)" in summary([ROWS[0], ROWS[1] | failed])
    assert "no reward" not in summary(ROWS)


def test_a_run_without_a_step_says_so() -> None:
    assert summary([]) == summary(by_step(EVALUATIONS[1:])) == "no step was trained"


def test_a_row_cut_off_by_a_kill_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2')
    assert read_metrics(tmp_path) == [{"step": 1}]
    assert read_metrics(tmp_path / "nowhere") == []


def test_lines_that_cannot_be_read_are_counted_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n3\n')
    assert read_metrics(tmp_path) == [{"step": 1}]
    assert [record.getMessage() for record in caplog.records] == [f"{file}: 1 lines cannot be read and are left out"]


def test_a_file_that_ends_before_the_newest_checkpoint_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run whose last rows are gone was compared as one that had trained less."""
    LineFile(tmp_path / "metrics.jsonl").append([{"step": step} for step in (1, 2, 3)])
    for name in ("step_2", "step_3", "left_step_9", "step_4.tmp"):
        (tmp_path / CHECKPOINT_DIR / name).mkdir(parents=True)
    assert len(read_metrics(tmp_path)) == 3 and not caplog.messages
    (tmp_path / CHECKPOINT_DIR / "step_4").mkdir()
    assert len(read_metrics(tmp_path)) == 3
    said = "ends at step 3, but there is a checkpoint of step 4. Was the file truncated?"
    assert caplog.messages == [f"{tmp_path}/metrics.jsonl {said}"]


def test_the_curves_are_a_png_even_when_some_are_missing(tmp_path: Path) -> None:
    for name, rows in (
        ("full.png", by_step([*ROWS, *EVALUATIONS])),
        ("bare.png", [{"step": 1, "policy_version": 1, "time": 0.0}]),
    ):
        plot_curves(rows, tmp_path / name, "title")
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_every_curve_has_the_numbers_of_the_rows_a_unit_and_whole_steps() -> None:
    of_names = [name for panel in PANELS for name in panel.names]
    names = [name.replace("*", "heldout", 1) for name in of_names if name.startswith("eval/")] + [
        name.replace("*", "stale") for name in of_names if not name.startswith("eval/")
    ]
    rows: list[dict[str, Any]] = [
        {"step": step, "time": 0.0, **{name: 1.0 + step / 7 + place for place, name in enumerate(names)}}
        for step in range(1, 41)
    ]
    for row in [*rows[:4], rows[20]]:
        row |= {"eval/heldout/reward_low": row["eval/heldout/reward"] - 0.25, "eval/heldout/reward_high": 99.0}
    figure = curves_of(rows, "title")
    assert len(figure.axes) == len(PANELS)
    lines = {str(line.get_label()).partition(" ")[0]: line for axes in figure.axes for line in axes.lines}
    assert set(lines) == set(names)
    for name, line in lines.items():
        assert (np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()) == series(rows, name)
    for axes in figure.axes:
        assert axes.get_xlabel() == "step" and all(tick == int(tick) for tick in axes.get_xticks())
        assert axes.get_ylabel() == ", ".join(
            dict.fromkeys(unit_of(str(line.get_label()).partition(" ")[0]) for line in axes.lines)
        )
    bands = [band for axes in figure.axes for band in axes.collections]
    for band, known in zip(bands, (rows[:4], [rows[20]]), strict=True):  # nothing is drawn where none is known
        corners = {(float(x), float(y)) for x, y in np.asarray(band.get_paths()[0].vertices)}
        assert {(row["step"], row["eval/heldout/reward"] - 0.25) for row in known} <= corners
        assert {(row["step"], 99.0) for row in known} <= corners
        assert {x for x, _ in corners} == {row["step"] for row in known}


def test_an_evaluation_again_whose_rows_all_failed_has_no_mean_of_the_one_before() -> None:
    before = {"step": 4, "eval/heldout/count": 3.0, "eval/heldout/failed": 5.0, "eval/heldout/reward": 0.5}
    again = {"step": 4, "eval/heldout/count": 0.0, "eval/heldout/failed": 8.0}
    other = {"step": 4, "eval/other/count": 8.0, "eval/other/reward": 1.0}
    (row,) = by_step([before, other, again])
    assert row == {**other, **again}
    (row,) = by_step([again, other, before])
    assert row == {**other, **before}


def test_every_suggested_command_is_a_valid_configuration() -> None:
    required = ["model.path=m", "data.path=d", "reward.function=r.py:f"]
    for typed in (("asyncrl", "local"), *QUICKSTART):
        given = [*required, "run.dir=x", "resume=auto", "learner.copy_to=s3://b/x"]
        lines = suggestions(load_config(required), [*typed, *given], given)
        # That uncorrected old data breaks it was measured on the quickstart's task and no other.
        assert any("no_correction" in line for line in lines) == (typed in QUICKSTART)
        assert len(lines) == 2 + (typed in QUICKSTART)
        for line in lines:
            command, _, why = line.partition("#")
            assert why.strip()
            again = load_config(shlex.split(command)[2:])
            assert again.run.dir == f"runs/{again.run.name}" != "runs/run"
            assert not again.learner.copy_to, "where the copies of this run lie no other begins"


def test_a_command_that_would_be_refused_is_not_suggested() -> None:
    given = ["model.path=m", "data.path=d", "reward.function=r.py:f", "loss=custom", "loss.function=mine.py:f"]
    lines = suggestions(load_config(given), [*QUICKSTART[0], *given], given)
    assert [line.split("=")[0] for line in (each.partition("run.name=run-")[2] for each in lines)] == [
        "sync replay",
        "seed1 seed",
    ]


def test_a_long_command_is_suggested_by_its_run_folder(tmp_path: Path) -> None:
    given = [
        "model.path=m",
        "reward.function=r.py:f",
        f"run.dir={tmp_path}/run",
        f"data.path={'x' * 700}.jsonl",
    ]
    lines = suggestions(load_config(given), ["asyncrl", "local", *given], given)
    assert lines and all(line.startswith(f"asyncrl local {tmp_path}/run/config.yaml run.name=run-") for line in lines)
    assert max(map(len, lines)) < 120 + len(str(tmp_path))
