"""Runs of `asyncrl eval` as a user starts them: killed, stopped, and continued."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.main import main
from asyncrl.config import load_config
from asyncrl.telemetry.folder.run_folder import write_config
from tests.waiting import until

REWARD = """
import os, time

def score(completion, row):
    time.sleep(float(os.environ.get("EVAL_TEST_SLOW", 0)))
    return {"score": float("a" in completion), "letters": len(completion)}
"""
ROWS, SAMPLES = 40, 2
PATIENCE_S = 240.0


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until(condition, process.communicate, within_s=PATIENCE_S, holds=lambda: process.poll() is None)


def rows_in(path: Path) -> list[dict[str, Any]]:
    """Without a line that is being written."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def by_place(lines: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    """The newest of each sample."""
    return {(line["row"], line["sample"]): line for line in lines}


@pytest.fixture
def task(tiny_task: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("r.py").write_text(REWARD)
    sources = ("math", "gsm8k")
    rows = ({"prompt": f"{n}>", "data_source": sources[n % 2]} for n in range(ROWS))
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["data.path=d.jsonl", "reward.function=r.py:score", "rollout.max_new_tokens=12"]
    return [tiny_task["model.path"], *settings, f"eval.samples={SAMPLES}", "eval.temperature=1", "eval.answer=text"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_evaluation_that_is_killed_and_stopped_ends_with_the_samples_of_one_that_was_not(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = [*task, "engine=fake", "run.name=whole"]
    assert main(["eval", *whole]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line[:5] in ("gsm8k", "math ", "all  ")] == [
        "gsm8k", "math", "all"
    ]  # fmt: skip
    expected = by_place(rows_in(Path("runs/whole/samples.jsonl")))
    assert sorted(expected) == [(row, sample) for row in range(ROWS) for sample in range(SAMPLES)]
    assert all(line["rewards"]["letters"] == len(line["completion"]) for line in expected.values())

    cut, samples = [*task, "engine=fake", "run.name=cut"], Path("runs/cut/samples.jsonl")
    command = [sys.executable, "-m", "asyncrl.cli", "eval", *cut]
    slow = {**os.environ, "EVAL_TEST_SLOW": "0.3"}
    with subprocess.Popen(command, env=slow, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as first:
        wait_for(lambda: len(rows_in(samples)) >= 4, first)
        first.kill()
    survived = rows_in(samples)
    assert 4 <= len(survived) < ROWS * SAMPLES

    with subprocess.Popen(command, env=slow, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as second:
        wait_for(lambda: len(rows_in(samples)) >= len(survived) + 4, second)
        second.send_signal(signal.SIGINT)
        said, _ = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 130, said
    assert f"continues: {len(survived) // SAMPLES} of {ROWS} rows are done" in said
    assert "Continue with:\n  asyncrl eval " in said and "run.name=cut" in said.splitlines()[-1]

    assert main(["eval", *cut, "seed=1"]) == 2
    assert "other settings: seed: 0 -> 1. Give the same settings" in capsys.readouterr().err
    assert main(["eval", *cut]) == 0
    lines = rows_in(samples)
    assert lines[: len(survived)] == survived
    assert len(lines) == ROWS * SAMPLES, "a row that was done was made again"
    assert by_place(lines) == expected
    tables = [json.loads(Path(f"runs/{name}/results.json").read_text())["table"] for name in ("whole", "cut")]
    assert tables[0] == tables[1]
    capsys.readouterr()

    before = samples.read_bytes()
    assert main(["eval", *cut, "eval.pass_score=0.5"]) == 0  # nothing is missing: the table alone
    assert "avg@2" in capsys.readouterr().out and samples.read_bytes() == before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_of_transformers_is_evaluated_in_a_folder_of_its_own_per_settings(
    task: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*task, "data.max_prompt_tokens=32", "eval.rows=6"]
    assert main(["eval", *given]) == 0
    assert main(["eval", *given, "seed=3"]) == 0
    folders = sorted(Path("runs").iterdir())
    assert len(folders) == 2 and all(folder.name.startswith("eval-model-d-") for folder in folders)
    found = [by_place(rows_in(folder / "samples.jsonl")) for folder in folders]
    assert all(sorted(lines) == [(row, sample) for row in range(6) for sample in range(SAMPLES)] for lines in found)
    assert found[0] != found[1]
    capsys.readouterr()
    assert main(["eval", *given, "--dry-run"]) == 0
    assert f"folder: {folders[0].resolve()}" in (out := capsys.readouterr().out) or str(folders[1].resolve()) in out
    assert "nothing was started" in out
    assert main(["eval", *given, "eval.temperature=0"]) == 2
    assert "would give the same completion" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_evaluated_with_its_own_settings_where_none_are_given(
    task: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, *settings = task
    config = load_config([f"model.path={model}", *settings, "engine=fake", "eval.path=held.jsonl", "run.name=first"])
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    write_config(config, run)
    (run / "run.json").write_text('{"run_id": "1", "origin": "1"}')
    assert main(["eval", "runs/first"]) == 2
    assert "has exported no model yet" in capsys.readouterr().err
    shutil.copytree(model, run / "hf")
    Path("held.jsonl").write_text('{"prompt": "one>"}\n')
    assert main(["eval", "runs/first"]) == 0
    assert "runs/first/hf on held.jsonl: 1 rows, 2 sample(s)" in capsys.readouterr().out
    assert main(["eval", "runs/first", "data.path=d.jsonl", "eval.rows=2"]) == 0
    assert "runs/first/hf on d.jsonl: 2 rows" in capsys.readouterr().out
    assert len(list((tmp_path / "runs").glob("eval-first-held-*"))) == 1
