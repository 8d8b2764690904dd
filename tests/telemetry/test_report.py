from __future__ import annotations

import shlex
from pathlib import Path

from asyncrl.config import load_config
from asyncrl.telemetry.report import plot_curves, read_metrics, suggestions, summary

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
        **({"eval/heldout/accuracy": 0.2 if step == 1 else 0.97} if step in (1, 10) else {}),
    }
    for step in range(1, 11)
]


def test_the_summary_says_from_where_to_where() -> None:
    text = summary(ROWS)
    for part in ("trained 10 steps to version 11", "0.200 at step 1 -> 0.970 at step 10", "learner waits"):
        assert part in text


def test_a_run_without_a_step_says_so() -> None:
    assert summary([]) == "no step was trained"


def test_a_row_cut_off_by_a_kill_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2')
    assert read_metrics(tmp_path) == [{"step": 1}]
    assert read_metrics(tmp_path / "nowhere") == []


def test_the_curves_are_a_png_even_when_some_are_missing(tmp_path: Path) -> None:
    for name, rows in (("full.png", ROWS), ("bare.png", [{"step": 1, "policy_version": 1, "time": 0.0}])):
        plot_curves(rows, tmp_path / name, "title")
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_every_suggested_command_is_a_valid_configuration() -> None:
    required = ["model.path=m", "data.path=d", "reward.function=r.py:f"]
    lines = suggestions(load_config(required), ["asyncrl", "local", *required, "run.dir=x", "resume=auto"])
    assert len(lines) == 3
    for line in lines:
        command, _, why = line.partition("#")
        assert why.strip()
        again = load_config(shlex.split(command)[2:])
        assert again.run.dir == f"runs/{again.run.name}" != "runs/run"
