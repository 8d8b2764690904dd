"""Every benchmark runs and answers one question with one line; RESULTS.md and the README say what the lines say."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from asyncrl.config import load_config
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from asyncrl.quickstart.modes import write_modes
from asyncrl.quickstart.prepare import cache_folder, quickstart_overrides
from asyncrl.quickstart.recipes import WarmupRecipe
from benchmarks.parts import gym_base
from benchmarks.parts.cells import Cell, CellsFile
from benchmarks.parts.held_age import Rollouts, run_held
from benchmarks.parts.model import tiny_model
from benchmarks.parts.quickstart import SMALL
from benchmarks.parts.results import PAGE, figure, page, read

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("_"))
LONG = {"deaths", "nodes", "plan_models", "pretrained", "trl"}
"""`deaths` starts every role of a run again, `nodes` waits for torchrun's own deadlines; `trl` makes an environment
with another framework in it: minutes, and a network, as `pretrained` needs for its model. `plan_models` are
runs of the quickstart with other settings, as `overlap` is."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the quickstart finds a base model; a random one, so that none has to be trained."""
    root = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASYNCRL_CACHE", str(root))
        folder = cache_folder(WarmupRecipe())
    tiny_model().save_pretrained(folder / "model")
    save_byte_tokenizer(folder / "model")
    write_modes(folder, seed=0, train_rows=64, eval_rows=8)
    return root


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in BENCHMARKS]
)
def test_a_benchmark_without_arguments_prints_one_line_with_its_answer(name: str, cache: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--smoke"],
        cwd=ROOT,
        env=os.environ | {"ASYNCRL_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = done.stdout.splitlines()
    record = json.loads(line)
    assert record["benchmark"] == f"benchmarks.{name}" and record["smoke"] is True
    assert record["date"] and record["commit"] and "cores" in record["machine"]
    assert numbers(record["result"]), "no number in the answer"


def numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, int | float) else []


def held(cache: Path, age: int, *more: str) -> list[dict[str, float]]:
    """The rows of a run in this process whose data is held at `age`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASYNCRL_CACHE", str(cache))
        settings = quickstart_overrides(cache_folder(WarmupRecipe()), [*SMALL, "learner.steps=5", *more])
    gates = (f"replay.max_staleness={age + 4}", "replay.pipeline_depth=2")
    config = load_config([*settings, *gates])
    with Rollouts(config) as rollouts:
        return run_held(config, rollouts, age=age, groups=4 // config.replay.max_times_sampled).rows.steps


@pytest.mark.unhurried
def test_data_is_held_at_exactly_its_age(cache: Path) -> None:
    rows = held(cache, 2)
    assert [(row["staleness/mean"], row["staleness/max"]) for row in rows] == [(0, 0), (1, 1), (2, 2), (2, 2), (2, 2)]


@pytest.mark.unhurried
def test_a_held_run_that_uses_groups_twice_makes_half_as_many_for_each_step(cache: Path) -> None:
    """Of 4 per step: A is trained in steps 0 and 1, what is made before steps 1 and 2 in steps 2 and 3, and so on."""
    rows = held(cache, 0, "replay.max_times_sampled=2")
    assert [row["staleness/max"] for row in rows] == [0, 1, 1, 2, 1]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_begins_with_its_one_question(name: str) -> None:
    said = ast.get_docstring(ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text())) or ""
    first = said.partition("\n\n")[0]
    assert first.count("?") == 1, first
    assert f"python -m benchmarks.{name}" in said


def test_the_page_of_results_is_what_its_lines_make() -> None:
    assert PAGE.read_text() == page(read()), "run: python -m benchmarks"


def test_every_figure_of_the_readme_is_the_one_that_was_measured() -> None:
    quoted = re.findall(r"([\d.,]+)<!-- (.+?) -->", (ROOT / "README.md").read_text())
    assert 0 < len(quoted) <= 6
    records = read()
    for said, place in quoted:
        measured = re.match(r"[\d.]+", str(figure(records, place)))
        assert measured is not None and float(said.replace(",", "")) == float(measured.group()), place


def test_cells_of_other_settings_are_others_and_told_by_what_they_had_more(tmp_path: Path) -> None:
    cell = Cell(loss="dppo_tv", staleness=8, lr=1e-3, seed=0)
    rows = [
        {**asdict(cell), "overrides": list(given), "final": 0.1 * len(given)} for given in (["e"], ["e", "b=2"], [])
    ]
    for row in rows:
        CellsFile(tmp_path / "cells", []).append(row)
    assert CellsFile(tmp_path / "cells", ["e"]).read() == {cell: rows[0]}
    assert CellsFile(tmp_path / "cells", ["e"]).read_more() == {"b=2": {cell: rows[1]}}


def test_a_smoke_run_and_a_line_of_something_else_are_not_kept(tmp_path: Path) -> None:
    kept = {"benchmark": "b", "command": "c", "date": "2026-01-01", "commit": "", "machine": "m", "result": {"x": 1}}
    lines = tmp_path / "b.jsonl"
    lines.write_text(json.dumps(kept | {"smoke": True}))
    with pytest.raises(ValueError, match=r"b\.jsonl:1 is a --smoke run"):
        read(tmp_path)
    lines.write_text(json.dumps(kept) + "\n" + json.dumps({"step": 3}))
    with pytest.raises(ValueError, match=r"b\.jsonl:2 is no record"):
        read(tmp_path)


def test_the_newest_line_of_a_command_is_shown_and_quoted(tmp_path: Path) -> None:
    kept = {"benchmark": "b", "command": "c", "commit": "", "machine": "m"}
    rows = [kept | {"date": "2026-02-01", "result": {"runs": [{"x": 1}, {"x": 2}]}}]
    rows += [kept | {"date": "2026-01-01", "result": {"runs": [{"x": 8}, {"x": 9}]}}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    records = read(tmp_path)
    assert figure(records, "b/runs/1/x") == 2
    assert "| 1 | 2 |" in page(records) and "| 1 | 9 |" not in page(records)
    with pytest.raises(KeyError, match="none of the newest lines"):
        figure(records, "b/runs/2/x")


def test_what_the_gym_holds_out_is_never_trained_and_the_wrong_way_of_its_warm_up_has_no_reward():
    pytest.importorskip("reasoning_gym")
    trained, held = gym_base.questions()
    asked = [{row["prompt"][0]["content"] for row in rows} for rows in (trained, held)]

    assert not asked[0] & asked[1]
    assert {row["reasoning_gym"]["task"] for row in held} == set(gym_base.TASKS)
    assert (gym_base.beside("-29"), gym_base.beside("abz")) == ("-3:", "bc{")
    assert not any(gym_base.beside(row["answer"]) == row["answer"] for row in held)
